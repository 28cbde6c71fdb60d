"""The report of a GPU check: what was shown, what was not, and nothing that tells whose machine it was.

Pure. A step passes only with its evidence: the numbers that it promised, each within its bounds. A claim without them
is a failure, since a check that passes by accident is worse than none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

SCHEMA = 1


class Status(str, Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True)
class Step:
    """One thing to show. `evidence`: name -> the least value that shows it. `needs`: steps that must have passed."""

    name: str
    shows: str
    """What a pass means, in words."""
    timeout_s: float
    evidence: Mapping[str, float]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    name: str
    status: Status
    detail: str
    """What was found; why it failed or was skipped."""
    seconds: float = 0.0
    evidence: Mapping[str, Any] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    """Last lines of its output, of a step that failed."""


def judge(step: Step, claim: Mapping[str, Any], seconds: float) -> Result:
    """What a step's own account is worth. `claim`: status, detail and evidence as the step wrote them."""
    status, detail, found = claim.get("status"), claim.get("detail"), claim.get("evidence")
    if status not in ("pass", "fail", "skip") or not isinstance(detail, str) or not isinstance(found, dict):
        return Result(step.name, Status.FAIL, f"its account cannot be read: {str(claim)[:200]}", seconds)
    if status == "fail":
        return Result(step.name, Status.FAIL, detail or "it gave no reason", seconds, found)
    if status == "skip":
        if not detail:
            return Result(step.name, Status.FAIL, "it was skipped without a reason", seconds, found)
        return Result(step.name, Status.SKIPPED, detail, seconds, found)
    lacks = [_lack(name, least, found.get(name)) for name, least in step.evidence.items()]
    lacks = [text for text in lacks if text]
    if lacks:
        return Result(step.name, Status.FAIL, f"says that it passed, but {'; '.join(lacks)}", seconds, found)
    return Result(step.name, Status.PASS, detail, seconds, found)


def _lack(name: str, least: float, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{name} is missing" if value is None else f"{name} is {value!r}, no number"
    return "" if value >= least else f"{name} is {value}, wanted at least {least:g}"


@dataclass(frozen=True)
class Report:
    """`machine`: facts of the host, scrubbed. `results`: one for each step, in order."""

    version: str
    began: str
    machine: Mapping[str, Any]
    steps: Sequence[Step]
    results: Sequence[Result]

    def count(self, status: Status) -> int:
        return sum(result.status is status for result in self.results)

    @property
    def exit_code(self) -> int:
        """0: every step was run and passed. 1: one failed. 3: none failed, but not all were shown."""
        if self.count(Status.FAIL):
            return 1
        whole = [result.name for result in self.results] == [step.name for step in self.steps]
        return 0 if whole and self.results and self.count(Status.PASS) == len(self.results) else 3

    @property
    def verdict(self) -> str:
        said = {0: "everything was shown", 1: "something failed", 3: "not everything was shown"}[self.exit_code]
        return (
            f"{self.count(Status.PASS)} of {len(self.steps)} steps passed, {self.count(Status.FAIL)} failed, "
            f"{self.count(Status.SKIPPED)} were skipped: {said}"
        )

    def json(self) -> str:
        return (
            json.dumps(
                {
                    "schema_version": SCHEMA,
                    "kvtool": self.version,
                    "began": self.began,
                    "verdict": self.verdict,
                    "exit_code": self.exit_code,
                    "machine": dict(self.machine),
                    "steps": [
                        {"shows": step.shows, **asdict(result)}
                        for step, result in zip(self.steps, self.results, strict=False)
                    ],
                },
                indent=2,
                default=str,
            )
            + "\n"
        )

    def text(self) -> str:
        lines = [f"kvtool {self.version} GPU check, {self.began}", ""]
        lines += [f"  {name}: {value}" for name, value in self.machine.items()]
        lines.append("")
        for step, result in zip(self.steps, self.results, strict=False):
            lines.append(f"{result.status.value:<8} {step.name:<14} {result.seconds:7.1f} s  {result.detail}")
            if result.status is Status.PASS:
                lines.append(f"{'':36}shown: {step.shows}")
                lines.append(f"{'':36}{', '.join(f'{key} {value}' for key, value in result.evidence.items())}")
            lines += [f"{'':9}| {line}" for line in result.log]
        return "\n".join([*lines, "", self.verdict, ""])


_SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|nvapi-[\w-]{8,}|sk-[\w-]{8,}|ghp_\w{8,}|AKIA[0-9A-Z]{12,}|Bearer\s+\S+)"
    r"|(?i:\b\w*(?:token|secret|password|passwd|api_?key|authkey)\w*\b\s*[=:]\s*)\S+"
)
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])|\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b")
_MARK = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{20,}|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b")


class Scrub:
    """Takes out of a text what must not leave the machine: `names` (text -> what stands for it; hosts, users, paths),
    then what looks like a secret, an address or a device's own number. Longer names first, whatever the case."""

    def __init__(self, names: Mapping[str, str]) -> None:
        kept = sorted((name for name in names if len(name) > 1 and name != "/"), key=len, reverse=True)
        self._stands = {name.lower(): names[name] for name in kept}
        paths = "|".join(re.escape(name) for name in kept if name.startswith("/"))
        words = "|".join(re.escape(name) for name in kept if not name.startswith("/"))
        parts = [f"(?:{paths})(?![\\w-])" if paths else "", f"(?<![\\w-])(?:{words})(?![\\w-])" if words else ""]
        self._names = re.compile("|".join(part for part in parts if part) or r"(?!)", re.IGNORECASE)

    def __call__(self, text: str) -> str:
        text = self._names.sub(lambda found: self._stands[found[0].lower()], text)
        text = _SECRET.sub("<secret>", text)
        return _ADDRESS.sub("<address>", _MARK.sub("<id>", text))

    def value(self, value: Any) -> Any:
        """The same for every string in a table or list."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {self(str(key)): self.value(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(one) for one in value]
        return value
