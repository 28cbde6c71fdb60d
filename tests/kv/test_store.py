"""Plain examples of what a rank decides. Times are seconds; keys are letters."""

from __future__ import annotations

import pytest

from kvtool.kv.record import Commit, Demote, Grant, Promote, Stamp, State, Want
from kvtool.kv.store import Store

A, B, C, D, E = (bytes([n]) * 32 for n in range(1, 6))


def stored(store: Store, *keys: bytes, now_s: float = 0.0, transient_s: float | None = None, chain: bool = True):
    """Put `keys` as one chain, by client 1."""
    for at, key in enumerate(keys):
        want = Want(key, 10, keys[at - 1] if chain and at else None, transient_s)
        (answer,) = store.reserve(1, [want], now_s)
        assert answer.grant is Grant.GRANTED
        assert store.commit(1, answer.slot, answer.generation, 99, now_s) is Commit.STORED


def reads(store: Store, keys, owner: int = 1, number: int = 1, now_s: float = 0.0) -> list[bytes]:
    reading = store.begin_read((owner, number), list(keys), now_s)
    return [hit.key for hit in store.finish_read(reading, now_s)]


def kinds(store: Store, now_s: float = 0.0) -> dict[str, int]:
    return {line.kind: line.count for line in store.audit(now_s)}


def test_a_block_is_seen_only_when_it_is_committed():
    store = Store(4, 100)
    (answer,) = store.reserve(1, [Want(A, 10)], 0.0)
    assert store.match([A]) == 0 and reads(store, [A]) == []
    store.commit(1, answer.slot, answer.generation, 99, 1.0)
    assert store.match([A]) == 1 and reads(store, [A, B], number=2) == [A]


def test_a_put_of_what_another_client_is_writing_is_a_duplicate():
    store = Store(4, 100)
    store.reserve(1, [Want(A, 10)], 0.0)
    assert store.reserve(2, [Want(A, 10)], 0.0)[0].grant is Grant.DUPLICATE
    assert store.dram.used == 1


def test_a_reservation_that_times_out_is_quarantined_until_its_writer_is_done():
    store = Store(1, 100, reserve_term_s=5.0)
    (late,) = store.reserve(1, [Want(A, 10)], 0.0)
    assert store.next_due_s() == 5.0
    store.tick(5.0)
    assert kinds(store) == {"quarantine": 1} and store.counts.timed_out == 1
    assert store.reserve(2, [Want(B, 10)], 6.0)[0].grant is Grant.FULL, "he may still be writing there"
    assert store.commit(1, late.slot, late.generation, 99, 7.0) is Commit.LAPSED
    assert store.match([A]) == 0 and kinds(store) == {}
    (next_one,) = store.reserve(2, [Want(B, 10)], 7.0)
    assert next_one.generation > late.generation


def test_a_writer_that_left_frees_its_slots_once_its_bytes_have_settled():
    store = Store(2, 100)
    store.reserve(1, [Want(A, 10)], 0.0)
    store.reserve(2, [Want(B, 10)], 0.0)
    store.owner_gone(1, 1.0)
    store.owner_gone(2, 1.0, settle_s=2.0)
    assert store.dram.free == 1 and kinds(store, 1.0) == {"quarantine": 1}
    assert store.next_due_s() == 3.0
    store.tick(3.0)
    assert store.dram.free == 2 and kinds(store) == {}


def test_nobody_else_can_commit_or_abort_a_reservation():
    store = Store(2, 100)
    (answer,) = store.reserve(1, [Want(A, 10)], 0.0)
    assert store.commit(2, answer.slot, answer.generation, 1, 0.0) is Commit.LAPSED
    store.abort(2, answer.slot, answer.generation, 0.0)
    assert store.commit(1, answer.slot, answer.generation + 1, 1, 0.0) is Commit.LAPSED
    assert store.commit(1, answer.slot, answer.generation, 1, 0.0) is Commit.STORED


def test_leaves_go_before_their_parents_and_older_ones_first():
    store = Store(4, 100)
    stored(store, A, B, C)
    stored(store, D)
    reads(store, [A, B, C])
    store.release((1, 1), 0.0)
    store.reserve(1, [Want(E, 10)], 0.0)
    assert store.match([D]) == 0 and store.match([A, B, C]) == 3
    store.reserve(1, [Want(b"f" * 32, 10)], 0.0)
    assert store.match([A, B, C]) == 2, "the leaf goes, though its parent was used just before it"


def test_what_is_leased_stays_and_probing_does_not_keep_anything():
    store = Store(2, 100, lease_term_s=1.0)
    stored(store, A, B, chain=False)
    assert reads(store, [A]) == [A]
    for _ in range(1000):
        store.match([B])
    assert store.reserve(1, [Want(C, 10)], 0.0)[0].grant is Grant.GRANTED
    assert store.match([A]) == 1 and store.match([B]) == 0
    assert store.reserve(2, [Want(D, 10)], 0.5)[0].grant is Grant.FULL
    assert "1 under leases, 1 reserved" in store.why_full() and store.match([A]) == 1
    store.tick(1.0)
    assert store.reserve(2, [Want(D, 10)], 1.0)[0].grant is Grant.GRANTED, "the lease lapsed"


