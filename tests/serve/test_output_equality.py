"""The output-equality oracle: any fault, in any subset of blocks, gives the tokens of a cold run without a pool.

The engine's next token depends on every KV byte it reads, so a wrong byte anywhere shows.
"""

from __future__ import annotations

import itertools
import threading
from random import Random

import pytest
from serving import BLOCK, DECODE, LAYOUT, WAIT_S, Stream, alone, embedded, oracle, prompt, serving

from kvtool.engine.base import DecodeStep
from kvtool.kv.block import block_keys
from kvtool.pool.embedded import EmbeddedPool
from kvtool.serve.handoff import Handoff
from kvtool.serve.keys import prompt_keys
from kvtool.serve.request import Finish, Request, Sampling

LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 31, 32, 33, 40, 63, 64, 65, 97, 100, 128, 130, 200, 257, 500]
SHARED = [prompt(900, 48) + prompt(seed, extra) for seed, extra in enumerate([1, 2, 7, 8, 9, 16, 33, 80, 0, 47, 64, 5])]
PROMPTS = [prompt(count, count) for count in LENGTHS] + SHARED


def keys_of(tokens, salt=""):
    return prompt_keys(Request("keys", tuple(tokens), 1, salt=salt), oracle(), "default").all


def flip(pool: EmbeddedPool, key: bytes, bit: int) -> None:
    """Flip one bit of a stored block, behind the pool's back."""
    with pool.read([key]) as read:
        data = bytes(read.blocks[0].data)
    at = pool._map.find(data)
    assert at >= 0
    pool._map[at + bit // 8] ^= 1 << bit % 8


def test_cold_and_warm_answers_equal_those_of_one_process():
    expected = [alone(tokens) for tokens in PROMPTS]
    pool = embedded()
    with serving(pool) as house:
        cold = [house.ask(tokens).tokens for tokens in PROMPTS]
        warm = [house.ask(tokens) for tokens in PROMPTS]
    assert cold == expected
    assert [stream.tokens for stream in warm] == expected
    for tokens, stream in zip(PROMPTS, warm, strict=True):
        whole = len(tokens) // BLOCK * BLOCK
        assert stream.last.usage.hit_tokens == ({"dram": whole} if whole else {})
        assert stream.last.usage.computed_tokens == len(tokens) - whole
    assert pool.audit() == []
    pool.close()


def test_sampled_answers_are_equal_cold_warm_and_alone():
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=11)
    pool = embedded()
    with serving(pool) as house:
        for tokens in PROMPTS[5:12]:
            expected = alone(tokens, sampling=sampling)
            assert expected != alone(tokens)
            assert house.ask(tokens, sampling=sampling).tokens == expected
            assert house.ask(tokens, sampling=sampling).tokens == expected
    pool.close()


@pytest.mark.parametrize("blocks", range(1, 13))
def test_one_flipped_bit_in_any_block_is_a_miss_and_the_right_answer(blocks):
    tokens = prompt(blocks, blocks * BLOCK + 3)
    expected, random = alone(tokens, 4), Random(blocks)
    for index in range(blocks):
        pool = embedded(64)
        with serving(pool) as house:
            assert house.ask(tokens, 4).tokens == expected
            flip(pool, keys_of(tokens)[index], random.randrange(LAYOUT.block_size * 8))
            stream = house.ask(tokens, 4)
            assert stream.tokens == expected
            assert stream.last.usage.hit_tokens.get("dram", 0) == index * BLOCK
            assert pool.counts().misses["corrupt"] >= 1
            assert house.ask(tokens, 4).last.usage.hit_tokens == {"dram": blocks * BLOCK}, "not healed"
        pool.close()


