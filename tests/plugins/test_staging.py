"""Between pool and pages: staging memory, loads and saves on late streams, and what each failure costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtool.engine.manifest import LayoutFields
from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.errors import EngineFailed, EngineRefused
from kvtool.kv.shard import shard_count, shard_key, stored_layout
from kvtool.pool.base import GetResult, Got, Outcome, PutResult, Tier
from kvtool.pool.embedded import EmbeddedPool
from kvtool_trtllm.meta import Load, Meta, Save
from kvtool_trtllm.pages import of_layout, of_tensor
from kvtool_trtllm.staging import Slots
from kvtool_trtllm.streams import Host, HostEvent, HostStream
from kvtool_trtllm.worker import Worker, open_pool

PAGES, LAYERS, HEADS, SIZE, DIM = 12, 3, 4, 4, 8
KV = LayoutFields(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=SIZE, dtype="bfloat16")
KEYS = [bytes([at]) * 32 for at in range(1, 9)]
LATE_S = 0.003


def settings_of(stored: int = 1, **changes: Any) -> ConnectorSettings:
    given = {"model_digest": "m", "kv": KV, "stored_parallel": stored, "staging_bytes": 1 << 18, **changes}
    return ConnectorSettings(**given)


def pool_tensor(seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    shape = (PAGES, LAYERS, 2, HEADS * SIZE * DIM)
    return torch.randint(0, 1 << 14, shape, generator=made, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def page(tensor: torch.Tensor, at: int) -> bytes:
    return bytes(tensor[at].contiguous().view(torch.uint8).numpy().tobytes())


class Made:
    """A worker over `tensor` and a pool in this process, and a stream of the engine's that is late too."""

    def __init__(self, tensor: torch.Tensor, pool: Any, *, seed: int = 1, **settings: Any) -> None:
        self.tensor, self.pool = tensor, pool
        self.worker = Worker(settings_of(**settings), 0, lambda given, rank: pool, Host(LATE_S, seed))
        self.worker.register_tensor(tensor)
        self.stream = HostStream(seed + 1, LATE_S)
        self.iteration = 0

    def turn(
        self,
        *,
        loads: Sequence[Load] = (),
        saves: Sequence[Save] = (),
        passes: Any = None,
        hooks: bool = True,
        passed: bool = True,
    ) -> None:
        """One iteration; `passes(layer)` is the engine's work for a layer."""
        self.iteration += 1
        worker, stream = self.worker, self.stream
        worker.bind(Meta(self.iteration, tuple(loads), tuple(saves)))
        worker.start_loads(stream)
        for layer in range(LAYERS):
            if hooks:
                worker.wait_for_layer(layer, stream)
            if passes is not None:
                stream.enqueue(lambda layer=layer: passes(layer))
            if hooks:
                worker.save_layer(layer, stream)
        if passed:
            worker.forward_done()
        worker.finish_saves(stream)

    def stage(self, load_id: int, keys: Sequence[bytes]) -> int:
        assert self.worker._staging is not None
        return self.worker._staging.stage(load_id, keys, 5.0)

    def close(self) -> None:
        self.worker.close()
        self.stream.close()


