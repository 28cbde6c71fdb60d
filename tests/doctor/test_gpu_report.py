"""The report of a GPU check: a pass needs its evidence, a skip its reason, and nothing in it names the machine."""

import json
from dataclasses import replace
from itertools import product

import pytest

from kvtool.doctor.gpu.report import Report, Result, Scrub, Status, Step, judge

STEP = Step("copy", "bytes come back", 10, {"bytes": 1024, "cases": 2})
GOOD = {"status": "pass", "detail": "well", "evidence": {"bytes": 4096, "cases": 2, "gbps": 3.5}}


def report(*statuses: Status) -> Report:
    steps = [replace(STEP, name=f"s{index}") for index in range(len(statuses))]
    results = [Result(step.name, status, "why") for step, status in zip(steps, statuses, strict=True)]
    return Report("1.0", "today", {"gpus": ["one"]}, steps, results)


def test_a_claim_with_its_evidence_passes() -> None:
    result = judge(STEP, GOOD, 1.5)
    assert (result.status, result.seconds, result.evidence["gbps"]) == (Status.PASS, 1.5, 3.5)


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        ({**GOOD, "evidence": {}}, "says that it passed, but bytes is missing; cases is missing"),
        ({**GOOD, "evidence": {"bytes": 0, "cases": 2}}, "bytes is 0, wanted at least 1024"),
        ({**GOOD, "evidence": {"bytes": "4096", "cases": 2}}, "bytes is '4096', no number"),
        ({**GOOD, "evidence": {"bytes": True, "cases": 2}}, "bytes is True, no number"),
        ({**GOOD, "evidence": {"bytes": float("nan"), "cases": 2}}, "bytes is nan"),
        ({**GOOD, "evidence": None}, "its account cannot be read"),
        ({**GOOD, "status": "PASS"}, "its account cannot be read"),
        ({**GOOD, "status": "skip", "detail": ""}, "it was skipped without a reason"),
        ({**GOOD, "status": "fail", "detail": ""}, "it gave no reason"),
        ({}, "its account cannot be read"),
    ],
)
def test_a_claim_that_does_not_hold_is_a_failure(claim: dict, sentence: str) -> None:
    result = judge(STEP, claim, 1.0)
    assert result.status is Status.FAIL
    assert sentence in result.detail


@pytest.mark.parametrize("statuses", list(product(Status, repeat=3)))
def test_only_a_report_of_passes_alone_exits_with_zero(statuses: tuple[Status, ...]) -> None:
    made = report(*statuses)
    wanted = 1 if Status.FAIL in statuses else 3 if Status.SKIPPED in statuses else 0
    assert made.exit_code == wanted == json.loads(made.json())["exit_code"]
    passed = statuses.count(Status.PASS)
    assert f"{passed} of 3 steps passed" in made.text()
    assert ("everything was shown" in made.text().replace("not everything", "")) is (passed == 3)
    assert made.text().count("shown: bytes come back") == passed, "what was not passed was not shown"


def test_a_report_with_a_step_missing_is_not_whole() -> None:
    made = report(Status.PASS, Status.PASS)
    assert replace(made, results=made.results[:1]).exit_code == 3
    assert replace(made, steps=[], results=[]).exit_code == 3


def test_nothing_that_names_the_machine_is_left() -> None:
    scrub = Scrub({"gpu-17": "<host>", "gpu-17.lab.example": "<host>", "anna": "<user>", "/home/anna": "~", "/": "x"})
    text = (
        "GPU-17.lab.example: /home/anna/models by Anna, annals of gpu-170, HF_TOKEN=abc123 hf_AbCdEfGh12345678 "
        "Authorization: Bearer xyz.abc at 10.1.22.3:8000 fe80:1:2:3:4:5:6:7 GPU-deadbeef-0000-1111-2222-333344445555 "
        "mac 02:42:ac:11:00:02 version 1.2.1 took 10.5 s api_key: s3cret"
    )
    assert scrub(text) == (
        "<host>: ~/models by <user>, annals of gpu-170, <secret> <secret> "
        "Authorization: <secret> at <address>:8000 <address> <id> "
        "mac <id> version 1.2.1 took 10.5 s <secret>"
    )


def test_tables_are_scrubbed_throughout() -> None:
    scrub = Scrub({"anna": "<user>"})
    assert scrub.value({"who": ["anna", {"anna": 3}], "count": 2}) == {"who": ["<user>", {"<user>": 3}], "count": 2}


def test_no_names_hide_nothing() -> None:
    assert Scrub({})("plain text") == "plain text"
