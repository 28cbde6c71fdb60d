"""Routing: never to the down, balanced, warm where the load allows it."""

from __future__ import annotations

import time
from collections import Counter
from random import Random

import pytest

from kvtool.conductor.route import Router, text_chain
from kvtool.errors import Unavailable


def chain(seed: int, pieces: int) -> list[bytes]:
    return text_chain(f"{seed:07d} " * 32 * pieces)


@pytest.mark.parametrize("seed", range(60))
def test_any_history_goes_to_instances_that_are_up_and_within_the_stated_load(seed):
    """Random requests, ends, failures, health and time; a model beside the router counts what is in flight."""
    random, now_s = Random(seed), 0.0
    names = [f"prefill-{index}" for index in range(random.randrange(1, 7))]
    router = Router(names, imbalance_max=1.5, slack_tokens=500, digests_max=200, rest_s=1.0)
    tickets, load, down, resting = [], Counter(), set(), {}
    for _ in range(300):
        now_s += random.choice([0.0, 0.1, 1.0])
        for entry in [entry for entry in tickets if entry[2] <= now_s]:
            load[entry[0].instance] -= entry[1]
            tickets.remove(entry)
        event = random.choice(["ask"] * 5 + ["end"] * 2 + ["fail", "down", "up"])
        if event == "ask":
            prompt, tokens = chain(random.randrange(6), random.randrange(1, 9)), random.randrange(10, 2000)
            able = {name for name in names if name not in down and resting.get(name, 0.0) <= now_s}
            if not able:
                with pytest.raises(Unavailable):
                    router.choose(now_s, prompt)
                continue
            avoid = set(random.sample(names, random.randrange(len(names))))
            choice = router.choose(now_s, prompt, avoid)
            allowed = able - avoid or able
            assert choice.instance in allowed
            least = min(load[name] for name in allowed)
            assert load[choice.instance] <= (1.5 * least + 500 if choice.by == "affinity" else least)
            deadline_s = random.choice([0.5, 3.0, 100.0])
            ticket = router.started(now_s, choice.instance, prompt, tokens, deadline_s)
            tickets.append((ticket, tokens, now_s + deadline_s))
            load[choice.instance] += tokens
        elif event in ("end", "fail") and tickets:
            ticket, tokens, _ = tickets.pop(random.randrange(len(tickets)))
            load[ticket.instance] -= tokens
            if event == "end":
                router.finished(now_s, ticket)
                resting.pop(ticket.instance, None)
            else:
                router.failed(now_s, ticket)
                resting[ticket.instance] = {one.name: one for one in router.instances()}[ticket.instance].rests_until_s
                assert resting[ticket.instance] > now_s
        elif event in ("down", "up"):
            name = random.choice(names)
            router.health(now_s, name, event == "up")
            (down.discard if event == "up" else down.add)(name)
            if event == "up":
                resting.pop(name, None)
        assert router.digests <= 200
    router.tick(now_s + 1000)
    assert all((one.requests, one.tokens) == (0, 0) for one in router.instances())


def test_equal_requests_spread_evenly():
    router = Router([f"i{index}" for index in range(5)])
    for number in range(100):
        choice = router.choose(0.0, chain(number, 3))
        router.started(0.0, choice.instance, chain(number, 3), 400, 60.0)
    assert {one.requests for one in router.instances()} == {20}


def test_a_prompt_goes_where_its_prefix_was_seen_until_the_load_says_otherwise():
    router, tickets = Router(["a", "b"], imbalance_max=1.5, slack_tokens=1000), []

    def ask(prompt, tokens=800):
        choice = router.choose(0.0, prompt)
        tickets.append(router.started(0.0, choice.instance, prompt, tokens, 60.0))
        return choice

    first = ask(chain(1, 4))
    assert first.by == "load" and first.matched == 0
    longer = chain(1, 8)
    assert ask(longer).instance == first.instance
    assert ask(chain(2, 1)).instance != first.instance
    warm = router.choose(0.0, longer)
    assert (warm.instance, warm.matched, warm.by) == (first.instance, 8, "affinity")
    while router.choose(0.0, longer).instance == first.instance:
        tickets.append(router.started(0.0, first.instance, longer, 800, 60.0))
    liked, other = ({one.name: one.tokens for one in router.instances()}[name] for name in ("a", "b"))
    assert liked > 1.5 * other + 1000 >= liked - 800
    for ticket in tickets:
        router.finished(1.0, ticket)
    assert router.choose(1.0, longer).instance == first.instance


def test_an_instance_that_fails_rests_longer_each_time_and_health_ends_it():
    router = Router(["a"], rest_s=1.0)
    for failures, rest_s in enumerate([1, 2, 4, 8, 16, 32, 32]):
        ticket = router.started(0.0, "a", [], 10, 60.0)
        router.failed(0.0, ticket)
        with pytest.raises(Unavailable, match=f"a rests for .* after {failures + 1} failures"):
            router.choose(rest_s - 0.1, [])
        assert router.choose(rest_s, []).instance == "a"
    router.health(0.0, "a", True)
    assert router.choose(0.0, []).instance == "a"


def test_nothing_up_says_why():
    router = Router(["a", "b"])
    router.health(0.0, "a", False, "its stub died")
    router.health(0.0, "b", False)
    with pytest.raises(Unavailable, match=r"a is down \(its stub died\); b is down$"):
        router.choose(0.0, [])
    with pytest.raises(Unavailable, match="none is known"):
        Router([]).choose(0.0, [])


def test_a_retry_avoids_where_it_failed_if_there_is_another():
    router = Router(["a", "b"])
    assert router.choose(0.0, [], avoid={"a"}).instance == "b"
    router.health(0.0, "b", False)
    assert router.choose(0.0, [], avoid={"a"}).instance == "a"


def test_chains_share_what_prompts_share_and_tenants_share_nothing():
    one, other = text_chain("x" * 1000 + "a" * 600), text_chain("x" * 1000 + "b" * 600)
    assert len(one) == len(other) == 1600 // 256
    assert [left == right for left, right in zip(one, other, strict=True)] == [True] * 3 + [False] * 3
    assert not set(one) & set(text_chain("x" * 1600, salt="tenant"))
    assert text_chain("short") == []
    assert one[0].hex() == "df9e2cd774cadb80cd4b053f31026e4a"


def test_a_decision_over_a_thousand_instances_takes_under_a_millisecond():
    router = Router([f"i{index}" for index in range(1000)])
    prompt = chain(1, 250)
    for index in range(8):
        router.started(0.0, f"i{index}", prompt, 100, 60.0)
    best_s = 1.0
    for _ in range(20):
        began_s = time.perf_counter()
        choice = router.choose(0.0, prompt)
        best_s = min(best_s, time.perf_counter() - began_s)
    assert choice.matched == 250
    assert best_s < 1e-3