class Kept:
    """A pool that outlives its clients."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None: ...


@pytest.fixture(params=[1, 2, 4], ids=lambda stored: f"{stored} shards")
def stored(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def pool(stored: int) -> Iterator[EmbeddedPool]:
    made = EmbeddedPool(stored_layout(KV.layout(), stored), 4 << 20)
    yield made
    made.close()


def save(keys: Sequence[bytes], pages: Sequence[int], request_id: int = 1) -> Save:
    parents = (None, *keys[:-1])
    return Save(request_id, tuple(keys), tuple(parents), (tuple(pages),))


@pytest.mark.parametrize("hooks", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("passed", [True, False], ids=["callable", "no callable"])
def test_blocks_go_out_and_come_back_byte_for_byte(pool: EmbeddedPool, stored: int, hooks: bool, passed: bool) -> None:
    """Pages are written layer by layer on the engine's late stream, and overwritten when it was told to go on."""
    tensor, right = torch.zeros_like(pool_tensor()), pool_tensor(3)
    out = Made(tensor, Kept(pool), stored=stored)

    def compute(layer: int) -> None:
        tensor[[5, 2, 9], layer] = right[[5, 2, 9], layer]

    out.turn(saves=[save(KEYS[:3], [5, 2, 9])], passes=compute, hooks=hooks, passed=passed)
    out.stream.enqueue(lambda: tensor.fill_(7))
    assert out.worker.drained(10)
    back = torch.zeros_like(tensor)
    into = Made(back, Kept(pool), stored=stored, seed=9)
    assert into.stage(1, KEYS[:4]) == 3
    into.turn(loads=[Load(1, 4, ((3, 0, 7),))], hooks=hooks)
    while into.worker.get_finished([], [4] if into.iteration == 1 else [])[1] != [4]:
        into.turn(hooks=hooks)
    for here, there in ((3, 5), (0, 2), (7, 9)):
        assert page(back, here) == page(right, there)
    assert not back[[1, 2, 4, 5, 6, 8, 9, 10, 11]].any(), "a page was written that nobody named"
    assert out.worker.audit() == [] and into.worker.audit() == []
    out.close()
    into.close()


def test_layers_of_a_layerwise_load_are_there_when_they_are_read(pool: EmbeddedPool, stored: int) -> None:
    right = pool_tensor(3)
    out = Made(right.clone(), Kept(pool), stored=stored)
    out.turn(saves=[save(KEYS[:2], [5, 2])])
    assert out.worker.drained(10)
    back, seen = torch.zeros_like(right), {}
    into = Made(back, Kept(pool), stored=stored)
    assert into.stage(1, KEYS[:2]) == 2
    into.turn(
        loads=[Load(1, 4, ((1, 3),), layerwise=True)],
        passes=lambda layer: seen.update({layer: back[[1, 3], layer].clone()}),
    )
    into.stream.record_event().synchronize()
    assert all(torch.equal(seen[layer], right[[5, 2], layer]) for layer in range(LAYERS))
    out.close()
    into.close()


def test_a_pass_that_does_not_wait_for_its_layers_stops_the_engine(pool: EmbeddedPool, stored: int) -> None:
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.turn(saves=[save(KEYS[:1], [5])])
    assert out.worker.drained(10) and out.stage(1, KEYS[:1]) == 1
    with pytest.raises(EngineFailed, match=r"without asking for layers \[0, 1, 2\] of 3: a CUDA graph"):
        out.turn(loads=[Load(1, 4, ((1,),), layerwise=True)], hooks=False)
    out.close()


def test_a_block_counts_only_when_all_of_its_shards_are_there(pool: EmbeddedPool, stored: int) -> None:
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.turn(saves=[save(KEYS[:3], [5, 2, 9])])
    assert out.worker.drained(10)
    pool.delete([shard_key(KEYS[1], shard_count(KV.layout(), stored), stored - 1)])
    assert out.stage(1, KEYS[:3]) == 1
    assert out.worker.audit() and out.worker._staging is not None
    out.worker._staging.keep(1, 0)
    out.worker._staging.keep(1, 0)
    assert out.worker.audit() == []
    out.close()


def test_more_is_given_back_than_was_claimed(pool: EmbeddedPool, stored: int) -> None:
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.turn(saves=[save(KEYS[:3], [5, 2, 9])])
    assert out.worker.drained(10) and out.stage(1, KEYS[:3]) == 3 and out.worker._staging is not None
    out.worker._staging.keep(1, 2)
    out.worker._staging.keep(77, 2)
    assert len(out.worker.audit()) == 2
    with pytest.raises(EngineFailed, match="load 1: wanted 3 staged blocks, found 2"):
        out.turn(loads=[Load(1, 4, ((1, 2, 3),))])
    with pytest.raises(EngineFailed, match="load 1: wanted 1 staged blocks, found 0"):
        out.turn(loads=[Load(1, 4, ((1,),))])
    assert out.worker.audit() == []
    out.close()


