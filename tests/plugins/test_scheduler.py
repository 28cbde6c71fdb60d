"""The scheduler's substance under a wound clock: claims, what ends them, and what is said to the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtool.engine.manifest import LayoutFields
from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.errors import EngineFailed
from kvtool_trtllm import scheduler as module
from kvtool_trtllm.keys import keys_of, seed_of
from kvtool_trtllm.meta import Load
from kvtool_trtllm.scheduler import CLAIM_TERM_S, Scheduler

SIZE = 4
KV = LayoutFields(layers=2, kv_heads=2, head_dim=4, block_tokens=SIZE, dtype="bfloat16")


@dataclass
class Ranks:
    """Every rank holds `blocks` of what is asked for."""

    blocks: int = 99
    staged: list[tuple[int, Sequence[bytes], float]] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    closed: bool = False

    def stage(self, load_id: int, keys: Sequence[bytes], budget_s: float) -> int:
        self.staged.append((load_id, keys, budget_s))
        return min(self.blocks, len(keys))

    def keep(self, load_id: int, blocks: int) -> None:
        self.kept.append((load_id, blocks))

    def wait_for_workers(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Made:
    def __init__(self, blocks: int = 99, **settings: Any) -> None:
        self.now_s, self.ranks = 100.0, Ranks(blocks)
        given = {"model_digest": "m", "kv": KV, "lora": {"7": "seven"}, **settings}
        self.settings = ConnectorSettings(**given)
        self.scheduler = Scheduler(self.settings, self.ranks, lambda: self.now_s, tick=False)


def request(request_id: int, tokens: int = 13, **more: Any) -> Any:
    return SimpleNamespace(request_id=request_id, get_tokens=lambda beam: list(range(tokens)), **more)


def data(request_id: int, tokens: Sequence[int], pages: Sequence[int], position: int, **more: Any) -> Any:
    found = {"num_scheduled_tokens": len(tokens), **more}
    return SimpleNamespace(
        request_id=request_id, new_tokens=tokens, new_block_ids=pages, computed_position=position, **found
    )


def test_a_claim_becomes_a_load_of_its_own_pages() -> None:
    made = Made(blocks=2)
    assert made.scheduler.match(request(1), 4) == (8, True)
    ((load_id, keys, budget_s),) = made.ranks.staged
    assert len(keys) == 2 and budget_s == made.settings.claim_budget_s
    assert list(keys) == keys_of(seed_of(request(1), made.settings) or b"", list(range(13)), SIZE)[1:3]
    made.scheduler.allocated(request(1), [[5, 6, 7, 8]])
    meta = made.scheduler.build([], [])
    assert meta.loads == (Load(load_id, 1, ((6, 7),)),) and meta.iteration == 1
    assert made.scheduler.build([], []).loads == () and made.ranks.kept == []


def test_layerwise_loads_join_the_batch() -> None:
    made = Made(load="layerwise")
    assert made.scheduler.match(request(1), 0) == (12, False)
    made.scheduler.allocated(request(1), [[5, 6, 7, 8]])
    new = data(1, list(range(13)), [5, 6, 7, 8], 0, num_scheduled_tokens=1)
    meta = made.scheduler.build([new], [])
    assert meta.loads[0].layerwise and meta.saves == ()


@pytest.mark.parametrize(
    "asked",
    [
        request(1, tokens=4),
        request(1, is_generation_only_request=True),
        request(1, lora_task_id=3),
        request(1, prompt_embedding_table=[1]),
        request(1, is_generation_only_request=lambda: True),
        request(1, py_multimodal_data={"image": 1}),
        request(1, py_multimodal_data=[1]),
    ],
    ids=["too short", "generation only", "no digest of an adapter", "a prompt table", "a method", "images", "a list"],
)
def test_nothing_is_claimed_where_nothing_can_be_known(asked: Any) -> None:
    made = Made()
    assert made.scheduler.match(asked, 0) == (0, False) and made.ranks.staged == []


@pytest.mark.parametrize("plain", [{}, {"mrope_config": 1}, None])
def test_rotary_positions_alone_follow_from_the_tokens(plain: Any) -> None:
    assert Made().scheduler.match(request(1, py_multimodal_data=plain), 0) == (12, True)


def test_images_that_are_seen_only_after_the_match_are_not_saved() -> None:
    """The V1 manager matches with the C++ request, which has no images; the Python one comes with the allocation."""
    made = Made(blocks=0)
    for number, more in ((1, {"py_multimodal_data": {"image": 1}}), (2, {})):
        made.scheduler.match(request(number, tokens=8), 0)
        made.scheduler.allocated(request(number, tokens=8, **more), [[3, 4]])
    made.scheduler.allocated(request(3, py_multimodal_data={"image": 1}), [[5]])
    meta = made.scheduler.build([data(number, list(range(8)), [3, 4], 0) for number in (1, 2)], [])
    assert [save.request_id for save in meta.saves] == [2]


def test_a_claim_that_is_taken_in_part_is_loaded_in_part() -> None:
    made = Made()
    made.scheduler.match(request(1), 0)
    made.scheduler.cancel_load(request(1), 4, 13)
    assert made.ranks.kept == [(1, 1)]
    made.scheduler.allocated(request(1), [[5, 6, 7, 8]])
    assert made.scheduler.build([], []).loads == (Load(1, 1, ((5,),)),)


def test_a_lapsed_claim_that_is_not_taken_is_given_back_once() -> None:
    made = Made()
    made.scheduler.match(request(1), 0)
    made.now_s += CLAIM_TERM_S
    made.scheduler.expire()
    made.scheduler.cancel_load(request(1), 0, 13)
    assert made.ranks.kept == [(1, 0)]


def test_what_no_rank_holds_is_no_claim_and_never_zero_beside_the_batch() -> None:
    assert Made(blocks=0).scheduler.match(request(1), 0) == (0, False)


def test_a_claim_that_is_cancelled_finished_reset_or_overtaken_is_given_back() -> None:
    made = Made()
    ends = (
        made.scheduler.cancel_load,
        made.scheduler.finished,
        made.scheduler.reset,
        lambda again: made.scheduler.match(again, 0),
    )
    for number, end in enumerate(ends):
        made.scheduler.match(request(number), 0)
        (load_id, _, _) = made.ranks.staged[-1]
        end(request(number))
        assert (load_id, 0) in made.ranks.kept, number
    assert made.scheduler.build([], []).forget == (2,)
    made.scheduler.cancel_load(request(77))
    made.scheduler.reset(request(77))
    assert made.scheduler.finished(request(77)) is False


def test_pages_of_a_running_load_stay_and_others_do_not() -> None:
    made = Made()
    for number in (1, 2):
        made.scheduler.match(request(number), 0)
        made.scheduler.allocated(request(number), [[1, 2, 3, 4]])
    made.scheduler.build([], [])
    assert made.scheduler.finished(request(1)) is True
    made.scheduler.build([data(2, list(range(13)), [1, 2, 3, 4], 12)], [])
    assert made.scheduler.finished(request(2)) is False


def test_a_claim_lapses_by_the_clock_without_any_work() -> None:
    made = Made()
    made.scheduler.match(request(1), 0)
    assert [(one, blocks) for one, blocks, _ in made.scheduler.audit()] == [(1, 3)]
    made.now_s += CLAIM_TERM_S - 0.1
    made.scheduler.expire()
    assert made.ranks.kept == []
    made.now_s += 0.1
    made.scheduler.expire()
    assert made.ranks.kept == [(1, 0)] and made.scheduler.audit() == [] and made.scheduler.status()["expired"] == 1
    made.scheduler.finished(request(1))
    assert made.ranks.kept == [(1, 0)], "it was given back once"


def test_a_lapsed_claim_that_is_allocated_after_all_is_staged_again() -> None:
    made = Made()
    made.scheduler.match(request(1), 0)
    made.now_s += CLAIM_TERM_S
    made.scheduler.expire()
    made.scheduler.allocated(request(1), [[1, 2, 3, 4]])
    assert [load_id for load_id, _, _ in made.ranks.staged] == [1, 2]
    assert list(made.ranks.staged[0][1]) == list(made.ranks.staged[1][1])
    assert made.scheduler.build([], []).loads[0].load_id == 2


def test_a_lapsed_claim_that_cannot_be_had_again_stops_the_engine() -> None:
    made = Made()
    made.scheduler.match(request(1), 0)
    made.now_s += CLAIM_TERM_S
    made.scheduler.expire()
    made.ranks.blocks = 1
    with pytest.raises(EngineFailed, match="1 of 3 can be had now; the engine must not run over pages that nobody"):
        made.scheduler.allocated(request(1), [[1, 2, 3, 4]])
    assert (2, 0) in made.ranks.kept


def test_fewer_pages_than_were_claimed_stop_the_engine() -> None:
    made = Made()
    made.scheduler.match(request(1), 0)
    with pytest.raises(EngineFailed, match=r"3 blocks from block 0 on were claimed and \[2\] pages allocated"):
        made.scheduler.allocated(request(1), [[1, 2]])
    assert (1, 0) in made.ranks.kept


def test_saves_go_out_with_the_iteration_that_completes_them() -> None:
    made = Made(blocks=0)
    made.scheduler.match(request(1, tokens=8), 0)
    meta = made.scheduler.build([data(1, list(range(8)), [3, 4], 0)], [])
    assert [save.pages for save in meta.saves] == [((3, 4),)]
    for token in range(4):
        more = {"new_block_ids_by_layer_group": [[9], [-1]] if token == 0 else [[], []]}
        meta = made.scheduler.build([], [data(1, [token], [], 8 + token)] if token else [data(1, [0], [9], 8)])
        del more
    assert [save.pages for save in meta.saves] == [((9,),)] and made.scheduler.status()["saved_blocks"] == 3


def test_pages_come_by_layer_group_where_there_are_several() -> None:
    made = Made(blocks=0)
    made.scheduler.match(request(1, tokens=8), 0)
    one = data(1, list(range(8)), [], 0, new_block_ids_by_layer_group=[[3, 4], [-1, 5]])
    assert made.scheduler.build([one], []).saves[0].pages == ((3, 4), (-1, 5))


def test_books_that_nothing_is_heard_of_are_closed() -> None:
    made = Made(blocks=0)
    for number in (1, 2):
        made.scheduler.match(request(number), 0)
    made.now_s += module.BOOKS_TERM_S
    made.scheduler.build([data(2, list(range(13)), [1, 2, 3, 4], 0)], [])
    made.now_s += 1.0
    made.scheduler.expire()
    assert made.scheduler.status()["known"] == 1
    assert made.scheduler.build([], [data(1, [5], [6, 7, 8, 9], 12)]).saves == ()


def test_its_thread_ends_what_is_due_and_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    monkeypatch.setattr(module, "CLAIM_TERM_S", 0.0)
    ranks = Ranks()
    running = Scheduler(Made().settings, ranks, tick=True)
    running.match(request(1), 0)
    for _ in range(1000):
        if ranks.kept:
            break
        running._closed.wait(0.01)
    assert ranks.kept == [(1, 0)]
    running.close()
    assert ranks.closed


def test_a_salt_an_adapter_and_images_each_have_their_own_keys() -> None:
    settings = Made().settings
    asked = [
        request(1),
        request(1, cache_salt_id=5),
        request(1, cache_salt="five"),
        request(1, lora_task_id=7),
        request(1, py_lora_task_id=7, cache_salt_id=5),
        request(1, multimodal_hashes=[[1, 2]]),
        request(1, multimodal_hashes=[[1, 3]]),
        request(1, multimodal_hashes=[[1, 2]], prompt_embedding_table=[0]),
    ]
    seeds = [seed_of(one, settings) for one in asked]
    assert None not in seeds and len(set(seeds)) == len(seeds) - 1 and seeds[5] == seeds[7]
