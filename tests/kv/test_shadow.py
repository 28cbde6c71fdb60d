"""Shadows: which policy would have hit more, and what other sizes would bring."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvtool.kv import shadow
from kvtool.kv.order import Order
from kvtool.kv.policy import make
from kvtool.kv.policy.mini import MiniCache
from kvtool.kv.record import Grant, Want
from kvtool.kv.shadow import AutoCache, Shadows
from kvtool.kv.store import Store
from kvtool.pool import wire
from kvtool.sim.replay import as_keys, prompts, replay
from kvtool.sim.trace import read_trace

TRACES = Path(os.environ.get("KVTOOL_TRACES") or Path(__file__).parents[3] / "shared" / "traces")


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()


def scan(rounds: int, hot: int, once: int) -> list[bytes]:
    """`hot` blocks again and again, and `once` one-offs between two rounds."""
    numbers = [n for at in range(rounds) for n in [*range(hot), *range((at + 1) * 1000, (at + 1) * 1000 + once)]]
    return [key(number) for number in numbers]


def asked(shadows: Shadows, keys: list[bytes]) -> list[str]:
    """The policies that were to take over, in order."""
    found = []
    for used in keys:
        policy = shadows.use(used, 1)
        if policy is not None:
            found.append(policy)
            shadows.changed(policy)
    return found


def test_the_policy_that_hits_clearly_more_takes_over_and_stays() -> None:
    shadows = Shadows(200, "lru", ("lru", "lru-2"))
    assert asked(shadows, scan(300, 50, 200)) == ["lru-2"]
    shown = shadows.judgement()
    assert shown.policy == "lru-2" and shown.changes == 1 and shown.rate == 1.0
    assert shown.ratios["lru-2"] > 0.15 > shown.ratios["lru"]


def test_nothing_changes_where_all_do_as_well() -> None:
    assert asked(Shadows(200, "lru", ("lru", "lru-2", "arc")), scan(300, 150, 0)) == []


def test_without_a_contest_the_policy_stays_and_the_curve_is_still_drawn() -> None:
    shadows = Shadows(200, "lru")
    assert asked(shadows, scan(300, 150, 200)) == []
    curve = dict(shadows.judgement().curve)
    assert list(curve) == [50, 100, 200, 400, 800]
    assert curve[200] < 0.02 < 0.3 < curve[400] == pytest.approx(curve[800], abs=0.02)


def test_the_curve_of_a_sample_is_that_of_the_cache() -> None:
    size, keys = 8192, [key(n % 12_000 if n % 3 else n) for n in range(60_000)]
    shadows = Shadows(size, "lru", ("lru",))
    assert asked(shadows, keys) == []
    whole: MiniCache[bytes] = MiniCache(make("lru"), size * 2)
    hits = [whole.access(used) for used in keys]
    shown = shadows.judgement()
    assert shown.rate == 0.25
    assert dict(shown.curve)[size * 2] == pytest.approx(sum(hits) / len(hits), abs=0.03)


def test_a_store_that_chooses_says_so_and_keeps_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "WINDOW_MIN", 100)
    store = Store(100, 10, evict="auto")
    changes = []
    monkeypatch.setattr(Order, "change", lambda order, name: changes.append((name, len(order))) or was(order, name))
    for at, block in enumerate(scan(400, 40, 90)):
        now_s = at * 1.0
        reading = store.begin_read((1, at), [block], now_s)
        if not store.finish_read(reading, now_s):
            (answer,) = store.reserve(1, [Want(block, 10)], now_s)
            assert answer.grant is Grant.GRANTED
            store.commit(1, answer.slot, answer.generation, 0, now_s)
        store.release((1, at), now_s)
        store.take_actions()
    report = store.eviction()
    assert wire.unpack_map(wire.pack_map(report))["dram"]["policy"] == report["dram"]["policy"]
    assert report["dram"]["ratios"][report["dram"]["policy"]] > 0.2
    assert all(there >= 99 for _, there in changes) and len(store.resident()) == 100


was = Order.change


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the released traces are not in {TRACES}; KVTOOL_TRACES says where")
@pytest.mark.parametrize("size", [1000, 3000, 5000, 10000, 20000, 30000, 50000])
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_choosing_online_is_never_much_worse_than_lru_nor_than_the_best_policy(trace: str, size: int) -> None:
    """Points of prefix hits. Choosing late costs up to 1.5 of them where the trace is only a few turnovers long."""
    blocks, count = prompts(read_trace(TRACES / f"{trace}_trace.jsonl"), tails=False)
    keys = as_keys(blocks)
    fixed = {name: 100 * replay(keys, count, MiniCache(make(name), size)).prefix_ratio for name in shadow.CONTEST}
    chosen = 100 * replay(keys, count, AutoCache(size)).prefix_ratio
    assert chosen > fixed["lru"] - 1.0
    assert chosen > max(fixed.values()) - 1.7
