"""Pages made from what they speak of: docs/reference.md, and the README's table of results.

Nothing is described twice: a flag's words are its --help, a key's words are its field's description, and a result is
what a benchmark wrote to tests/bench/. `scripts/docs` writes the pages, a test keeps them fresh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from kvtool.cli.bench_serve import TARGETS
from kvtool.cli.lazy import LazyGroup, load
from kvtool.cli.main import app
from kvtool.config.spec import Spec
from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.engine.trtllm.settings import TrtllmSettings
from kvtool.measure.stats import percentile
from kvtool.pool.metrics import METRICS

RESULTS_BEGIN = "<!-- results: made by scripts/docs from tests/bench/serve.json -->"
RESULTS_END = "<!-- end of results -->"
BATCH_BEGIN = (
    "<!-- batch results: made by scripts/docs from tests/bench/batch.json and tests/bench/batch-online.json -->"
)
BATCH_END = "<!-- end of batch results -->"
HEAD = """# Reference

Made by `scripts/docs` from the commands' own help and the spec's own descriptions; do not edit.

"""


def render() -> str:
    """The whole page, the same for the same code."""
    parts = [HEAD, "## Commands\n\n"]
    parts.extend(_command(path, command) for path, command in commands())
    parts.append(_spec())
    parts.append(_recipes())
    parts.append(_connector())
    parts.append(_metrics())
    return "".join(parts).rstrip() + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """("kvtool pool up", click command) of every command and group, each loaded."""
    yield from _walk("kvtool", get_command(app))


def options(command: Any) -> Iterator[Any]:
    """The flags and arguments that --help shows, but for --help itself."""
    for parameter in command.params:
        if not getattr(parameter, "hidden", False) and parameter.name not in ("install_completion", "show_completion"):
            yield parameter


def spec_keys() -> Iterator[tuple[str, str, str]]:
    """("pool.ranks", "2", description) of every key of the spec, in its order."""
    yield from _keys(Spec, "")


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    if isinstance(command, LazyGroup):
        for name, entry in command.entries.items():
            yield from _walk(f"{path} {name}", load(name, entry))
    else:
        for name, child in getattr(command, "commands", {}).items():
            if not child.hidden:
                yield from _walk(f"{path} {name}", child)


def _command(path: str, command: Any) -> str:
    words = [f"### `{path}`\n\n{_fenced(_plain(command.help))}\n\n"]
    rows = [_option_row(parameter) for parameter in options(command)]
    if rows:
        words.append("| | default | |\n|---|---|---|\n" + "".join(rows) + "\n")
    return "".join(words)


def _option_row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {_default(parameter)} | {_cell(_plain(parameter.help))} |\n"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return _cell(parameter.show_default)
    if value is None or callable(value) or value is False or value in ("", [], ()):
        return ""
    if value is True:
        return "on"
    return f"`{value}`"


def _spec() -> str:
    return f"## Deployment spec\n\n{Spec.__doc__}\n\n{_rows(spec_keys())}\n"


def recipe_keys() -> Iterator[tuple[str, str, str]]:
    """Of a recipe's tensorrt_llm block."""
    yield from _keys(TrtllmSettings, "")


def connector_keys() -> Iterator[tuple[str, str, str]]:
    """Of connector.yaml."""
    yield from _keys(ConnectorSettings, "")


def _recipes() -> str:
    return (
        "## Settings of a build for TensorRT-LLM\n\nThe `tensorrt_llm:` block of a recipe, and the keys of "
        f"`kvtool build --set KEY=VALUE`.\n\n{_rows(recipe_keys())}\n"
    )


def _connector() -> str:
    return (
        "## Settings of the KV-offload connector\n\n`connector.yaml` of a bundle, which `KVTOOL_CONNECTOR` names to "
        f"the connector. `kvtool build` and\n`kvtool deploy render` write it.\n\n{_rows(connector_keys())}\n"
    )


def _rows(keys: Iterator[tuple[str, str, str]]) -> str:
    rows = "".join(f"| `{key}` | {default} | {_cell(text)} |\n" for key, default, text in keys)
    return f"| key | default | |\n|---|---|---|\n{rows}"


