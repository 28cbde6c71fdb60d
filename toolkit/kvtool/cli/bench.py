"""`kvtool bench`: the table of benchmarks; each is loaded when it runs."""

from __future__ import annotations

from typing import ClassVar

from kvtool.cli.lazy import Entry, LazyGroup


class BenchGroup(LazyGroup):
    """Measure, side by side on this machine. Percentiles, never bare means."""

    entries: ClassVar[dict[str, Entry]] = {
        "serve": Entry("kvtool.cli.bench_serve:serve", "A deployment against one process: TTFT, TBT, overheads."),
        "engine": Entry("kvtool.cli.bench_engine:engine", "One engine in one process: prefill and decode speed."),
        "transfer": Entry("kvtool.cli.bench_transfer:transfer", "How fast blocks move, by path and size."),
        "batch": Entry("kvtool.cli.bench_batch:batch", "A job by prefix, beside the order of arrival."),
        "batch-online": Entry("kvtool.cli.bench_batch_online:batch_online", "Online streams with a job beside them."),
        "files": Entry("kvtool.cli.bench_files:files", "A pool larger than its memory, beside raw disk I/O."),
    }
