"""What the pages say is so: every command, flag, key and metric is documented, and every command shown exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool import __version__
from kvtool.cli import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "plugins").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(kvtool [^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
METRIC = re.compile(r'"(kvtool_[a-z0-9_]+)"')


def shown_commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of every `kvtool ...` in a code block or between backticks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        bodies = [body for _, body in FENCE.findall(text)]
        for body in [*bodies, *INLINE.findall(FENCE.sub("", text))]:
            for line in body.replace("\\\n", " ").splitlines():
                found = re.match(r"(?:\$ )?(kvtool .*)", line.strip())
                if found:
                    yield page.name, found[1]


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """Command path -> the flags it takes."""
    found = {}
    for path, command in reference.commands():
        names = {name for option in reference.options(command) for name in (*option.opts, *option.secondary_opts)}
        found[path] = names | {"--help"}
    return found


def test_reference_is_fresh() -> None:
    kept = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert kept == reference.render(), "run scripts/docs"


def test_results_in_the_readme_are_those_that_were_measured() -> None:
    kept = (ROOT / "README.md").read_text(encoding="utf-8")
    assert kept == reference.with_all_results(kept, ROOT / "tests" / "bench"), "run scripts/docs"


def test_results_not_yet_measured_say_so(tmp_path: Path) -> None:
    assert reference.results(tmp_path).startswith("Not yet measured")
    assert reference.batch_results(tmp_path).startswith("Not yet measured")
    with pytest.raises(ValueError, match="wanted the lines"):
        reference.with_results("# kvtool\n", "table")


def test_the_example_of_a_batch_job_is_one() -> None:
    from kvtool.batch.line import read_line

    shown = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Batch jobs")[2]
    lines = shown.partition("```json\n")[2].partition("```")[0].splitlines()
    lines += (ROOT / "docs" / "examples" / "batch.jsonl").read_text(encoding="utf-8").splitlines()
    assert [read_line(line.encode()).custom_id for line in lines] == ["sky", "haiku", "sky", "sea", "ice", "haiku"]


def test_every_command_and_every_flag_has_help() -> None:
    for path, command in reference.commands():
        assert command.help, f"{path} has no help"
        for option in reference.options(command):
            assert option.help, f"{path}: {option.name} has no help"


def test_every_spec_key_has_a_description() -> None:
    bare = [key for key, _, description in reference.spec_keys() if not description]
    assert bare == []


def test_every_setting_of_builds_and_connectors_has_a_description() -> None:
    bare = [key for keys in (reference.recipe_keys(), reference.connector_keys()) for key, _, text in keys if not text]
    assert [key for key in bare if not key.startswith("kv.")] == []  # the layout's own numbers


def test_every_metric_is_documented() -> None:
    written = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    sources = [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "triton_models").rglob("*.py")]
    named = {name for source in sources for name in METRIC.findall(source.read_text(encoding="utf-8"))}
    assert sorted(name for name in named if name not in written) == []


def test_every_command_shown_exists_with_its_flags(flags: dict[str, set[str]]) -> None:
    shown = list(shown_commands())
    assert shown, "no page shows a command: the pattern is broken"
    for page, line in shown:
        words = shlex.split(line, comments=True)
        path = words[0]
        for word in words[1:]:
            if f"{path} {word}" not in flags:
                break
            path = f"{path} {word}"
        assert path != "kvtool" or set(words[1:]) <= flags["kvtool"], f"{page}: no such command: {line}"
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags[path]]
        assert not unknown, f"{page}: {line}: unknown flags {unknown}"


def test_readme_keeps_its_order() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == [
        "Results",
        "Two commands",
        "Five commands to a first answer",
        "Talking to it",
        "Batch jobs",
        "The pool by itself",
        "On GPUs: TensorRT-LLM",
        "The life of one request",
        "Rooms, in reading order",
        "What it does not do yet",
        "What has been run where",
    ]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_changelog_speaks_of_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
