"""The scheduler's books: what may be claimed, what is saved and when, through every turn that a request can take."""

from __future__ import annotations

from random import Random

import pytest

from kvtool.kv.block import block_keys
from kvtool_trtllm.meta import Save
from kvtool_trtllm.requests import Claim, Requests, Step

SIZE, SEED = 4, b"s" * 32


def step(request_id: int, tokens: list[int], pages: list[int], position: int, scheduled: int | None = 1) -> Step:
    return Step(request_id, tokens, [pages], position, scheduled)


def saved(save: Save | None) -> list[int]:
    """Its pages; [] for nothing."""
    return list(save.pages[0]) if save else []


@pytest.mark.parametrize(
    ("prompt", "computed", "blocks"),
    [(0, 0, range(0)), (1, 0, range(0)), (4, 0, range(0)), (5, 0, range(1)), (9, 4, range(1, 2)), (9, 3, range(0)),
     (9, 8, range(2, 2))],
)  # fmt: skip
def test_whole_blocks_may_be_claimed_and_one_token_is_left(prompt: int, computed: int, blocks: range) -> None:
    assert list(Requests(SIZE).claimable(prompt, computed)) == list(blocks)


def test_a_prompt_in_chunks_is_saved_as_its_blocks_become_whole() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 11, 0, None)
    tokens = list(range(11))
    first = books.step(step(1, tokens, [7, 8, 9], 0, 6), new=True)
    assert saved(first) == [7] and first is not None and first.keys == tuple(block_keys(SEED, tokens, SIZE)[:1])
    assert first.parents == (None,)
    second = books.step(step(1, [], [], 6, 5), new=False)
    assert saved(second) == [8] and second is not None and second.parents == first.keys


def test_blocks_of_the_answer_are_saved_when_their_tokens_are_known() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 3, 0, None)
    assert books.step(step(1, [1, 2, 3], [5], 0, 3), new=True) is None
    assert saved(books.step(step(1, [4], [], 3), new=False)) == [5]
    for token in (5, 6, 7):
        assert books.step(step(1, [token], [6] if token == 5 else [], token - 1), new=False) is None
    assert saved(books.step(step(1, [8], [], 7), new=False)) == [6]


def test_what_is_computed_before_its_token_is_known_waits_for_the_token() -> None:
    """Overlap scheduling: a pass runs one token ahead of what the host has seen."""
    books = Requests(SIZE)
    books.admitted(1, SEED, 3, 0, None)
    books.step(step(1, [1, 2, 3], [5], 0, 3), new=True)
    assert books.step(step(1, [], [], 3, 1), new=False) is None
    assert saved(books.step(step(1, [4], [], 4, 1), new=False)) == [5]


@pytest.mark.parametrize(("save", "pages"), [("all", [5, 6]), ("prompt", [5]), ("none", [])])
def test_which_blocks_are_saved(save: str, pages: list[int]) -> None:
    books, found = Requests(SIZE, save), []
    books.admitted(1, SEED, 5, 0, None)
    found += saved(books.step(step(1, [1, 2, 3, 4, 5], [5, 6], 0, 5), new=True))
    for token in (6, 7, 8):
        found += saved(books.step(step(1, [token], [], token - 1), new=False))
    assert found == pages


def test_what_came_from_engine_or_pool_is_not_saved_again() -> None:
    """Four tokens reused, four claimed, the rest computed; the position that the engine says leaves the claim out."""
    books = Requests(SIZE)
    claim = Claim(1, 1, 1, True, 0.0)
    books.admitted(1, SEED, 12, 4, claim)
    save = books.step(step(1, list(range(12)), [3, 4, 5], 4, 4), new=True)
    assert saved(save) == [5]


def test_a_version_that_does_not_say_what_is_scheduled_saves_one_pass_later() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 8, 0, None)
    assert books.step(step(1, list(range(8)), [3, 4], 0, None), new=True) is None
    assert saved(books.step(step(1, [9], [5], 8, None), new=False)) == [3, 4]


