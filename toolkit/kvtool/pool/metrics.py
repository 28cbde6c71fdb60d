"""Metrics of a rank: what it says of itself (its answer to STATUS), in Prometheus' text form.

The list below is all there is: the page of each rank, the reference in docs/ and `kvtool pool metrics` are made from
it. Counters start at 0 with each process of a rank; gauges are read from the state itself when they are asked for, and
so are right whatever happened to connections before.

There is one hit ratio: tokens that came from the pool over tokens that were looked up there, of whole blocks. Readers
count (see `pool.told`); over all ranks asked = hit + missed, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Status = Mapping[str, Any]
Sample = tuple[tuple[str, ...], float]
"""Label values, and the value."""

PREFIX = "kvtool_pool_"


@dataclass(frozen=True)
class Metric:
    """`read` gives its samples out of a status, none when there is nothing of it. Each also has the label `rank`."""

    name: str
    kind: str
    help: str
    read: Callable[[Status], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _one(*path: str) -> Callable[[Status], Iterable[Sample]]:
    """The number at that place of a status; what was never there, or is None, is no sample."""

    def read(status: Status) -> Iterable[Sample]:
        found: Any = status
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, (bool, int, float)):
            yield (), float(found)
        elif isinstance(found, list):
            yield (), float(len(found))

    return read


def _each(*path: str, split: str = "", without: tuple[str, ...] = ()) -> Callable[[Status], Iterable[Sample]]:
    """Each number of the map at that place, under its name; `split`: names are several labels, put together so."""

    def read(status: Status) -> Iterable[Sample]:
        found: Any = status
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return
        for name, value in sorted(found.items()):
            if isinstance(value, (bool, int, float)) and name not in without:
                yield tuple(name.split(split)) if split else (name,), float(value)

    return read


def _tiers(dram: str, file: str, times: str = "") -> Callable[[Status], Iterable[Sample]]:
    def read(status: Status) -> Iterable[Sample]:
        for tier, name in (("dram", dram), ("file", file)):
            if name in status:
                yield (tier,), float(status[name] * (status[times] if times else 1))

    return read


def _tokens(*path: str, split: str = "") -> Callable[[Status], Iterable[Sample]]:
    """As `_each` or `_one`, of blocks, in tokens."""
    many, one = _each(*path, split=split), _one(*path)

    def read(status: Status) -> Iterable[Sample]:
        tokens = status.get("block_tokens", 0)
        return [(labels, value * tokens) for labels, value in (*many(status), *one(status))]

    return read


def _tenants(*path: str, tokens: bool = False) -> Callable[[Status], Iterable[Sample]]:
    """The number at that place below each tenant's name."""

    def read(status: Status) -> Iterable[Sample]:
        place, *rest = path
        for tenant, found in sorted(status.get(place, {}).items()):
            yield (tenant,), (_at(found, rest) or 0.0) * (status.get("block_tokens", 0) if tokens else 1)

    return read


def _at(found: Any, path: Iterable[str]) -> float | None:
    """The number at that place, or the sum of the map there."""
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        return float(sum(found.values()))
    return float(found) if isinstance(found, (int, float)) else None


def _judged(what: str) -> Callable[[Status], Iterable[Sample]]:
    """What the shadows of each tier show: "policy", "ratios", "curve" or "changes"."""

    def read(status: Status) -> Iterable[Sample]:
        for tier, name in (("dram", "dram"), ("file", "files")):
            found = status.get("eviction", {}).get(name, {}).get(what)
            if what == "policy" and found is not None:
                yield (tier, str(found)), 1.0
            elif isinstance(found, Mapping):
                yield from (((tier, str(policy)), float(ratio)) for policy, ratio in sorted(found.items()))
            elif isinstance(found, (list, tuple)):
                yield from (((tier, str(slots)), float(ratio)) for slots, ratio in found)
            elif found is not None:
                yield (tier,), float(found)

    return read


def _info(status: Status) -> Iterable[Sample]:
    words = (status.get(name) for name in ("identity", "status"))
    write = status.get("files", {}).get("write", "")
    yield tuple(str(word or "") for word in (*words, write)), 1.0