def test_reads_alone_do_not_make_the_rank_grow():
    store = Store(8, 100, file_slots=8)
    stored(store, A, B, C)
    for number in range(5000):
        assert len(reads(store, [A, B, C], number=number)) == 3
        store.release((1, number), 0.0)
    assert len(store._leaf_order._heap) < 1000 and len(store._dram_order) == 3
    assert len(store.leases._due) < 100 and store.take_actions() != [] and store.take_actions() == []


def test_a_dropped_block_under_a_lease_is_gone_at_once_and_its_slot_when_the_lease_ends():
    store = Store(2, 100, lease_term_s=1.0)
    stored(store, A, transient_s=60.0)
    assert reads(store, [A]) == [A]
    assert store.drop([A], 0.0) == 1 and store.match([A]) == 0
    assert kinds(store) == {"lease": 1, "quarantine": 1} and store.dram.free == 1
    store.tick(1.0)
    assert store.dram.free == 2 and kinds(store, 1.0) == {}


def test_transient_blocks_expire_without_any_work_and_are_never_written_to_files():
    store = Store(1, 100, file_slots=4)
    stored(store, A, transient_s=5.0)
    assert store.next_due_s() is not None and store.next_due_s() <= 10.0
    store.tick(5.0)
    assert store.match([A]) == 0 and store.counts.expired == 1
    stored(store, B, now_s=6.0, transient_s=50.0)
    store.take_actions()
    assert store.reserve(1, [Want(C, 10)], 6.0)[0].grant is Grant.GRANTED
    assert not [action for action in store.take_actions() if isinstance(action, Demote)]


def test_a_durable_put_makes_a_transient_block_stay():
    store = Store(2, 100)
    stored(store, A, transient_s=5.0)
    assert store.reserve(2, [Want(A, 10)], 1.0)[0].grant is Grant.DUPLICATE
    store.tick(100.0)
    assert store.match([A]) == 1 and store.drop([A], 100.0) == 0


def test_a_block_goes_to_a_file_and_comes_back_and_its_second_leaving_is_free():
    store = Store(1, 100, file_slots=2)
    stored(store, A)
    store.take_actions()
    assert store.reserve(1, [Want(B, 10)], 0.0)[0].grant is Grant.WAIT
    (demote,) = store.take_actions()
    assert isinstance(demote, Demote) and demote.key == A
    assert store.match([A]) == 1, "readable all the while"
    store.demoted(demote.move, True, 0.0)
    assert store.resident() == {A: State.FILED}

    reading = store.begin_read((1, 1), [A], 1.0, wait_s=1.0)
    assert not reading.done
    stamp, promote = store.take_actions()
    assert isinstance(stamp, Stamp) and stamp.key == b"" and isinstance(promote, Promote)
    assert store.promoted(promote.move, True, 1.0) == [reading] and reading.done
    (hit,) = store.finish_read(reading, 1.0)
    assert hit.filed and (hit.key, hit.checksum) == (A, 99)
    assert [action.key for action in store.take_actions()] == [A]
    store.release((1, 1), 1.0)
    assert store.reserve(1, [Want(B, 10)], 1.0)[0].grant is Grant.GRANTED, "no second file write"
    assert store.resident() == {A: State.FILED}


def test_a_read_in_time_cuts_a_promotion_that_is_not():
    store = Store(2, 100, file_slots=2)
    stored(store, A, B, chain=False)
    store.take_actions()
    store.reserve(2, [Want(C, 10)], 0.0)
    (demote,) = store.take_actions()
    store.demoted(demote.move, True, 0.0)
    reading = store.begin_read((1, 1), [B, A], 0.0, wait_s=1.0)
    assert not reading.done
    assert [hit.key for hit in store.finish_read(reading, 1.0)] == [B]
    promote = store.take_actions()[-1]
    store.promoted(promote.move, True, 5.0)
    store.release((1, 1), 5.0)
    assert reads(store, [A], number=2, now_s=5.0) == [A], "the promotion was not in vain"


def test_a_file_copy_that_is_bad_is_forgotten_and_never_served():
    store = Store(1, 100, file_slots=2)
    stored(store, A)
    store.reserve(1, [Want(B, 10)], 0.0)
    store.demoted(store.take_actions()[-1].move, True, 0.0)
    reading = store.begin_read((1, 1), [A], 0.0, wait_s=1.0)
    store.promoted(store.take_actions()[-1].move, False, 0.0, corrupt=True)
    assert reading.done and store.finish_read(reading, 0.0) == []
    assert store.match([A]) == 0 and store.counts.corrupt == 1 and store.files.used == 0
    store.release((1, 1), 0.0)
    assert store.dram.free == 1 and kinds(store) == {}


