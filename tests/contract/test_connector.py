"""kvtool's connector between the executor and a real pool: right answers and right blocks, whatever happens."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import adversary
import pytest
import real
import yaml

from kvtool.engine.trtllm.connector import SETTINGS_ENV
from kvtool.errors import EngineFailed
from kvtool.kv.shard import rank_shards, shard_count, shard_key
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import find_mpiexec, start_pool, stop_pool
from kvtool.pool.memory import SlotMemory
from kvtool.pool.state import read_state
from kvtool.transfer.segment import SHM

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("kvtool_trtllm.connector") is None, reason="no connector here"),
]

HERE = Path(__file__).resolve().parent
VERSIONS = ("1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc1")
_runs = itertools.count()


def pool_of(layout, folder, *, slots=4096, ranks=2, **more):
    size = SlotMemory.size(slots, layout.block_size)
    return start_pool(PoolConfig(layout, ranks=ranks, dram_size=size, file_size=0, heal=False, **more), folder)


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """`pools(layout)`: a real pool of two ranks for it, shared by the tests; each run has a namespace of its own."""
    started = {}

    def get(layout):
        if layout not in started:
            started[layout] = pool_of(layout, tmp_path_factory.mktemp("pool"))
        return started[layout].state_file

    yield get
    for handle in started.values():
        stop_pool(handle.run_dir, purge=True)


@pytest.fixture
def place(tmp_path, trtllm, pools):
    """Where one test's engines and pool meet."""

    class Place:
        def enter(self, version):
            trtllm(version)
            self.v2 = version >= "1.3"

        def file(self, setup, *, tp=1, stored=1, state="", namespace="", **more):
            folder = tmp_path / str(next(_runs))
            folder.mkdir()
            state = state if state != "" else pools(real.pool_layout(setup.model, stored))
            name = namespace or f"run-{os.getpid()}-{next(_runs)}"
            return real.settings(
                folder / "connector.yaml", setup.model, state, tp=tp, stored=stored, namespace=name, **more
            )

    return Place()


def keys_of(file, given, tokens):
    """The pool's keys of a request's blocks, by the connector's own rule."""
    from kvtool.engine.trtllm.connector import read_settings
    from kvtool_trtllm.keys import keys_of, seed_of

    request = adversary.fake("request")
    state = request.State(given, list(tokens), len(given.tokens))
    made = read_settings(file)
    return keys_of(seed_of(request.LlmRequest(state), made), list(tokens), made.kv.block_tokens)


def blocks_in_the_pool(file, setup, played, *, state, stored):
    """Check each block that the pool has of the requests of `played`, byte for byte; returns how many."""
    model, kv = setup.model, real.kv_of(setup.model)
    count, found = shard_count(kv, stored), 0
    right = {}
    for given in played.work.given.values():
        tokens = given.tokens + played.answers[given.request_id]
        for index, key in enumerate(keys_of(file, given, tokens)):
            for group, (shard, part) in itertools.product(
                range(len(model.layer_groups)), enumerate(_parts(kv, stored))
            ):
                raw = model.block(given, tokens, index, model.layer_groups[group].layers, part)
                right[shard_key(key, count, shard, group)] = raw
    with PoolClient(state, real.pool_layout(model, stored), client_name="checker") as client:
        there = [key for key, held in zip(right, client.exists(list(right)), strict=True) if held]
        buffers = [bytearray(len(right[key])) for key in there]
        got = client.get_into(there, buffers, leading=False)
        for key, buffer, one in zip(there, buffers, got.blocks, strict=True):
            assert not one.hit or (bytes(buffer) == right[key] and one.size == len(buffer)), "a wrong block in the pool"
            found += one.hit
    return found