def test_without_a_seed_nothing_is_saved() -> None:
    books = Requests(SIZE)
    books.admitted(1, None, 8, 0, None)
    assert books.step(step(1, list(range(8)), [3, 4], 0, 8), new=True) is None
    assert books.step(step(2, list(range(8)), [3, 4], 0, 8), new=True) is None, "one that was never matched"
    assert 2 in books and len(books) == 2


def test_a_block_without_a_page_is_counted_and_not_saved() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 8, 0, None)
    assert saved(books.step(step(1, list(range(8)), [3], 0, 8), new=True)) == [3]
    assert books.lacking == 1
    books.admitted(2, SEED, 4, 0, None)
    assert books.step(step(2, list(range(4)), [], 0, 4), new=True) is None


@pytest.mark.parametrize("joins", [True, False])
def test_an_engine_that_takes_nothing_of_a_claim_has_nothing_saved_before_it_is_computed(joins: bool) -> None:
    """Its position is then the claim's tokens below what it has (the load joins), or what it has (beside the batch)."""
    books = Requests(SIZE)
    books.admitted(1, SEED, 20, 0, Claim(1, 0, 2, joins, 0.0))
    save = books.step(step(1, list(range(20)), [3, 4, 5, 6, 7], -8 if joins else 0, 8), new=True)
    assert saved(save) == []
    assert saved(books.step(step(1, [], [], 8, 12), new=False)) == [5, 6, 7]


def test_deltas_to_what_an_earlier_life_was_told_are_not_saved() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 8, 0, None)
    assert books.step(step(1, list(range(4)), [3], 4, 4), new=False) is None
    assert books.step(step(1, list(range(4)), [4], 8, 4), new=False) is None


@pytest.mark.parametrize(
    ("ranges", "pages", "told"),
    [
        ([(8, 20)], [11], (9, 1)),
        ([(6, 20)], [11], (9, 1)),
        ([(5, 99), (5, 99)], [11], (9, 1)),
        ([(4, 16)], None, (9, 0)),
        ([(0, None)], None, (9, 0)),
        ([(4, 8)], [-1, 12, 13], None),
        ([(4, 8), (12, 16)], [-1, 12], (9, 2)),
        ([(4, 8), (8, 12)], [-1, -1, 13], None),
        ([(4, 8), (7, 16)], None, (9, 0)),
        ([(4, 5)], [11, 12, 13], None),
        ([(15, 16)], [11, 12, 13], None),
        ([(8, 12)], [11, 12, 13], None),
        ([(16, 20)], [11, 12, 13], None),
    ],
)
@pytest.mark.parametrize("bound", [False, True])
def test_what_an_engine_will_not_take_of_a_claim_is_given_back_and_the_rest_still_comes(
    ranges: list[tuple[int, int | None]], pages: list[int] | None, told: tuple[int, int] | None, bound: bool
) -> None:
    """Tokens [4, 16) are claimed, and blocks 0 to 4 have pages 10 to 14."""
    books = Requests(SIZE)
    books.admitted(1, SEED, 20, 4, Claim(9, 1, 3, False, 0.0, keys=(b"a", b"b", b"c")))
    if bound:
        books.allocated(1, [[10, 11, 12, 13, 14]])
    answers = [books.untaken(1, start, end) for start, end in ranges]
    given = [(claim.load_id, blocks) for claim, blocks in filter(None, answers)]
    assert given == ([told] if told else [])
    if not bound:
        books.allocated(1, [[10, 11, 12, 13, 14]])
    loads = books.loads()
    assert [list(claim.pages[0]) for _, claim in loads if claim.pages] == ([pages] if pages else [])
    assert all(len(claim.keys) == claim.count for _, claim in loads)


def test_after_a_part_is_not_taken_positions_are_right_again() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 20, 0, Claim(9, 0, 3, True, 0.0))
    books.untaken(1, 6, 20)
    books.allocated(1, [[1, 2, 3, 4, 5]])
    assert [claim.pages for _, claim in books.loads()] == [((1, 2),)]
    assert saved(books.step(step(1, list(range(20)), [1, 2, 3, 4, 5], 0, 5), new=True)) == [], "11 tokens of 12"
    assert saved(books.step(step(1, [], [], 11, 4), new=False)) == [], "15 of 16"
    assert saved(books.step(step(1, [], [], 15, 5), new=False)) == [4, 5]
    assert books.untaken(1, 0, 20) is None, "the workers have it"
    assert books.untaken(2, 0, 20) is None