def _metrics() -> str:
    rows = "".join(
        f"| `{metric.full_name}` | {metric.kind} | {', '.join(('rank', *metric.labels))} | {_cell(metric.help)} |\n"
        for metric in METRICS
    )
    return (
        "## Metrics of a pool\n\nEach rank serves them at `/metrics` on a loopback port that the pool's state file "
        "names;\n`kvtool pool metrics` prints those of all ranks.\n\n"
        f"| name | kind | labels | |\n|---|---|---|---|\n{rows}\n"
    )


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"`{_value(field.get_default(call_default_factory=True))}`"
        yield f"{prefix}{name}", default, field.description or ""


def _value(default: Any) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if default in ("", ()):
        return '""' if default == "" else "[]"
    return str(default)


def _plain(text: str | None) -> str:
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


def _fenced(text: str) -> str:
    """Paragraphs behind a line of \\b, which a terminal keeps as they are, become blocks."""
    parts = text.split("\n\n")
    return "\n\n".join(f"```text\n{part[2:]}\n```" if part.startswith("\b\n") else part for part in parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def results(bench: Path) -> str:
    """The README's table from `bench`/serve.json; says so when nothing was measured yet."""
    file = bench / "serve.json"
    if not file.is_file():
        return (
            "Not yet measured: `scripts/bench serve` writes `tests/bench/serve.json`, and this table is made from it.\n"
        )
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        f"| {name} | **{each['median']:.2f}** | {each['low']:.2f} to {each['high']:.2f} | {TARGETS.get(name, '')} |"
        for name, each in found["ratios"].items()
    ]
    raw = [
        f"| {name} | {each['hit_ratio']:.0%} | {each['median']:.1f} | {each['p90']:.1f} | {each['p99']:.1f} "
        f"| {each['max']:.1f} |"
        for name, each in found["raw"].items()
    ]
    hardware, same = found["hardware"], "the same" if found["same_tokens"] else "NOT the same"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join([
        "| ratio, runs in turns | median | spread | target |",
        "|---|---|---|---|",
        *rows,
        "",
        "| raw | prompt from the pool | median | P90 | P99 | max |",
        "|---|---|---|---|---|---|",
        *raw,
        "",
        f"SmolLM2-135M, prompts of {found['prompt_tokens']} tokens, {found['max_tokens']} generated, "
        f"{len(found['samples'])} rounds; the tokens were {same} in all three. {hardware['cpu']}, {hardware['cores']} "
        f"cores, {hardware['memory']}, GPU: {hardware['gpu']}. {versions}. "
        f"Commit {found['commit']}, seed {found['seed']}, `{found['command']}`. Raw: `tests/bench/serve.json`.",
        "",
        *_engine_results(bench / "engine.json"),
    ])  # fmt: skip


def _engine_results(file: Path) -> list[str]:
    """The engine alone beside its peers; nothing when that was not measured."""
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = []
    for row in found["rows"]:
        own = f"{1e3 * row['seconds']['kvtool']['median']:.1f} / {1e3 * row['seconds']['kvtool']['p90']:.1f}"
        for peer, ratio in row["peer_over_kvtool"].items():
            theirs = f"{1e3 * row['seconds'][peer]['median']:.1f} / {1e3 * row['seconds'][peer]['p90']:.1f}"
            spread = f"{ratio['low']:.2f} to {ratio['high']:.2f}"
            rows.append(f"| {row['what']} | {peer} | **{ratio['median']:.2f}** | {spread} | {own} | {theirs} |")
    peers = ", ".join(f"{name} {version}" for name, version in found["peers"].items())
    return [
        "| the engine alone, runs in turns | beside | faster by | spread | kvtool ms, median / P90 | peer's ms |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"{found['threads']} threads each, same model, 512 tokens of context in decode; {peers}. One SDPA call is what "
        "attention would cost without a fixed order of summation. Above 1 kvtool is faster. Commit "
        f"{found['commit']}, `{found['command']}`. Raw: `tests/bench/engine.json`.",
        "",
    ]


def batch_results(bench: Path) -> str:
    """The README's words on batch jobs from `bench`/batch.json and batch-online.json, as far as they are there."""
    parts = [*_batch(bench / "batch.json"), *_batch_online_results(bench / "batch-online.json")]
    return "\n".join(parts) or "Not yet measured: `kvtool bench batch` and `kvtool bench batch-online`.\n"


