"""What a person sees of a job: its plan, how far it is, what came of it. Plain values; whoever prints is elsewhere."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvtool.batch.job import JOURNAL, is_worked_on, read_job, read_progress
from kvtool.batch.journal import Journal
from kvtool.batch.results import errors_path, write_results
from kvtool.batch.run import Counts
from kvtool.batch.submit import Made, reopen
from kvtool.batch.work import Worked


def plan_fields(made: Made) -> dict[str, Any]:
    plan = made.plan
    return {
        "requests": plan.requests,
        "rejected_lines": made.told.rejected,
        "prompt_tokens": plan.tokens_in,
        "reused_tokens": plan.reused,
        "output_tokens_max": plan.tokens_out_max,
        "prefix_groups": plan.trees,
        "estimate_s": made.estimate_s,
    }


def plan_rows(made: Made) -> list[tuple[str, str]]:
    plan = made.plan
    share = plan.reused / plan.tokens_in if plan.tokens_in else 0.0
    rows = [
        (
            "requests",
            f"{plan.requests}" + (f"; lines that are none: {made.told.rejected}" if made.told.rejected else ""),
        ),
        ("prompt tokens", f"{plan.tokens_in}"),
        ("of these reused", f"{plan.reused} ({share:.0%}), in {plan.trees} groups that begin alike"),
        ("tokens to generate", f"at most {plan.tokens_out_max}"),
    ]
    if made.told.where == "deployment":
        rows.append(("estimated time", _live_estimate(made.estimate_s)))
    elif made.estimate_s is not None:
        rows.append(("estimated time", f"about {duration(made.estimate_s)}, if every request generates all it may"))
    return rows


def _live_estimate(seconds: float | None) -> str:
    if seconds is None:
        return "not known: the deployment has measured no speed yet"
    return f"about {duration(seconds)} beside no online traffic, by the speed it has measured so far"


def duration(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{seconds:.1f} s"


def eta_s(counts: Counts) -> float | None:
    """Of what is left, at the pace of this run."""
    if not counts.run_done or counts.run_seconds <= 0:
        return None
    return (counts.requests - counts.over) * counts.run_seconds / counts.run_done


def rates(counts: Counts) -> str:
    """One line beside a progress bar."""
    if not counts.run_done:
        return f"{counts.running} running" if counts.running else "starting"
    said = [_pace(counts), f"hit {counts.hit_ratio:.0%}"]
    left_s = eta_s(counts)
    if left_s is not None:
        said.append(f"{duration(left_s)} left")
    if counts.failed:
        said.append(f"{counts.failed} failed")
    return ", ".join(said)


def _pace(counts: Counts) -> str:
    """By the minute, where a job is slow."""
    per_s = counts.run_done / max(counts.run_seconds, 1e-9)
    return f"{per_s:.2f} requests/s" if per_s >= 0.1 else f"{60 * per_s:.1f} requests/min"


def line(counts: Counts) -> str:
    """How far a job is, where there is no terminal for a bar."""
    return f"{counts.over} of {counts.requests} requests are over, {rates(counts)}"


class Pace:
    """When the next such line is due: after ten seconds, then after ten more or a tenth of the time so far."""

    def __init__(self, began_s: float) -> None:
        self._began_s, self._due_s = began_s, began_s + 10.0

    def due(self, now_s: float) -> bool:
        if now_s < self._due_s:
            return False
        self._due_s = now_s + max(10.0, 0.1 * (now_s - self._began_s))
        return True


def summary(worked: Worked) -> dict[str, Any]:
    counts = worked.counts
    return {
        "answered": counts.done,
        "failed": counts.failed,
        "left": counts.requests - counts.over,
        "retries": counts.retries,
        "seconds": round(counts.seconds, 2),
        "prompt_tokens": counts.tokens_in,
        "reused_tokens": counts.reused,
        "hit_ratio": round(counts.hit_ratio, 4),
        "reused_by_tier": dict(counts.hit_tokens),
        "reuse_saved_s": round(counts.saved_s, 2),
        "computed_tokens": counts.tokens_in - counts.reused,
        "generated_tokens": counts.tokens_out,
        "output": str(worked.output),
        "lines_without_answer": worked.failed,
    }


def summary_rows(worked: Worked) -> list[tuple[str, str]]:
    counts = worked.counts
    left = counts.requests - counts.over
    rows = [("answered", f"{counts.done} of {counts.requests} requests")]
    if counts.failed:
        rows.append(("failed for good", str(counts.failed)))
    if left:
        rows.append(("left", str(left)))
    if counts.retries:
        rows.append(("tried again", str(counts.retries)))
    took = f"{duration(counts.seconds)}, {counts.done / counts.seconds:.2f} requests/s" if counts.seconds else "no time"
    rows += [("took", took), ("prompt tokens", f"{counts.tokens_in}, of these {_reused(counts)}")]
    if counts.reused and counts.prefill_s:
        rows.append(("reuse saved", f"about {duration(counts.saved_s)} of computing"))
    rows += [("generated tokens", str(counts.tokens_out)), ("answers", str(worked.output))]
    if worked.failed:
        rows.append(("lines without one", f"{worked.failed}, with reasons in {errors_path(worked.output)}"))
    return rows


def _reused(counts: Counts) -> str:
    tiers = ", ".join(f"{tokens} from {tier}" for tier, tokens in counts.hit_tokens.items())
    return f"{counts.reused} ({counts.hit_ratio:.0%}) reused" + (f": {tiers}" if tiers else "")


def unanswered(worked: Worked) -> str:
    """Loud words for lines without an answer: how many, of what kinds, and where each one's reason stands."""
    errors, codes = errors_path(worked.output), Counter[str]()
    with contextlib.suppress(OSError, ValueError), errors.open("rb") as file:
        codes.update(json.loads(one)["error"]["code"] for one in file)
    kinds = ", ".join(f"{count} {code}" for code, count in codes.most_common(5))
    lines = "1 line has" if worked.failed == 1 else f"{worked.failed} lines have"
    return f"{lines} no answer ({kinds}); why: {errors}"


