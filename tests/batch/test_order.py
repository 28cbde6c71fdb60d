"""The order: what it reuses, that it loses and doubles nothing, and who waits for whom."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest

from kvtool.batch.order import STEP, Gate, Leaf, path_of, placed, shared_blocks
from kvtool.batch.store import Entry, Store
from kvtool.kv.block import block_keys

BLOCK = 4


def prompts(rng: Random, count: int) -> list[list[int]]:
    """Of a random tree: each begins as another does, up to somewhere."""
    made = [[rng.randrange(100) for _ in range(rng.randrange(1, 60))]]
    while len(made) < count:
        start = rng.choice(made)
        made.append(start[: rng.randrange(len(start) + 1)] + [rng.randrange(100) for _ in range(rng.randrange(1, 30))])
    rng.shuffle(made)
    return made


def path(tokens: list[int]) -> bytes:
    return path_of(block_keys(b"seed", tokens, BLOCK))


def really_shared(one: list[int], other: list[int]) -> int:
    same = 0
    while (same + 1) * BLOCK <= min(len(one), len(other)) and one[: (same + 1) * BLOCK] == other[: (same + 1) * BLOCK]:
        same += 1
    return same


@pytest.mark.parametrize("seed", range(30))
def test_paths_agree_as_far_as_prompts_do(seed: int) -> None:
    rng = Random(seed)
    made = prompts(rng, 20)
    for one in made:
        for other in made:
            assert shared_blocks(path(one), path(other)) == really_shared(one, other)


@pytest.mark.parametrize("seed", range(30))
def test_the_sorted_order_computes_each_block_of_the_tree_once(seed: int) -> None:
    """Blocks that are not shared with the one before, summed, are the nodes of the radix tree: no order has less."""
    made = prompts(Random(seed), 40)
    paths = sorted(path(tokens) for tokens in made)
    nodes = {one[: (at + 1) * STEP] for one in paths for at in range(len(one) // STEP)}
    order = list(placed(Leaf(at, one, 0, 0) for at, one in enumerate(paths)))
    assert sum(len(one.leaf.path) // STEP - one.shared for one in order) == len(nodes)
    assert [one.tree for one in order] == sorted(one.tree for one in order)


def fill(store: Store, made: list[list[int]], outs: list[int]) -> None:
    for number, (tokens, out) in enumerate(zip(made, outs, strict=True)):
        added = store.add(
            Entry(number, f"r{number}", number + 1, number * 10, 10, 0, False, len(tokens), out, path(tokens))
        )
        assert added is None


@pytest.mark.parametrize("seed", range(10))
def test_every_request_has_one_place_and_trees_stay_together(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    made = prompts(rng, 60)
    outs = [rng.choice([1, 8, 64]) for _ in made]
    store = Store.make(tmp_path / "index")
    fill(store, made, outs)
    plan = store.arrange(BLOCK, 1000)
    order = list(store.by_place())
    assert sorted(entry.number for entry in order) == list(range(60))
    assert [entry.number for entry in store.by_number()] == list(range(60))
    reused = sum(shared_blocks(a.path, b.path) for a, b in itertools.pairwise(order))
    assert plan.reused == reused * BLOCK and plan.requests == 60 and plan.tokens_in == sum(map(len, made))
    firsts = [entry.path[:STEP] for entry in order if entry.path]
    runs = [first for at, first in enumerate(firsts) if at == 0 or firsts[at - 1] != first]
    assert len(runs) == len(set(runs)), "a tree was torn apart"


def test_trees_with_long_answers_go_first(tmp_path: Path) -> None:
    store = Store.make(tmp_path / "index")
    fill(store, [[1] * 8, [2] * 8, [3] * 8], [4, 400, 40])
    store.arrange(BLOCK, 1000)
    assert [entry.tokens_out for entry in store.by_place()] == [400, 40, 4]


def test_arrival_order_is_that_of_the_input(tmp_path: Path) -> None:
    store = Store.make(tmp_path / "index")
    made = prompts(Random(1), 30)
    fill(store, made, [1] * 30)
    store.arrange(BLOCK, 1000, in_order=False)
    assert [entry.number for entry in store.by_place()] == list(range(30))
    assert [entry.number for entry in store.by_place(25)] == list(range(25, 30))


def test_a_custom_id_that_was_there_names_the_line_that_has_it(tmp_path: Path) -> None:
    store = Store.make(tmp_path / "index")
    fill(store, [[1]], [1])
    assert store.add(Entry(1, "r0", 7, 0, 1, 0, False, 1, 1, b"")) == 1


def test_one_that_shares_with_one_in_flight_waits_until_that_is_published() -> None:
    gate = Gate()
    shared = [5] * 8
    gate.started(0, path([*shared, 1, 1, 1, 1]))
    assert not gate.may_start(path([*shared, 2, 2, 2, 2]))
    assert gate.may_start(path([7] * 8)), "another tree waits for nobody"
    gate.published(0)
    assert gate.may_start(path([*shared, 2, 2, 2, 2]))
    gate.started(1, path([*shared, 2, 2, 2, 2]))
    assert gate.may_start(path([*shared, 3, 3, 3, 3])), "what both begin with is there already"
    assert not gate.may_start(path([*shared, 2, 2, 2, 2, 9, 9, 9, 9]))
    gate.failed(1)
    assert gate.may_start(path([*shared, 2, 2, 2, 2, 9, 9, 9, 9]))


def test_the_gate_forgets_the_oldest() -> None:
    gate = Gate(remembered=2)
    for number in range(3):
        gate.started(number, path([number] * BLOCK))
        gate.published(number)
        gate.published(number)
    gate.started(9, path([0] * BLOCK + [1] * BLOCK))
    assert not gate.may_start(path([0] * BLOCK + [2] * BLOCK))


@pytest.mark.parametrize("seed", range(20))
def test_the_gate_answers_as_a_comparison_with_each_one_in_flight_would(seed: int) -> None:
    rng, gate = Random(seed), Gate(remembered=4)
    paths = [path(tokens) for tokens in prompts(rng, 40)]
    computing: dict[int, bytes] = {}
    published: dict[int, bytes] = {}
    for _ in range(400):
        number = rng.randrange(len(paths))
        match rng.choice(["start", "publish", "fail"]):
            case "start" if number not in computing:
                wanted = max((shared_blocks(paths[number], other) for other in computing.values()), default=0)
                there = max((shared_blocks(paths[number], other) for other in published.values()), default=0)
                assert gate.may_start(paths[number]) == (there >= wanted)
                gate.started(number, paths[number])
                computing[number] = paths[number]
            case "publish":
                gate.published(number)
                if number in computing:
                    published.pop(number, None)
                    published[number] = computing.pop(number)
                    for old in list(published)[:-4]:
                        del published[old]
            case "fail":
                gate.failed(number)
                computing.pop(number, None)