def _batch(file: Path) -> list[str]:
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    work, count = found["work"], found["work"]["requests"]
    rows = [
        f"| {way['name']} | {way['seconds']:.0f} | {way['requests_s']:.2f} | {way['hit_ratio']:.0%} | "
        f"{way['cpu_s']:.0f} |"
        for way in found["ways"]
    ]
    return [
        "| one job, each way in turn | seconds | requests/s | prompt tokens reused | CPU s of the command |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"**{found['ratio_no_reuse']:.2f}** times the throughput of arrival order without reuse (target >= 2), "
        f"**{found['ratio_reuse']:.2f}** times that of arrival order with reuse (target >= 1.3); by CPU time "
        f"{found['cpu_ratio_no_reuse']:.2f} and {found['cpu_ratio_reuse']:.2f}. {count} requests, "
        f"{work['prompt_tokens']} prompt tokens, {work['shared']:.0%} of them in prefixes that requests share, in "
        f"families of about 20; {work['output_tokens']} generated; a pool of a tenth of all blocks. "
        f"{found['same_in_all_three']} of {count} answers were the same in all orders, and "
        f"{min(way['same'] for way in found['ways'])} of {found['compared_with_one_at_a_time']} the same as one "
        f"request at a time. {found['hardware']['cpu']}, {found['hardware']['cores']} cores. Commit {found['commit']}, "
        f"seed {found['seed']}, `{found['command']}`. Raw: `tests/bench/batch.json`.",
        "",
    ]


def _batch_online_results(file: Path) -> list[str]:
    """Online streams with and without a job beside them; nothing when that was not measured."""
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = []
    for name, label in (("without", "no batch job"), ("with", "a batch job beside")):
        online = found["online"][name]
        ttft, tbt = online["ttft_ms"], online["tbt_ms"]
        times = [ttft["median"], ttft["p90"], ttft["p99"], tbt["median"], tbt["p99"]]
        cells = " | ".join(f"{each:.0f}" for each in times)
        rows.append(f"| {label} | {ttft['count']} | {online['failed']} | {online['hit_ratio']:.0%} | {cells} |")
    batch = found["batch"]
    return [
        "| online streams, windows in turns | n | failed | hit | TTFT ms P50 | P90 | P99 | TBT ms P50 | P99 |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"TTFT P99 with a job is **{found['ttft_p99_ratio']:.2f}** x that without (target: at most {found['target']}); "
        f"by pairs of windows {_by_pairs(found['windows'])} x, since the machine had other work too. "
        f"{found['rate']:.2f} requests a second arrive at random; one alone takes {found['service_s']:.2f} s. The job "
        f"finished {batch['finished']} requests in {batch['seconds']:.0f} s; its longest time without one was "
        f"{batch['longest_without_progress_s']:.0f} s. Load before: {found['hardware']['load_before'][0]}. Commit "
        f"{found['commit']}, seed {found['seed']}, `{found['command']}`. Raw: `tests/bench/batch-online.json`.",
        "",
    ]


def _by_pairs(windows: list[dict[str, Any]]) -> str:
    """P99 of TTFT with a job over that without, lowest and highest of the pairs of windows."""
    p99 = {}
    for window in windows:
        ttfts = [seen["token_at_s"][0] for seen in window["seen"] if not seen["error"]]
        p99[window["pair"], window["with_job"]] = percentile(ttfts, 0.99)
    ratios = [p99[pair, True] / p99[pair, False] for pair, with_job in p99 if with_job]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def with_results(readme: str, table: str, begin: str = RESULTS_BEGIN, end: str = RESULTS_END) -> str:
    """`readme` with `table` between its marks.

    Raises:
        ValueError: the marks are not there.
    """
    head, found, rest = readme.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"README.md: wanted the lines {begin} and {end} around the results")
    return f"{head}{begin}\n\n{table}\n{end}{tail}"


def with_all_results(readme: str, bench: Path) -> str:
    """`readme` with every table that is made from a file in `bench`."""
    readme = with_results(readme, results(bench))
    return with_results(readme, batch_results(bench), BATCH_BEGIN, BATCH_END)


def main(root: Path) -> None:
    """Write every made page of the checkout at `root`."""
    (root / "docs" / "reference.md").write_text(render(), encoding="utf-8")
    readme = root / "README.md"
    readme.write_text(with_all_results(readme.read_text(encoding="utf-8"), root / "tests" / "bench"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
