"""The two files of results, whole: OpenAI's batch output and error lines, in the order of the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made import Echo, full_work, make_job

from kvtool.batch.line import CHAT_URL, TEXT_URL
from kvtool.errors import KvtoolError, RequestRefused


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_and_errors_are_lines_of_openais_two_files(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    rows: list[Any] = [
        {"custom_id": "text", "method": "POST", "url": TEXT_URL, "body": {"prompt": "abcd"}},
        "nonsense",
        {"custom_id": "chat", "method": "POST", "url": CHAT_URL, "body": chat},
        {"custom_id": "refused", "method": "POST", "url": TEXT_URL, "body": {"prompt": "zz"}},
        {"custom_id": "text", "method": "POST", "url": TEXT_URL, "body": {"prompt": "again"}},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    make_job(tmp_path / "job", tmp_path / "in.jsonl")

    def fails(number: int, attempt: int) -> KvtoolError | None:
        return RequestRefused("not this one") if number == 2 else None

    worked = full_work(tmp_path / "job", Echo(fails=fails))
    assert (worked.answered, worked.failed, worked.why) == (2, 3, "")
    text, chatted = lines(tmp_path / "out.jsonl")
    created = text["response"]["body"].pop("created")
    assert isinstance(created, int)
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    details = {"prompt_tokens_details": {"cached_tokens": 4, "cached_tokens_by_tier": {"dram": 4}}}
    assert text == {
        "id": "batch_req_job_0",
        "custom_id": "text",
        "response": {
            "status_code": 200,
            "request_id": "batch_req_job_0",
            "body": {
                "id": "batch_req_job_0",
                "object": "text_completion",
                "model": "bytes",
                "choices": [{"index": 0, "text": "dcba", "logprobs": None, "finish_reason": "stop"}],
                "usage": {**usage, **details},
            },
        },
        "error": None,
    }
    assert chatted["custom_id"] == "chat" and chatted["response"]["body"]["object"] == "chat.completion"
    assert chatted["response"]["body"]["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ";ih:u"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    failed = lines(tmp_path / "out.errors.jsonl")
    assert [set(one) for one in failed] == [{"id", "custom_id", "response", "error", "line"}] * 3
    assert [(one["line"], one["custom_id"], one["error"]["code"]) for one in failed] == [
        (2, None, "invalid_json"),
        (4, "refused", "request_refused"),
        (5, "text", "duplicate_custom_id"),
    ]
    assert all(one["response"] is None and one["error"]["message"] for one in failed)
    assert len({one["id"] for one in [text, chatted, *failed]}) == 5


def test_a_file_of_errors_goes_when_there_are_none_any_more(tmp_path: Path) -> None:
    line = {"custom_id": "a", "url": TEXT_URL, "body": {"prompt": "abcd"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    make_job(tmp_path / "job", tmp_path / "in.jsonl")
    assert full_work(tmp_path / "job", Echo(held=lambda number: True), stop=lambda: "enough").failed == 1
    assert lines(tmp_path / "out.errors.jsonl")[0]["error"]["code"] == "not_done"
    assert full_work(tmp_path / "job", Echo()).failed == 0
    assert not (tmp_path / "out.errors.jsonl").exists()