def test_a_rank_that_holds_more_and_was_not_told_yet_loads_what_every_rank_holds(
    pool: EmbeddedPool, stored: int
) -> None:
    """The word that less is kept comes by another way than the load, and may be late."""
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.turn(saves=[save(KEYS[:3], [5, 2, 9])])
    assert out.worker.drained(10) and out.stage(1, KEYS[:3]) == 3 and out.worker._staging is not None
    out.turn(loads=[Load(1, 4, ((1, 3),))])
    out.worker._staging.keep(1, 2)
    while out.worker.get_finished([], [4] if out.iteration == 2 else [])[1] != [4]:
        out.turn()
    assert page(out.tensor, 1) == page(out.tensor, 5) and page(out.tensor, 3) == page(out.tensor, 2)
    assert out.worker.audit() == [] and out.worker._staging._held == {}
    out.close()


def test_loads_that_the_scheduler_does_not_know_any_more_are_given_back(pool: EmbeddedPool, stored: int) -> None:
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.turn(saves=[save(KEYS[:3], [5, 2, 9])])
    assert out.worker.drained(10) and out.worker._staging is not None
    assert [out.stage(load_id, KEYS[:2]) for load_id in (1, 2, 3)] == [2, 2, 2]
    out.worker._staging.only([2, 9])
    assert {owner for _, owner, _ in out.worker.audit()} == {"load 2"}
    out.close()


def test_loads_of_a_pass_that_never_started_are_started_with_the_next(pool: EmbeddedPool, stored: int) -> None:
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.turn(saves=[save(KEYS[:1], [5])])
    assert out.worker.drained(10) and out.stage(1, KEYS[:1]) == 1
    out.worker.bind(Meta(2, (Load(1, 4, ((3,),)),)))
    out.turn()
    while out.worker.get_finished([], [4] if out.iteration == 2 else [])[1] != [4]:
        out.turn()
    assert page(out.tensor, 3) == page(out.tensor, 5)
    out.close()


def test_memory_that_layers_are_being_copied_to_comes_back_when_they_are(pool: EmbeddedPool, stored: int) -> None:
    """A pass that failed between its layers: its gathers are queued, and nobody finishes it."""
    hold = threading.Event()
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.worker.bind(Meta(1, saves=(save(KEYS[:1], [5]),)))
    out.worker.start_loads(out.stream)
    out.stream.enqueue(lambda: hold.wait(20) and None)
    out.worker.save_layer(0, out.stream)
    out.worker.bind(Meta(2))
    assert len(out.worker.audit()) == 1, "a late copy would write into another block's memory"
    hold.set()
    assert out.worker.drained(10) and out.worker.audit() == []
    assert pool.exists([shard_key(KEYS[0], shard_count(KV.layout(), stored), 0)]) == [False]
    out.close()


def test_a_hole_in_the_pages_is_neither_read_nor_written(pool: EmbeddedPool, stored: int) -> None:
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.turn(saves=[Save(1, tuple(KEYS[:2]), (None, KEYS[0]), ((5, -1),))])
    assert out.worker.drained(10)
    count = shard_count(KV.layout(), stored)
    assert pool.exists([shard_key(key, count, 0) for key in KEYS[:2]]) == [True, False]
    assert out.stage(1, KEYS[:1]) == 1
    before = out.tensor.clone()
    out.turn(loads=[Load(1, 4, ((-1,),))])
    out.stream.record_event().synchronize()
    assert torch.equal(out.tensor, before)
    out.close()


def test_a_reset_before_the_gather_gives_its_memory_back(pool: EmbeddedPool, stored: int) -> None:
    """The metadata of a pass that never ran, and of a request that is gone."""
    out = Made(pool_tensor(), Kept(pool), stored=stored)
    out.worker.bind(Meta(1, saves=(save(KEYS[:2], [5, 2], request_id=3),)))
    assert len(out.worker.audit()) == 2
    out.worker.bind(Meta(2, forget=(3,)))
    assert out.worker.audit() == [] and out.worker.status()["saves"]["torn"] == 2
    out.worker.bind(Meta(3, saves=(save(KEYS[:2], [5, 2], request_id=3),)))
    out.worker.bind(Meta(4))
    assert out.worker.audit() == []
    out.close()