def _parts(kv, stored):
    return [rank_shards(kv, stored, stored, rank).heads for rank in range(stored)][:: max(1, stored // kv.kv_heads)]


def without(requests, first=1000):
    """The same requests under other ids, as a later client sends them."""
    return [dataclasses.replace(one, request_id=first + at) for at, one in enumerate(requests)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", range(2))
def test_every_schedule_gives_the_answers_of_the_model_and_a_second_engine_hits(place, pools, version, seed):
    place.enter(version)
    seed += 10 * VERSIONS.index(version)
    tp = (1, 2)[seed % 2]
    setup, requests = real.drawn(seed, v2=place.v2 and seed % 10 > 0)
    file = place.file(setup, tp=tp, stored=tp)
    first = real.engine(setup, requests, file, tp=tp, seed=seed)
    state = pools(real.pool_layout(setup.model, tp))
    assert blocks_in_the_pool(file, setup, first, state=state, stored=tp) > 0
    second = real.engine(setup, without(requests), file, tp=tp, seed=seed + 1, cancels=0.02)
    assert second.stats["matched"] > 0
    blocks_in_the_pool(file, setup, second, state=state, stored=tp)


@pytest.mark.parametrize(("writes", "reads", "heads"), [(1, 2, 4), (4, 2, 4), (2, 4, 2), (4, 1, 2)])
def test_blocks_of_one_width_are_read_by_another(place, writes, reads, heads):
    place.enter("1.2.1")
    setup, requests = real.drawn(writes * 10 + reads, v2=False, kv_heads=heads, count=8)
    name = f"widths-{os.getpid()}-{writes}-{reads}-{heads}"
    for tp, count in ((writes, 0), (reads, 1)):
        file = place.file(setup, tp=tp, stored=4, namespace=name)
        played = real.engine(setup, without(requests, 1000 * count + 1), file, tp=tp, seed=count, cancels=0)
    assert played.stats["matched"] > 0


@pytest.mark.parametrize("differs", [{"salt": "bob"}, {"lora": real.LORA}, {"multimodal": [[1, 2]]}, {}])
def test_a_prefix_is_hit_by_those_only_who_compute_the_same(place, differs):
    place.enter("1.4.0rc1")  # which waits for its workers before the first request
    setup, requests = real.drawn(3, v2=False, count=3, tenants=False, keep=0.0)
    file = place.file(setup)
    long = [dataclasses.replace(one, tokens=[at] * 20, max_tokens=4, salt="ann") for at, one in enumerate(requests)]
    real.engine(setup, long, file, cancels=0)
    other = [dataclasses.replace(one, **differs) for one in without(long)]
    matched = real.engine(setup, other, file, cancels=0).stats["matched"]
    assert matched == (0 if differs else 3 * 16)


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
def test_a_pool_that_is_too_small_costs_hits_and_nothing_else(place, tmp_path, version):
    place.enter(version)
    setup, requests = real.drawn(21, v2=False, count=16)
    handle = pool_of(real.pool_layout(setup.model, 1), tmp_path / "pool", slots=6)
    try:
        file = place.file(setup, state=handle.state_file)
        for at in range(2):
            real.engine(setup, without(requests, 1000 * at + 1), file, seed=at)
    finally:
        stop_pool(handle.run_dir, purge=True)


def test_staging_that_is_too_small_costs_hits_and_nothing_else(place):
    place.enter("1.4.0rc1")
    setup, requests = real.drawn(22, v2=True, count=16)
    file = place.file(setup, staging_bytes=32 * real.pool_layout(setup.model, 1).block_size)
    for at in range(2):
        real.engine(setup, without(requests, 1000 * at + 1), file, seed=at)


@pytest.mark.parametrize("what", ["kill", "stop", "stop for good"])
def test_a_pool_rank_that_dies_or_hangs_in_the_middle_costs_hits_and_nothing_else(place, tmp_path, what):
    place.enter("1.4.0rc1")
    setup, requests = real.drawn(31, v2=True, count=18, batch=2)
    handle = pool_of(real.pool_layout(setup.model, 1), tmp_path / "pool")
    pid = read_state(handle.state_file).ranks[1].pid
    struck = threading.Event()
    try:
        file = place.file(setup, state=handle.state_file, claim_budget_s=0.3, save_budget_s=0.5)
        real.engine(setup, requests, file, seed=1)

        class Struck(adversary.Work):
            def __call__(self, executor):
                if len(executor.done) >= 4 and not struck.is_set():
                    os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                    struck.set()
                if len(executor.done) >= 12 and what == "stop":
                    os.kill(pid, signal.SIGCONT)
                return super().__call__(executor)

        work = Struck(2, without(requests), cancels=0.02)
        with real.environment(**{SETTINGS_ENV: str(file)}):
            adversary.play(setup, work, real.connector(), llm_args=real.llm_args(setup), what=f"pool rank: {what}")
        assert struck.is_set()
    finally:
        if what == "stop for good":
            os.kill(pid, signal.SIGCONT)
        stop_pool(handle.run_dir, purge=True)


@pytest.mark.parametrize(
    ("tp", "version", "form"),
    [
        pytest.param(1, "1.2.1", "v1", marks=pytest.mark.slow),
        (2, "1.4.0rc1", "v2"),
        (4, "1.2.1", "v1"),
    ],
)
def test_ranks_that_are_mpi_processes(place, packages, tmp_path, tp, version, form):
    place.enter(version)
    setup, requests = real.drawn(50 + tp, v2=form == "v2", count=10)
    file = place.file(setup, tp=tp, stored=4)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    own = {SETTINGS_ENV: str(file), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    mpi = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= own | mpi | (root if os.geteuid() == 0 else {})
    command = [find_mpiexec(), "--oversubscribe", "-n", str(tp), sys.executable, str(HERE / "rank.py")]
    command += [str(packages[version]), str(50 + tp), form, "10"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    lines = [json.loads(line[5:]) for line in run.stdout.splitlines() if line.startswith("said ")]
    assert len(lines) == 2, f"{run.stdout[-2000:]}{run.stderr[-4000:]}"
    for said in lines:
        assert not said["wrong"], said["wrong"][:2]
        for given in requests:
            tokens, reason = said["answers"][str(given.request_id)]
            right = setup.model.answer(given)
            assert tokens == right or (reason == "CANCELLED" and tokens == right[: len(tokens)])
    assert lines[1]["stats"]["matched"] > 0


def test_blocks_that_rot_in_the_pool_are_computed_again(place, tmp_path):
    place.enter("1.2.1")
    setup, requests = real.drawn(41, v2=False, count=8, tenants=False)
    handle = pool_of(real.pool_layout(setup.model, 1), tmp_path / "pool", ranks=1)
    try:
        file = place.file(setup, state=handle.state_file)
        first = real.engine(setup, requests, file, cancels=0)
        assert blocks_in_the_pool(file, setup, first, state=handle.state_file, stored=1) > 4
        rotten = sum(_rot(path, setup, requests) for path in SHM.glob(f"{handle.prefix}*"))
        assert rotten > 4
        second = real.engine(setup, without(requests), file, cancels=0)
        assert second.stats["matched"] < first.stats["admitted"] * 4 * 16
    finally:
        stop_pool(handle.run_dir, purge=True)


def _rot(path, setup, requests):
    """Flip a byte of every other block of the prompts where it lies in the segment; returns of how many."""
    model, found = setup.model, 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for given in requests:
            for index in range(0, len(given.tokens) // model.block_tokens, 2):
                raw = model.block(given, given.tokens, index, range(model.layers), range(model.kv_heads))
                at = memory.find(raw)
                if at >= 0:
                    memory[at + 5] ^= 0x40
                    found += 1
    return found


@pytest.mark.parametrize("how", [{"load": "layerwise"}, {"save": "prompt"}, {"save": "none"}])
@pytest.mark.parametrize("seed", [60, 61])
def test_other_settings_give_the_same_answers(place, pools, seed, how):
    place.enter("1.4.0rc1")
    setup, requests = real.drawn(seed, v2=seed % 2 == 1)
    file = place.file(setup, **how)
    state = pools(real.pool_layout(setup.model, 1))
    for at in range(2):
        played = real.engine(setup, without(requests, 1000 * at + 1), file, seed=seed + at, cancels=0.05)
        found = blocks_in_the_pool(file, setup, played, state=state, stored=1)
    assert (found > 0) == (played.stats["matched"] > 0) == (how.get("save") != "none")


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
def test_pages_of_a_request_that_is_cancelled_while_its_blocks_come_are_not_used_before(place, monkeypatch, version):
    place.enter(version)
    setup, requests = real.drawn(90, v2=False, count=24, keep=0.0, pages=28, late_s=0.0)
    file, slow = place.file(setup), importlib.import_module("kvtool_trtllm.streams").Host(late_s=0.03)
    real.engine(setup, requests, file, cancels=0)
    monkeypatch.setattr("kvtool_trtllm.worker.device_of", lambda memory: slow)
    played = real.engine(setup, without(requests), file, seed=1, cancels=0.15)
    ended = [done.reason.name for done in played.executors[0].done.values()]
    assert played.stats["matched"] > 0 and ended.count("CANCELLED") > 3


def test_without_a_pool_nothing_is_matched_and_nothing_is_wrong(place):
    place.enter("1.2.1")
    setup, requests = real.drawn(70, v2=False)
    for state in (None, "/nowhere/pool.json"):
        played = real.engine(setup, requests, place.file(setup, state=state))
        assert played.stats["matched"] == 0


def test_an_llm_that_names_the_connector_answers_the_same_and_reads_what_another_wrote(place, trtllm, tmp_path):
    place.enter("1.4.0rc1")
    package = trtllm("1.4.0rc1")
    setup, _ = real.drawn(80, v2=False)
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "vocab_size": 500,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 16, "torch_dtype": "bfloat16"}))
    names = real.llm_args(setup).kv_connector_config.model_dump()
    cache = {"tokens_per_block": 4, "max_tokens": 512, "enable_partial_reuse": False}
    sampling = package.SamplingParams(max_tokens=12)
    prompts = [[at, *range(30)] for at in range(4)]

    def answers(**more):
        with package.LLM(str(tmp_path), skip_tokenizer_init=True, kv_cache_config=cache, max_seq_len=64, **more) as llm:
            outputs = llm.generate(prompts, sampling, cache_salt="ann")
            assert not llm._executor.wrong
            return [one.outputs[0].token_ids for one in outputs], sum(one.cached_tokens for one in outputs)

    alone, _ = answers()
    with real.environment(**{SETTINGS_ENV: str(place.file(setup))}):
        assert answers(kv_connector_config=names)[0] == alone
        again, cached = answers(kv_connector_config=names)
    assert again == alone and cached > 0


def test_passes_that_call_the_hooks_of_some_layers_only_are_saved_whole(place, pools):
    place.enter("1.2.1")
    setup, requests = real.drawn(91, v2=False, hooked=(0, 2))
    file = place.file(setup)
    played = real.engine(setup, requests, file, cancels=0)
    assert blocks_in_the_pool(file, setup, played, state=pools(real.pool_layout(setup.model, 1)), stored=1) > 4
    layerwise = place.file(setup, load="layerwise", namespace=yaml.safe_load(file.read_text())["namespace"])
    with pytest.raises(EngineFailed, match="Set load: async"):
        real.engine(setup, without(requests), layerwise, cancels=0)
