"""The executor with a connector of one page: right answers on every schedule, and each planted fault is found."""

from __future__ import annotations

import random

import adversary
import plain
import pytest

OLD = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
NEW = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


def module_of(version: str) -> str:
    return OLD if version < "1.3" else NEW


def run(
    seed: int, version: str, *, fault: str = "", v2: bool = False, tp: int = 1, count: int = 14, cancels=0.15, **fixed
):
    rng = random.Random(seed)
    setup = adversary.setup_of(rng, v2=v2, tp=tp, **fixed)
    requests = adversary.requests_of(rng, setup, count)
    shared = plain.Shared(setup.model, tp, fault)
    work = adversary.Work(seed, requests, cancels=cancels)
    played = adversary.play(setup, work, plain.classes(module_of(version), shared), tp=tp, what=f"seed {seed}")
    return played, shared, setup


def blocks_are_right(played, shared, setup, tp: int) -> int:
    """Each block of the dictionary is one that the model computes. Returns how many that it should hold are lost: whole
    ones of requests that ran to their end, but for the last, whose tokens may be known too late."""
    model, size = setup.model, setup.model.block_tokens
    right, wanted = set(), set()
    for given in played.work.given.values():
        made = given.tokens + played.answers[given.request_id]
        ended = played.executors[0].done[given.request_id].reason.name != "CANCELLED"
        for rank in range(tp):
            for group in model.layer_groups:
                for index in range(len(made) // size):
                    raw = model.block(given, made, index, group.layers, model.heads(rank, tp))
                    right.add(raw)
                    if ended and (index + 2) * size < len(made):
                        wanted.add(raw)
    held = set(shared.blocks.values())
    assert held <= right, f"{len(held - right)} of {len(held)} blocks hold what no request's tokens give"
    return len(wanted - held)


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
@pytest.mark.parametrize("seed", range(5))
def test_every_schedule_gives_the_answers_of_the_model(trtllm, version, seed):
    trtllm(version)
    v2, tp = version >= "1.3" and seed % 4 != 0, 1 + seed % 2
    played, shared, setup = run(seed, version, v2=v2, tp=tp)
    assert len(shared.blocks) > 20
    assert blocks_are_right(played, shared, setup, tp) == 0 or len(setup.model.layer_groups) > 1


def test_blocks_are_loaded_and_reused_and_requests_are_reset_and_cancelled_over_the_seeds(trtllm):
    trtllm("1.4.0rc1")
    wanted = ("matched", "reused", "resets", "CANCELLED", "END_ID", "LENGTH")
    total: dict[str, int] = {}
    for seed in range(40, 56):
        played, _, _ = run(seed, "1.4.0rc1", v2=True, groups=())
        ended = [done.reason.name for done in played.executors[0].done.values()]
        for name, count in (*played.stats.items(), *((reason, 1) for reason in ended)):
            total[name] = total.get(name, 0) + count
        if all(total.get(name, 0) > 0 for name in wanted):
            return
    pytest.fail(f"not all of {wanted} happened: {total}")


SEEDS_MAX = 30
"""A fault is found within as many seeds, most in the first."""


@pytest.mark.parametrize("fault", plain.FAULTS)
def test_a_planted_fault_is_found(trtllm, fault):
    version = "1.2.1" if fault == "frees pages that are loaded" else "1.4.0rc1"
    trtllm(version)
    adversary.fake("executor").STUCK_S = 2.0
    fixed = {"v2": version >= "1.3" and fault != "frees pages that are gathered", "late_s": 0.0005}
    if fault == "frees pages that are loaded":
        fixed.update(cancels=1.0, keep=0.0, count=24)
    for seed in range(SEEDS_MAX):
        try:
            played, shared, setup = run(seed, version, fault=fault, **fixed)
            lost = blocks_are_right(played, shared, setup, 1)
            assert not (fault == "loses the tail of chunks" and lost), f"{lost} blocks are lost"
        except AssertionError as error:
            print(f"{fault}: seed {seed}: {error}")
            return
    pytest.fail(f"nothing found in {SEEDS_MAX} seeds of a connector that {fault}")