def test_ids_are_reported_once_each_and_when_nothing_is_written_any_more() -> None:
    hold = threading.Event()
    made = EmbeddedPool(stored_layout(KV.layout(), 1), 4 << 20)
    out = Made(pool_tensor(), made)
    out.turn(saves=[save(KEYS[:1], [5])])
    assert out.worker.drained(10) and out.stage(1, KEYS[:1]) == 1
    out.stream.enqueue(lambda: hold.wait(20) and None)
    out.turn(loads=[Load(1, 4, ((1,),))])
    assert out.worker.get_finished([6], [4]) == ([6], [])
    assert out.worker.get_finished([4], []) == ([], []), "cancelled while it loads: its pages are still written to"
    hold.set()
    out.stream.record_event().synchronize()
    found: tuple[list[int], list[int]] = ([], [])
    while not (found[0] and found[1]):  # the copy may end between the looks for the one and for the other
        saved, loaded = out.worker.get_finished([], [])
        found = found[0] + saved, found[1] + loaded
    assert found == ([4], [4]) and out.worker.get_finished([], []) == ([], [])
    out.close()


class Broken:
    """A pool that fails in a way of its choice."""

    def __init__(self, outcome: Any = None, got: Any = None) -> None:
        self.outcome, self.got = outcome, got

    def write(self, puts: Sequence[Any], budget_s: float) -> list[PutResult]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [PutResult(self.outcome, reason="told to")] * len(puts)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any], budget_s: float) -> GetResult:
        if isinstance(self.got, Exception):
            raise self.got
        return GetResult([self.got] * len(keys), len(keys))

    def close(self) -> None: ...


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED, RuntimeError("a bug of the pool's")])
def test_a_pool_that_takes_nothing_costs_the_block_and_nothing_else(outcome: Any) -> None:
    out = Made(pool_tensor(), Broken(outcome))
    out.turn(saves=[save(KEYS[:2], [5, 2])])
    assert out.worker.drained(10) and out.worker.audit() == []
    assert out.worker.status()["saves"][outcome.value if isinstance(outcome, Outcome) else "failed"] == 2
    out.close()


def test_a_block_of_another_size_is_a_miss() -> None:
    out = Made(pool_tensor(), Broken(got=Got(17, Tier.DRAM)))
    assert out.stage(1, KEYS[:2]) == 0 and out.worker.audit() == []
    out.worker._pool.got = RuntimeError("a bug of the pool's")  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="a bug"):
        out.stage(2, KEYS[:2])
    assert out.worker.audit() == []
    out.close()


def test_neither_loads_nor_saves_can_take_all_of_the_memory() -> None:
    slots = Slots(Host(), 4096, 16 * 4096)
    assert len(slots.take(99, "save", "a")) == 8 and len(slots.take(99, "load", "b")) == 8
    assert slots.dropped == {"load": 91, "save": 91}
    other = Slots(Host(), 4096, 16 * 4096)
    assert len(other.take(99, "load", "a")) == 12 and len(other.take(99, "save", "b")) == 4
    assert slots.take(1, "load", "c") == []
    with pytest.raises(EngineRefused, match="staging_bytes: 4096 hold 1 blocks of 4096 bytes; set at least 32768"):
        Slots(Host(), 4096, 4096)


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_never_lost_and_never_given_twice(seed: int) -> None:
    rng, slots, held = Random(seed), Slots(Host(), 64, 20 * 4096), []
    for _ in range(200):
        if held and rng.random() < 0.5:
            slots.give(held.pop(rng.randrange(len(held))))
        else:
            held.append(slots.take(rng.randrange(5), rng.choice(["load", "save"]), "x"))
        flat = [slot for some in held for slot in some]
        assert len(flat) == len(set(flat)) == len(slots.audit())


def test_without_a_pool_nothing_is_matched_or_saved() -> None:
    assert open_pool(settings_of(), 0) is None
    worker = Worker(settings_of(), 0)
    worker.register_tensor(pool_tensor())
    worker.bind(Meta(1, saves=(save(KEYS[:1], [5]),)))
    for call in (worker.start_loads, worker.finish_saves):
        call(None)
    worker.wait_for_layer(0, None)
    worker.save_layer(0, None)
    worker.forward_done()
    assert worker.get_finished([1], [2])[1] == [] and worker.audit() == [] and worker.status() == {"pool": False}
    assert worker.drained(0.1)
    worker.close()


