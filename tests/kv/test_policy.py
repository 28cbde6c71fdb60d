"""Every policy: who may not go stays, nobody is lost, memory is bounded; and what each one is for."""

from __future__ import annotations

from random import Random

import pytest

from kvtool.kv.policy import POLICIES, make, turn
from kvtool.kv.policy.base import Policy
from kvtool.kv.policy.changing import CHANGES_MAX, Changing, may_change, settled
from kvtool.kv.policy.mini import MiniCache
from kvtool.kv.policy.turn import AGES, age_class, best_rates

NAMES = [*POLICIES, "changing"]


def made(name: str) -> Policy[int]:
    return make(name) if name != "changing" else Changing(make("lru"), make("s3-fifo"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_a_victim_is_always_one_that_may_go_and_every_block_comes_up(name: str, seed: int) -> None:
    rng, policy = Random(seed), made(name)
    there: set[int] = set()
    held: set[int] = set()
    for step in range(1500):
        key = rng.randrange(60)
        match rng.choice(["come", "come", "use", "hold", "free", "go", "forget", "change"]):
            case "come" if key not in there:
                policy.admit(key, rng.randrange(4))
                there.add(key)
            case "use" if key in there:
                policy.use(key, rng.randrange(4)) if rng.random() < 0.8 else policy.renew(key)
            case "hold" if key in there:
                held.add(key)
            case "free" if key in held:
                held.discard(key)
                policy.offer(key)
            case "go":
                victim = policy.victim(lambda key: key not in held)
                assert (victim is None) == (not there - held), f"step {step}"
                if victim is not None:
                    assert victim in there - held
                    there.discard(victim)
                    policy.leave(victim, evicted=True)
            case "forget" if key in there and rng.random() < 0.3:
                policy.leave(key, evicted=False)
                there.discard(key)
                held.discard(key)
            case "change" if name == "changing" and step % 100 == 0:
                policy = settled(policy)
                if may_change(policy):
                    policy = Changing(policy, make(rng.choice(list(POLICIES))))
        assert len(policy) == len(there) and (key in policy) == (key in there)
        assert policy.ghosts <= (CHANGES_MAX + 1) * 4 * (len(there) + 1)
    for key in held & there:
        policy.offer(key)
    while there:
        victim = policy.victim()
        assert victim in there, "a block was lost"
        there.discard(victim)
        policy.leave(victim, evicted=True)
    assert policy.victim() is None and len(policy) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_large_tier_of_which_nothing_may_go_gives_no_victim_however_often_it_is_asked(name: str) -> None:
    policy: Policy[int] = make(name)
    for key in range(2000):
        policy.admit(key)
    assert [policy.victim(lambda key: False) for _ in range(20)] == [None] * 20
    for key in range(2000):
        policy.offer(key)
    assert policy.victim() is not None


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_run_remembers_a_bounded_number_of_keys(name: str) -> None:
    cache: MiniCache[int] = MiniCache(make(name), 50)
    for step in range(20_000):
        cache.access(step % 40 if step % 3 == 0 else step, step % 5)
        assert len(cache.keys) <= 50
    assert len(cache.policy) == 50 and cache.policy.ghosts <= 4 * 51


def hits(name: str, keys: list[int], size: int) -> int:
    cache: MiniCache[int] = MiniCache(make(name), size)
    return sum(cache.access(key) for key in keys)


def test_policies_that_look_twice_resist_a_scan_and_lru_does_not() -> None:
    """Five hot blocks, and between two rounds of them more one-offs than the cache has room for."""
    keys = [key for at in range(400) for key in [*range(5), *range(1000 + at * 20, 1000 + at * 20 + 20)]]
    assert hits("lru", keys, 20) == hits("fifo", keys, 20) == 0
    for name in ("lru-2", "turn"):
        assert hits(name, keys, 20) > 0.8 * 5 * 400, name


def test_turn_learns_which_turn_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the second turn are used again after 60 others, those of the first never."""
    monkeypatch.setattr(turn, "TURNS_MAX", 4)
    cache: MiniCache[int] = MiniCache(make("turn"), 40)
    found = 0
    for at in range(3000):
        cache.access(at, 1)
        cache.access(100_000 + at, 2)
        if at >= 30:
            found += cache.access(100_000 + at - 30, 3)
    assert found > 0.8 * 3000 > hits("lru", [key for at in range(3000) for key in (at, 100_000 + at)], 40)


def test_rates_are_the_best_over_all_spans() -> None:
    again, ended = [0.0] * AGES, [0.0] * AGES
    again[10], ended[10] = 50.0, 50.0  # half are used again at that age,
    ended[30] = 50.0  # the others never
    rates = best_rates(again, ended)
    assert rates[0] == pytest.approx(rates[4], rel=0.2) and rates[0] < rates[8] < rates[10]
    assert rates[11] == rates[30] == 0.0


def test_age_classes_grow_with_the_age() -> None:
    classes = [age_class(age) for age in range(5000)]
    assert classes == sorted(classes) and age_class(2**60) == AGES - 1