def look(folder: Path) -> dict[str, Any]:
    """How far a job is.

    Raises:
        Refused: no job there.
    """
    told, progress = read_job(folder), read_progress(folder)
    running = is_worked_on(folder)
    counts = Counts.told(progress)
    over = counts.over == told.requests
    return {
        "job": str(folder),
        "state": "running" if running else "done" if over else "stopped",
        "requests": told.requests,
        "answered": counts.done,
        "failed": counts.failed,
        "running": counts.running if running else 0,
        "rejected_lines": told.rejected,
        "requests_s": round(counts.run_done / counts.run_seconds, 3) if counts.run_seconds else None,
        "hit_ratio": round(counts.hit_ratio, 4),
        "generated_tokens": counts.tokens_out,
        "seconds": round(counts.seconds, 1),
        "left_s": round(left_s, 1) if running and (left_s := eta_s(counts)) is not None else None,
        "told_s_ago": round(time.time() - progress["at_s"], 1) if progress else None,
        "where": told.where,
        "output": told.output,
    }


def look_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """`look`, for people."""
    over = found["answered"] + found["failed"]
    rows = [("job", found["job"]), ("state", found["state"]), ("over", f"{over} of {found['requests']} requests")]
    if found["failed"]:
        rows.append(("failed for good", str(found["failed"])))
    if found["rejected_lines"]:
        rows.append(("lines that are none", str(found["rejected_lines"])))
    if found["running"]:
        rows.append(("running now", str(found["running"])))
    if found["requests_s"]:
        rows.append(("rate", f"{found['requests_s']:.2f} requests/s"))
    rows += [("reused", f"{found['hit_ratio']:.0%} of prompt tokens"), ("worked", duration(found["seconds"]))]
    if found["left_s"] is not None:
        rows.append(("left", f"about {duration(found['left_s'])}"))
    if found["state"] == "stopped":
        rows.append(("go on with", f"kvtool batch resume {found['job']}"))
    rows += [("where", f"an {found['where']}" if found["where"] == "engine" else f"a {found['where']}")]
    return [*rows, ("answers", found["output"])]


def write_so_far(folder: Path, output: Path | None) -> Worked:
    """Results from the journal as it is now.

    Raises:
        Refused: no job there.
        Unavailable: the results cannot be written.
    """
    told, store = reopen(folder)
    target, counts = output or Path(told.output), Counts(requests=told.requests)
    with (
        contextlib.closing(store),
        contextlib.closing(Journal.reading(folder / JOURNAL, told.requests)) as journal,
    ):
        answered, failed = write_results(told, folder, store, journal, target)
        for record in journal.records():
            counts.add(record)
    return Worked(counts, "", answered, failed, target)