METRICS = (
    Metric("rank_info", "gauge", "1; the rank's identity, standing and write policy are labels.", _info,
           ("identity", "status", "write")),
    Metric("incarnation", "gauge", "How often a process was this rank.", _one("incarnation")),
    Metric("weight", "gauge", "The share of keys it takes against a settled rank with 1; 0 while it drains.",
           _one("weight")),
    Metric("ranks_dead", "gauge", "Ranks that this one knows to be dead or gone.", _one("dead")),
    Metric("ranks_hung", "gauge", "Live ranks that this one has not heard of for too long.", _one("hung")),
    Metric("clients", "gauge", "Connected clients.", _one("clients")),
    Metric("capacity_bytes", "gauge", "Room for blocks, a hard cap.", _tiers("slots", "file_slots", "slot_size"),
           ("tier",)),
    Metric("used_bytes", "gauge", "Of that, in use; whole slots.", _tiers("slots_used", "file_slots_used", "slot_size"),
           ("tier",)),
    Metric("used_slots", "gauge", "Slots in use.", _tiers("slots_used", "file_slots_used"), ("tier",)),
    Metric("leases", "gauge", "Reads under way.", _one("leases")),
    Metric("held_share", "gauge", "Share of DRAM slots that cannot be evicted now: leased, reserved, quarantined or "
           "pinned. Above 0.8 something is wrong.", _one("held_share")),
    Metric("waiting_reads", "gauge", "Lookups that wait for files.", _one("waiting_reads")),
    Metric("waiting_puts", "gauge", "Puts that wait for room.", _one("waiting_puts")),
    Metric("asked_tokens_total", "counter", "Tokens of the blocks that readers asked the pool for. A reader tells any "
           "one rank, so add up all of them: the hit ratio is sum(hit_tokens_total) / sum(asked_tokens_total).",
           _tokens("reads", "asked")),
    Metric("hit_tokens_total", "counter", "Of those, served: by tier, and by the way they came.",
           _tokens("reads", "hits", split="/"), ("tier", "path")),
    Metric("missed_tokens_total", "counter", "Of those, not served, by reason.", _tokens("reads", "misses"),
           ("reason",)),
    Metric("read_bytes_total", "counter", "Payload that readers got, as they told this rank.",
           _each("reads", "bytes", split="/"), ("tier", "path")),
    Metric("put_bytes_total", "counter", "Payload that was stored in this rank, copies of other ranks included.",
           _one("bytes_in")),
    Metric("lent_bytes_total", "counter", "Payload of this rank's blocks that readers were given.", _one("bytes_out")),
    Metric("block_events_total", "counter", "What happened to blocks: put, evicted, moved, lost and so on.",
           _each("counts"), ("event",)),
    Metric("tier_bytes_total", "counter", "Payload moved between the tiers.", _each("bytes_moved"), ("direction",)),
    Metric("touches_total", "counter", "Blocks that readers found in shared memory, without a message.",
           _one("touched")),
    Metric("file_failures", "gauge", "File moves in a row that failed; 0 when the disk works.",
           _one("files", "failures")),
    Metric("scrubbed_total", "counter", "What the background check of files found.", _each("scrub"), ("finding",)),
    Metric("transfers_total", "counter", "Payload over data connections, by what came of it.", _each("transfers"),
           ("event",)),
    Metric("transfer_bytes_total", "counter", "The same in bytes.", _each("transfers", "bytes"), ("direction",)),
    Metric("copies_total", "counter", "Copies to other ranks, by what came of them.",
           _each("copying", "counts", without=("bytes", "scans")), ("outcome",)),
    Metric("copied_bytes_total", "counter", "Payload that was stored in other ranks so.",
           _one("copying", "counts", "bytes")),
    Metric("copy_scans_total", "counter", "Looks through all blocks for those that lack copies.",
           _one("copying", "counts", "scans")),
    Metric("copies_owed", "gauge", "Blocks that wait to be copied to another rank.", _one("copying", "owed")),
    Metric("copies_flying", "gauge", "Blocks on their way to another rank.", _one("copying", "flying")),
    Metric("blocks_homeless", "gauge", "Blocks that another rank had no room for, or did not take.",
           _one("copying", "homeless")),
    Metric("blocks_left", "gauge", "Blocks that must go elsewhere before this rank can leave.",
           _one("copying", "left")),
    Metric("blocks_near", "gauge", "Blocks of this rank that have a copy near readers on another host.",
           _one("copying", "near")),
    Metric("eviction_policy_info", "gauge", "1; the policy in use is a label.", _judged("policy"),
           ("tier", "policy")),
    Metric("eviction_policy_changes_total", "counter", "How often the shadows had it changed.", _judged("changes"),
           ("tier",)),
    Metric("shadow_hit_ratio", "gauge", "Of block uses, what each policy would have hit lately, by sampling.",
           _judged("ratios"), ("tier", "policy")),
    Metric("shadow_size_hit_ratio", "gauge", "The same, of the policy in use with so many slots instead.",
           _judged("curve"), ("tier", "slots")),
    Metric("pinned_blocks", "gauge", "Blocks that are pinned hard; a quarter of the slots may be.",
           _one("eviction", "pins", "hard")),
    Metric("tenant_used_slots", "gauge", "Slots of memory that a tenant's blocks take.", _tenants("tenants", "dram"),
           ("tenant",)),
    Metric("tenant_blocks", "gauge", "Blocks of a tenant.", _tenants("tenants", "blocks"), ("tenant",)),
    Metric("tenant_refused_total", "counter", "Puts of a tenant that its quota refused.",
           _tenants("tenants", "refused"), ("tenant",)),
    Metric("tenant_evicted_total", "counter", "Blocks of a tenant that made room for its own new ones.",
           _tenants("tenants", "evicted"), ("tenant",)),
    Metric("tenant_asked_tokens_total", "counter", "Of asked_tokens_total, by tenant, as its clients say.",
           _tenants("reads_of", "asked", tokens=True), ("tenant",)),
    Metric("tenant_hit_tokens_total", "counter", "Of hit_tokens_total, by tenant, as its clients say.",
           _tenants("reads_of", "hits", tokens=True), ("tenant",)),
    Metric("cpu_seconds_total", "counter", "CPU time of the rank.", _one("cpu_s")),
    Metric("slowest_pass_seconds", "gauge", "The longest that its event loop kept everybody waiting.",
           _one("slowest_pass_s")),
)  # fmt: skip


def text(statuses: Iterable[Status]) -> str:
    """The page: every metric of every rank that said something of it."""
    ranks = list(statuses)
    lines = []
    for metric in METRICS:
        samples = [
            _line(metric, (str(status.get("rank", "")), *labels), value)
            for status in ranks
            for labels, value in metric.read(status)
        ]
        if samples:
            lines += [f"# HELP {metric.full_name} {metric.help}", f"# TYPE {metric.full_name} {metric.kind}", *samples]
    return "\n".join(lines) + "\n"


def _line(metric: Metric, values: tuple[str, ...], value: float) -> str:
    labels = ",".join(
        f'{name}="{_quoted(given)}"' for name, given in zip(("rank", *metric.labels), values, strict=True)
    )
    shown = str(int(value)) if value == int(value) else repr(value)
    return f"{metric.full_name}{{{labels}}} {shown}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