def test_a_flipped_bit_that_nobody_checks_would_change_the_answer():
    """The oracle itself: without this the tests above prove nothing."""
    tokens = prompt(7, 5 * BLOCK)
    engine, random = oracle(), Random(3)

    def answer(flipped: int | None) -> int:
        sequence = engine.open(len(tokens) + 1)
        engine.prefill(sequence, tokens, 0, len(tokens))
        if flipped is not None:
            index, bit = divmod(flipped, LAYOUT.block_size * 8)
            block = bytearray(LAYOUT.block_size)
            engine.export_block(sequence, index, memoryview(block))
            block[bit // 8] ^= 1 << bit % 8
            engine.import_block(sequence, index, memoryview(block))
        logits = engine.decode([DecodeStep(sequence, tokens[-1], len(tokens) - 1)])
        engine.close(sequence)
        return int(logits[0].argmax())

    right = answer(None)
    assert answer(None) == right
    last = len(tokens) - 1  # its own KV is written by decode, not read
    read = [bit for bit in range(5 * LAYOUT.block_size * 8) if not _in_position(bit, last)]
    wrong = sum(answer(bit) != right for bit in random.sample(read, 200))
    assert wrong >= 197  # one in 512 wrong answers is the right token by luck


def _in_position(bit: int, position: int) -> bool:
    index, at = divmod(bit // 8, LAYOUT.block_size)
    row = at // (LAYOUT.head_dim * 2)
    return index * BLOCK + row % BLOCK == position


@pytest.mark.parametrize("seed", range(6))
def test_any_subset_of_lost_blocks_gives_the_same_tokens(seed):
    """Blocks vanish between prefill and decode: all subsets of small prompts, random ones of larger prompts."""
    random = Random(seed)
    blocks = [3, 4, 5, 7, 9, 12][seed]
    tokens = prompt(seed, blocks * BLOCK + seed)
    expected = alone(tokens, 3)
    whole = list(range(blocks + 1))
    if blocks <= 4:
        subsets = [set(chosen) for size in range(blocks + 2) for chosen in itertools.combinations(whole, size)]
    else:
        subsets = [{index for index in whole if random.random() < random.choice([0.1, 0.5, 0.9])} for _ in range(24)]
    pool = embedded(64)
    keys = keys_of(tokens)
    with serving(Losing(pool), decode=DECODE) as house:
        losing = house.decode._pool
        for number, subset in enumerate(subsets):
            request = Request(f"s{number}", tokens, 3)
            done = house.prefilled(request)
            losing.lost = {keys[index] for index in subset if index < len(keys)}
            assert house.decoded(request, done.handoff).tokens == expected
            house.settle()
            losing.lost = set()
    assert pool.audit() == []
    pool.close()


class Losing:
    """A pool that has lost the blocks in `lost`: a read ends before the first of them, a match too."""

    def __init__(self, pool: EmbeddedPool) -> None:
        self.pool, self.lost = pool, set()

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def _there(self, keys):
        return list(itertools.takewhile(lambda key: key not in self.lost, keys))

    def match(self, keys, budget_s=0.5):
        return self.pool.match(self._there(keys), budget_s)

    def read(self, keys, budget_s=2.0):
        return self.pool.read(self._there(keys), budget_s)


def test_two_tenants_never_meet_on_a_block():
    tokens, pool = prompt(1, 10 * BLOCK + 2), embedded()
    with serving(pool) as house:
        expected = alone(tokens)
        first = house.ask(tokens, salt="tenant-a")
        other = house.ask(tokens, salt="tenant-b")
        again = house.ask(tokens, salt="tenant-a")
    assert first.tokens == other.tokens == again.tokens == expected
    assert other.last.usage.hit_tokens == {} and again.last.usage.hit_tokens == {"dram": 10 * BLOCK}
    assert not set(keys_of(tokens, "tenant-a")) & set(keys_of(tokens, "tenant-b"))
    pool.close()


def test_engines_of_other_numerics_share_no_block():
    tokens, pool = prompt(2, 6 * BLOCK), embedded()
    with serving(pool) as house:
        house.ask(tokens)
    with serving(pool, engines=lambda: oracle(numerics="oracle-2")) as house:
        assert house.ask(tokens).last.usage.hit_tokens == {}
    pool.close()


@pytest.mark.parametrize("turn_tokens", [1, 3, 8, 21, 40])
def test_the_next_turn_hits_generated_blocks_and_equals_a_cold_run(turn_tokens):
    pool, tokens = embedded(), prompt(turn_tokens, 27)
    before = 0
    with serving(pool) as house:
        for turn in range(4):
            stream = house.ask(tokens, 19)
            assert stream.tokens == alone(tokens, 19), f"turn {turn}"
            if turn:
                assert stream.last.usage.hit_tokens == {"dram": before // BLOCK * BLOCK}, f"turn {turn}"
            before = len(tokens) + len(stream.tokens)
            tokens = (*tokens, *stream.tokens, *prompt(turn, turn_tokens))
    pool.close()


def test_what_decode_puts_is_canonical_byte_for_byte():
    tokens, pool, engine = prompt(3, 20), embedded(), oracle()
    with serving(pool) as house:
        answer = house.ask(tokens, 30).tokens
    history = (*tokens, *answer)
    sequence = engine.open(len(history))
    engine.prefill(sequence, history, 0, len(history))
    keys = block_keys(prompt_keys(Request("k", history, 1), engine, "default").seed, history, BLOCK)
    with pool.read(keys) as read:
        assert len(read.blocks) == len(history) // BLOCK
        for index, view in enumerate(read.blocks):
            canonical = bytearray(LAYOUT.block_size)
            engine.export_block(sequence, index, memoryview(canonical))
            assert bytes(view.data) == bytes(canonical), f"block {index}"
    pool.close()


@pytest.mark.parametrize("seed", range(4))
def test_concurrent_requests_with_cancels_under_eviction(seed):
    """16 at once, shared prefixes, a pool that holds a third of it, engines that hold a few; some are cancelled."""
    random = Random(seed)
    prompts = [prompt(random.randrange(3), 8 * random.randrange(1, 9)) + prompt(i, i % 11 + 1) for i in range(16)]
    expected = {tokens: alone(tokens, 12) for tokens in set(prompts)}
    pool = embedded(48)
    with serving(pool, engines=lambda: oracle(60)) as house:
        answers: dict[int, Stream] = {}
        cancelled = set()
        ready = threading.Semaphore(0)
        for number, tokens in enumerate(prompts * 2):
            request, stream = Request(f"c{number}", tokens, 12, priority=random.randrange(100)), Stream()
            answers[number] = stream

            def then(done, request=request, stream=stream):
                if done.error is None:
                    house.decode.submit(request, stream, done.handoff)
                else:
                    stream.ended.set()
                ready.release()

            house.prefill.submit(request, then)
            if random.random() < 0.3:
                worker = random.choice([house.prefill, house.decode])
                if worker is house.decode:
                    ready.acquire(timeout=WAIT_S)
                if worker.cancel(f"c{number}"):
                    cancelled.add(number)
        for number, stream in answers.items():
            assert stream.ended.wait(WAIT_S), number
            if stream.events and stream.last.finish is Finish.LENGTH:
                assert stream.tokens == expected[(prompts * 2)[number]], number
            else:
                assert number in cancelled, stream.events
        house.settle()
    assert pool.audit() == []
    pool.close()


def test_a_handoff_that_lies_costs_time_and_no_answer():
    tokens, pool = prompt(4, 50), embedded()
    expected = alone(tokens)
    with serving(pool) as house:
        for number, lie in enumerate([Handoff(99, 7, 99, {"dram": 10**6}), Handoff(0), Handoff(6, 2, 6), None]):
            stream = house.decoded(Request(f"l{number}", tokens, 10), lie)
            assert stream.tokens == expected
    pool.close()