def test_a_pool_that_does_not_run_yet_is_no_error(tmp_path: Any) -> None:
    pool = open_pool(settings_of(pool_state=str(tmp_path / "pool.json")), 0)
    assert pool is not None and pool.match(KEYS[:1]) == 0
    pool.close()


def test_a_failed_copy_is_an_error_of_the_engine_and_never_done() -> None:
    stream = HostStream()
    stream.enqueue(lambda: (_ for _ in ()).throw(ValueError("the device is gone")))  # type: ignore[arg-type]
    event = stream.record_event()
    with pytest.raises(EngineFailed, match="a copy of the connector failed: the device is gone"):
        event.synchronize()
    with pytest.raises(EngineFailed, match="the device is gone"):
        event.query()
    stream.close()


def test_an_event_that_is_never_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool_trtllm.streams.WAIT_S", 0.01)
    with pytest.raises(EngineFailed, match="did not end within"):
        HostEvent().synchronize()


# What is registered.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(PAGES, LAYERS, 2, HEADS * SIZE * DIM, dtype=torch.uint8),
        torch.zeros(PAGES, LAYERS, 1, HEADS * SIZE * DIM, dtype=torch.bfloat16),
        torch.zeros(PAGES, LAYERS + 1, 2, HEADS * SIZE * DIM, dtype=torch.bfloat16),
        torch.zeros(PAGES, LAYERS, 2, HEADS * SIZE * DIM // 2, dtype=torch.bfloat16),
        torch.zeros(PAGES, LAYERS * 2, HEADS * SIZE * DIM, dtype=torch.bfloat16),
    ],
)
def test_a_tensor_of_another_engine_is_refused_with_both_shapes(tensor: torch.Tensor) -> None:
    with pytest.raises(EngineRefused, match=r"the engine's KV pool is \[.*make \[pages, 3, 2, 128\] of 2-byte ones"):
        of_tensor(tensor, settings_of(), 0)


def region(layers: Sequence[int], slots: int = PAGES, size: int = HEADS * SIZE * DIM * 2, roles: int = 2) -> Any:
    memory = torch.zeros(slots, len(layers) * roles * size + 32, dtype=torch.uint8)
    buffers = [SimpleNamespace(layer_id=layer, role=role) for layer in layers for role in ("key", "value")[:roles]]
    width = len(buffers) * size
    return SimpleNamespace(size=width, buffers=buffers, as_tensor=lambda dtype=torch.uint8: memory[:, :width])


def layout(*groups: Sequence[Any], tokens: int = SIZE) -> Any:
    made = [
        SimpleNamespace(
            layer_group_id=at, layer_ids=sorted({b.layer_id for one in regions for b in one.buffers}), regions=regions
        )
        for at, regions in enumerate(groups)
    ]
    return SimpleNamespace(tokens_per_block=tokens, groups=made)


def test_layer_groups_lie_one_after_another_in_a_packed_block() -> None:
    pages = of_layout(layout([region([0]), region([2])], [region([1])]), settings_of(), 0)
    assert [(group.at, group.size) for group in pages.groups] == [(0, 1024), (1024, 512)]
    found = pages.group_of(1)
    assert found is pages.groups[1] and pages.group_of(9) is None and pages.size == 1536


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (layout([region([0, 1, 2])], tokens=8), "blocks have 8 tokens, the connector's settings want 4"),
        (layout([region([0, 1, 2], size=128)]), "make buffers of 256 bytes"),
        (layout([region([0, 1])]), "KV of 2 layers, the connector's settings 3"),
        (layout([region([0, 1, 2], roles=1)]), "3 buffers for 3 layers of 2"),
        (layout(), "KV of 0 layers"),
    ],
)
def test_a_layout_of_another_engine_is_refused(made: Any, said: str) -> None:
    with pytest.raises(EngineRefused, match=said):
        of_layout(made, settings_of(), 0)