def test_a_corrupt_block_is_served_from_its_file_if_it_has_one():
    store = Store(2, 100, file_slots=2)
    stored(store, A, B, chain=False)
    store.take_actions()
    store.reserve(2, [Want(C, 10)], 0.0)
    store.demoted(store.take_actions()[-1].move, True, 0.0)
    reading = store.begin_read((1, 1), [A], 0.0, wait_s=1.0)
    store.promoted(store.take_actions()[-1].move, True, 0.0)
    (hit,) = store.finish_read(reading, 0.0)
    assert store.corrupt(A, hit.slot, hit.generation + 1, 0.0) is False, "a report about another generation"
    assert store.corrupt(A, hit.slot, hit.generation, 0.0) is True
    assert store.resident()[A] is State.FILED and kinds(store)["quarantine"] == 1


def test_a_failed_demotion_keeps_the_block():
    store = Store(1, 100, file_slots=2)
    stored(store, A)
    store.reserve(1, [Want(B, 10)], 0.0)
    store.demoted(store.take_actions()[-1].move, False, 0.0)
    assert store.resident() == {A: State.COMMITTED} and store.files.used == 0


def test_the_audit_names_the_oldest_of_each_kind_with_its_deadline():
    store = Store(4, 100, lease_term_s=10.0, reserve_term_s=20.0)
    stored(store, A)
    reads(store, [A], owner=3, now_s=1.0)
    store.reserve(5, [Want(B, 10)], 2.0)
    store.reserve(6, [Want(C, 10)], 4.0)
    lease, reservation = store.audit(7.0)
    assert (lease.kind, lease.count, lease.owner, lease.age_s, lease.deadline_s) == ("lease", 1, 3, 6.0, 4.0)
    assert (reservation.count, reservation.owner, reservation.age_s, reservation.deadline_s) == (2, 5, 5.0, 15.0)


def test_a_key_that_names_itself_as_parent_can_still_go():
    store = Store(1, 100)
    (answer,) = store.reserve(1, [Want(A, 10, A)], 0.0)
    store.commit(1, answer.slot, answer.generation, 1, 0.0)
    assert store.reserve(1, [Want(B, 10)], 0.0)[0].grant is Grant.GRANTED


@pytest.mark.parametrize("size", [0, 101])
def test_a_block_that_fits_no_slot_is_too_large(size):
    assert Store(1, 100).reserve(1, [Want(A, size)], 0.0)[0].grant is Grant.TOO_LARGE


def test_spare_slot_is_nobody_s_block_until_it_is_named_and_committed():
    store = Store(32, 100, reserve_term_s=5.0)
    stored(store, A)
    spare = store.reserve_unnamed(1, E, 0.0)
    assert spare is not None and store.reserve_unnamed(1, D, 0.0) is None, "one for each client"
    assert store.match([E]) == 0 and kinds(store) == {"reservation": 1}
    assert store.name(1, spare.slot, spare.generation, Want(A, 10), 1.0) is Grant.DUPLICATE
    assert store.name(2, spare.slot, spare.generation, Want(B, 10), 1.0) is Grant.WAIT, "another's"
    assert store.name(1, spare.slot, spare.generation, Want(B, 10, A), 1.0) is Grant.GRANTED
    assert store.commit(1, spare.slot, spare.generation, 7, 1.0) is Commit.STORED
    assert reads(store, [A, B]) == [A, B] and store.match([E]) == 0
    again = [store.reserve_unnamed(owner, bytes([owner]) * 32, 1.0) for owner in (11, 12, 13)]
    assert [spare is not None for spare in again] == [True, True, False], "a sixteenth of all slots"


def test_spare_slot_that_was_not_used_in_time_is_quarantined_until_its_writer_says_that_he_is_done():
    store = Store(32, 100, reserve_term_s=5.0)
    spare = store.reserve_unnamed(1, E, 0.0)
    store.tick(5.0)
    assert kinds(store, 5.0) == {"quarantine": 1}
    assert store.name(1, spare.slot, spare.generation, Want(A, 10), 5.0) is Grant.WAIT
    store.abort(1, spare.slot, spare.generation, 6.0)
    assert kinds(store, 6.0) == {} and store.dram.used == 0


def test_small_pool_and_one_that_writes_through_have_no_slot_to_spare():
    assert Store(15, 100).reserve_unnamed(1, E, 0.0) is None
    assert Store(32, 100, 8, through=True).reserve_unnamed(1, E, 0.0) is None


def test_use_that_is_told_late_keeps_a_block_from_going_first():
    store = Store(2, 100)
    stored(store, A, B, chain=False)
    slots = [(entry.slot, entry.generation) for entry in (store._index[A], store._index[B])]
    assert store.touch([*slots[:1], (1, 99)], 5.0) == 1
    stored(store, C, now_s=6.0)
    assert store.match([A]) == 1 and store.match([B]) == 0


def test_lease_on_what_a_reader_found_himself_covers_what_is_still_there():
    store = Store(2, 100, lease_term_s=10.0)
    stored(store, A, B, chain=False)
    at = store._index[A]
    store.lease_found((3, 1), [(at.slot, at.generation), (store._index[B].slot, 99)], 1.0)
    assert store.leases.held_slots == 1 and kinds(store, 1.0) == {"lease": 1}
    stored(store, C, now_s=2.0)
    assert store.match([A]) == 1 and store.match([B]) == 0, "the leased one stays"
    assert store.release((3, 1), 3.0) and store.leases.held_slots == 0