def test_one_that_was_preempted_comes_again_as_if_new() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 6, 0, None)
    books.step(step(1, list(range(6)), [3, 4], 0, 6), new=True)
    books.admitted(1, SEED, 7, 0, None)
    save = books.step(step(1, list(range(8)), [9, 8], 0, 8), new=True)
    assert saved(save) == [9, 8] and save is not None and len(set(save.keys)) == 2


def test_a_claim_is_bound_to_its_own_pages_and_handed_on_once() -> None:
    books = Requests(SIZE)
    claim = Claim(9, 1, 2, False, 0.0)
    books.admitted(1, SEED, 13, 4, claim)
    assert books.loads() == [] and books.claims() == [(1, claim)]
    assert books.allocated(1, [[5, 6, 7, 8], [1, -1, 2, 3]]) is claim
    assert claim.pages == ((6, 7), (-1, 2))
    assert books.loads() == [(1, claim)] and books.loads() == []
    known = books.ended(1)
    assert known is not None and known.loading and books.ended(1) is None


def test_too_few_pages_leave_a_claim_unbound() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 13, 0, Claim(9, 0, 3, False, 0.0))
    claim = books.allocated(1, [[5, 6]])
    assert claim is not None and claim.pages is None
    assert books.allocated(2, [[1]]) is None


def test_a_claim_lapses_by_the_clock_and_only_before_it_is_bound() -> None:
    books = Requests(SIZE)
    books.admitted(1, SEED, 9, 0, Claim(1, 0, 1, False, at_s=10.0))
    books.admitted(2, SEED, 9, 0, Claim(2, 0, 1, False, at_s=10.0))
    books.allocated(2, [[5, 6, 7]])
    assert books.due(9.0) == []
    assert [request_id for request_id, _ in books.due(10.0)] == [1]
    assert books.due(99.0) == []


@pytest.mark.parametrize("seed", range(60))
def test_over_random_lives_each_block_is_saved_once_with_its_own_key_and_page(seed: int) -> None:
    """Random chunks, overlap, decode and preemption; page of block i of life n is 100 n + i."""
    rng, books, life = Random(seed), Requests(SIZE), 0
    tokens = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
    while True:
        reused = rng.choice([0, 0, (len(tokens) - 1) // SIZE * SIZE])
        books.admitted(1, SEED, len(tokens), reused, None)
        told, given, position, found = 0, 0, reused, {}
        end = len(tokens)
        preempted = False
        while position < end + 12 and not preempted:
            scheduled = rng.randrange(1, 9) if position < end else 1
            scheduled = min(scheduled, max(1, end - position))
            while len(tokens) < min(position + 1, position + scheduled):
                tokens.append(rng.randrange(50))
            late = 1 if position >= end and rng.random() < 0.3 else 0
            known = max(told, len(tokens) - late)
            need = -(-(position + scheduled) // SIZE)
            pages = [100 * life + at for at in range(given, need)]
            one = step(1, tokens[told:known], pages, position, scheduled)
            save = books.step(one, new=told == 0 and given == 0)
            told, given = known, need
            position += scheduled
            if save:
                for key, page in zip(save.keys, save.pages[0], strict=True):
                    block = page - 100 * life
                    assert block not in found, f"block {block} is saved twice"
                    assert (block + 1) * SIZE <= position, f"block {block} is not computed"
                    found[block] = key
            preempted = life < 2 and rng.random() < 0.03
        right = block_keys(SEED, tokens, SIZE)
        assert all(key == right[block] for block, key in found.items())
        if not preempted:
            assert set(range(reused // SIZE, (min(told, position) // SIZE))) - set(found) <= {
                min(told, position) // SIZE - 1
            }
            return
        life += 1
