"""Intake: every line checked in one pass, tables turned into lines, and what is wrong said by number."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made import BLOCK, CONTEXT, Bytes

from kvtool.batch.intake import Checks, Taken, read_again, rejected_in, spool, take_in
from kvtool.batch.line import TEXT_URL
from kvtool.batch.source import kind_of, lines, read_mapping
from kvtool.batch.store import Store
from kvtool.errors import Missing, Refused, Unavailable

Take = Callable[..., tuple[Taken, Store]]


def ask(custom_id: str = "a", prompt: Any = "hello", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "url": TEXT_URL, "body": {"prompt": prompt, **body}})


@pytest.fixture
def take(tmp_path: Path) -> Take:
    def taken(*rows: str, **checks: Any) -> tuple[Taken, Store]:
        source = tmp_path / "in.jsonl"
        source.write_text("\n".join(rows))
        store = Store.make(tmp_path / "index")
        given = {"context_tokens_max": CONTEXT, "block_tokens": BLOCK, "max_tokens": 8, **checks}
        return take_in(source, tmp_path, store, Bytes(), Checks(**given), lambda done, total: None), store

    return taken


def test_good_lines_are_taken_and_bad_ones_named_by_line(take: Take, tmp_path: Path) -> None:
    rows = [
        ask("a"),
        "",
        "nonsense",
        ask("b", "x" * 64),
        ask("a", "again"),
        ask("c", [1, 300]),
        ask("d", [1, 2], max_tokens=99),
    ]
    taken, store = take(*rows)
    assert (taken.requests, taken.rejected) == (2, 4)
    said = [(one["line"], one["custom_id"], one["code"]) for one in rejected_in(tmp_path)]
    assert said == [
        (3, None, "invalid_json"),
        (4, "b", "prompt_too_long"),
        (5, "a", "duplicate_custom_id"),
        (6, "c", "invalid_body"),
    ]
    assert "is that of line 1 already" in list(rejected_in(tmp_path))[2]["message"]
    entries = list(store.by_number())
    assert [(one.custom_id, one.line, one.tokens_in, one.tokens_out) for one in entries] == [
        ("a", 1, 5, 8),
        ("d", 7, 2, 62),
    ]
    with (tmp_path / "in.jsonl").open("rb") as file:
        assert read_again(file, entries[1]).prompt == (1, 2)


def test_strict_stops_at_the_first_bad_line(take: Take) -> None:
    with pytest.raises(Refused, match=r"line 2: wanted one JSON object.*leave --strict out"):
        take(ask(), "{", stop_at_bad=True)


def test_without_any_request_the_first_faults_are_said(take: Take) -> None:
    with pytest.raises(Refused, match=r"none of its lines is a request: line 1: .*; line 2: .*; line 3: "):
        take("{", "[]", ask(""), "x")
    with pytest.raises(Refused, match="only blank lines"):
        take("", "  ")


def test_token_ids_are_for_engines(take: Take, tmp_path: Path) -> None:
    taken, _ = take(ask("a"), ask("b", [1, 2]), ids=False)
    assert taken.requests == 1 and next(rejected_in(tmp_path))["code"] == "unsupported"


def test_a_line_that_became_another_is_told(take: Take, tmp_path: Path) -> None:
    _, store = take(ask("a"), ask("b", seed=1), ask("c"))
    first, second, third = store.by_number()
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([ask("z"), ask("b", seed=2)]))
    with source.open("rb") as file:
        for entry, said in ((first, r"line 1 of the input \('a'\)"), (second, "line 2"), (third, "line 3")):
            with pytest.raises(Refused, match=f"{said}.* was changed while the job ran; put the file back"):
                read_again(file, entry)


def test_a_line_that_is_too_long_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.batch.source.LINE_SIZE_MAX", 50)
    path = tmp_path / "x"
    path.write_bytes(b"short\n" + b"y" * 500 + b"\n\nlast")
    with path.open("rb") as file:
        found = [(raw.line, raw.at, len(raw.data)) for raw in lines(file)]
    assert found == [(1, 0, 5), (2, 6, 51), (4, 508, 4)]


COLUMNS = {"custom_id": "id", "prompt": "text", "max_tokens": "n"}


def spooled(path: Path, kind: str, columns: dict[str, str]) -> list[dict[str, Any]]:
    made = spool(path, kind, columns, path.parent)
    return [json.loads(line) for line in made.read_text().splitlines()]


def test_csv_rows_become_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('id,text,n,t\na,"one, two",5,0.5\nb,three,,x\n')
    found = spooled(path, "csv", {**COLUMNS, "temperature": "t"})
    assert found[0] == {
        "custom_id": "a",
        "url": TEXT_URL,
        "body": {"prompt": "one, two", "max_tokens": 5, "temperature": 0.5},
    }
    assert found[1]["body"] == {"prompt": "three", "temperature": "x"}, "what does not fit is left for the line's check"


def test_csv_without_an_id_counts_rows_and_makes_chats(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("q,s\nhello,be short\nbye,\n")
    found = spooled(path, "csv", {"user": "q", "system": "s"})
    assert [one["custom_id"] for one in found] == ["row-1", "row-2"]
    assert found[0]["body"]["messages"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello"},
    ]
    assert found[1]["body"]["messages"] == [{"role": "user", "content": "bye"}]


def test_messages_may_be_json_in_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('m,e\n"[{""role"": ""user"", ""content"": ""x""}]",true\nnonsense,no\n')
    found = spooled(path, "csv", {"messages": "m", "ignore_eos": "e"})
    assert found[0]["body"] == {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    assert found[1]["body"]["messages"] == "nonsense"


def test_parquet_rows_become_lines(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", exc_type=ImportError)
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    messages = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]]
    parquet.write_table(arrow.table({"id": ["a", "b"], "m": messages, "n": [5, None]}), path)
    found = spooled(path, "parquet", {"custom_id": "id", "messages": "m", "max_tokens": "n"})
    assert found[0]["body"] == {"messages": messages[0], "max_tokens": 5} and found[1]["body"] == {
        "messages": messages[1]
    }
    parquet.write_table(arrow.table({"id": [b"a", b"b"], "text": [b"h\xc3\xa9", b"\xff"]}), path)
    found = spooled(path, "parquet", {"custom_id": "id", "prompt": "text"})
    assert (found[0]["custom_id"], found[0]["body"]["prompt"]) == ("a", "h\u00e9"), "bytes are the text that they are"
    assert found[1]["body"]["prompt"] is None, "and refused by line where they are none"
    path.write_bytes(b"no parquet")
    with pytest.raises(Refused, match="not a Parquet file"):
        spooled(path, "parquet", {"prompt": "m"})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'pyarrow'"), "need pyarrow; run: pip install 'kvtool\\[batch\\]'"),
        (ImportError("wants NumPy 2"), "the one that is installed does not load: wants NumPy 2; run: pip install"),
    ],
)
def test_without_pyarrow_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: ImportError, said: str
) -> None:
    class Absent:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == "pyarrow":
                raise error

    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with pytest.raises(Missing, match=said):
        spooled(tmp_path / "in.parquet", "parquet", {"prompt": "m"})


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("id\na\n", {"custom_id": "id"}, "say which column is the prompt"),
        ("id\na\n", {"prompt": "text"}, "no column text; there are: id"),
        ('id\n"a\n', {"prompt": "id"}, "not CSV in UTF-8"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(tmp_path: Path, text: str, columns: dict[str, str], said: str) -> None:
    path = tmp_path / "in.csv"
    path.write_text(text)
    with pytest.raises(Refused, match=said):
        spooled(path, "csv", columns)


def test_the_kind_of_a_file(tmp_path: Path) -> None:
    for name, kind in (("a.jsonl", "jsonl"), ("a.JSON", "jsonl"), ("a.csv", "csv"), ("a.parquet", "parquet")):
        (tmp_path / name).write_text("x")
        assert kind_of(tmp_path / name) == kind
    (tmp_path / "a.txt").write_text("x")
    assert kind_of(tmp_path / "a.txt", "csv") == "csv"
    (tmp_path / "empty.jsonl").touch()
    for path, said in (
        (tmp_path / "a.txt", "found .txt; say --format"),
        (tmp_path / "empty.jsonl", "the file is empty"),
        (tmp_path / "none", "found nothing"),
        (tmp_path, "found a directory"),
    ):
        with pytest.raises(Refused, match=said):
            kind_of(path)


def test_mappings() -> None:
    assert read_mapping("custom_id=ID,prompt=TEXT") == {"custom_id": "ID", "prompt": "TEXT"}
    assert read_mapping(None) == {}
    for text in ("prompt", "colour=x", "prompt=", "prompt=a,prompt=b"):
        with pytest.raises(Refused, match="--columns: wanted FIELD=COLUMN"):
            read_mapping(text)


def test_a_full_disk_is_said(take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rejected.jsonl").mkdir()
    with pytest.raises(Unavailable, match=r"the index of the job cannot be written.*make room"):
        take(ask())
