"""Ranks that go and come while the pool runs: draining one, and changing how many there are.

A rank that drains takes nothing new and hands its blocks to their next owners; when nothing is left it can leave for
good. Further ranks are started by the keeper and join by themselves. Nothing here holds the pool's turn while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError, PoolUnavailable, Refused, SpecRefused
from kvtool.pool.config import RANKS_MAX
from kvtool.pool.keeping import attach_keeper, want, wanted
from kvtool.pool.link import Link
from kvtool.pool.names import CONFIG
from kvtool.pool.rundir import read_json, turn
from kvtool.pool.state import FILE, PoolState, RankState, read_state, runs
from kvtool.pool.wire import Op, pack_map, unpack_map
from kvtool.transfer.room import demand, rooms
from kvtool.transfer.segment import SHM

ANSWER_S = 2.0
TURN_S = 30.0
ENDED_S = 60.0
KNOWN_S = 1.0
"""Between draining and leaving: clients that are at work learn meanwhile that nothing goes there any more."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Draining:
    """`left`: blocks that are not safe elsewhere yet; `homeless`: those of them that nobody has room for now."""

    rank: int
    left: int
    homeless: int
    settled: bool
    """Nothing more can be done for it: all is elsewhere, or what is left has nowhere to go."""


Progress = Callable[[Draining], None]


def drain(
    run_dir: Path, ranks: list[int], *, leave: bool, budget_s: float, progress: Progress = lambda draining: None
) -> list[Draining]:
    """Have `ranks` take nothing new and move their blocks to the others, and with `leave` end for good.

    Raises:
        Refused: they are all that there is, or not of this pool.
        PoolUnavailable: not done within `budget_s`. They go on draining, and none has left that still had blocks.
    """
    run_dir, until_s = run_dir.absolute(), time.monotonic() + budget_s
    state = read_state(run_dir / FILE)
    serving = {rank.rank for rank in state.ranks if rank.status in ("joining", "live")}
    known = {rank.rank: rank for rank in state.ranks if rank.status != "left"}
    for rank in ranks:
        if rank not in known:
            raise Refused(f"rank {rank}: wanted one of {sorted(known)}")
    if not serving - set(ranks):
        raise Refused(f"ranks {sorted(ranks)} are all that take blocks; end the pool with: kvtool pool down")
    going = [known[rank] for rank in ranks if known[rank].alive]
    for one in going:
        _tell(state, one, {})
    done = [_settled(state, one, until_s, progress) for one in going]
    if leave:
        time.sleep(KNOWN_S)
        with turn(run_dir, TURN_S):
            want(run_dir, [rank for rank in wanted(run_dir) if rank not in ranks])
        for one in going:
            _tell(state, one, {"leave": True})
        for number in ranks:
            if not known[number].alive:
                _dismiss(state, number)
        _await_end(going)
    return done


def resize(
    run_dir: Path, ranks: int, *, budget_s: float, progress: Progress = lambda draining: None
) -> tuple[list[int], list[int]]:
    """Have `ranks` ranks: start as many as are missing, or drain the highest and let them leave. (Started, gone).

    Raises:
        SpecRefused: not a number of ranks. Refused: no room for them.
        PoolUnavailable: no pool runs there, or not done within `budget_s`.
    """
    if not 1 <= ranks <= RANKS_MAX:
        raise SpecRefused(f"pool.ranks: wanted 1 to {RANKS_MAX}, found {ranks}")
    run_dir = run_dir.absolute()
    read_state(run_dir / FILE)
    attach_keeper(run_dir)
    now = wanted(run_dir)
    if ranks < len(now):
        gone = now[ranks:]
        drain(run_dir, gone, leave=True, budget_s=budget_s, progress=progress)
        return [], gone
    free = (number for number in range(RANKS_MAX) if number not in now)
    new = [next(free) for _ in range(ranks - len(now))]
    if new:
        size = (read_json(run_dir / CONFIG) or {}).get("dram_size", 0)
        demand(f"{len(new)} more ranks", len(new) * size, rooms(SHM), "the number of ranks")
        with turn(run_dir, TURN_S):
            want(run_dir, now + new)
        _await_new(run_dir, new, time.monotonic() + budget_s)
    return new, []


def _tell(state: PoolState, rank: RankState, what: dict[str, Any]) -> None:
    _ask(state, rank, Op.DRAIN, what)


def _dismiss(state: PoolState, dead: int) -> None:
    """Have the others know that a dead rank is not coming back."""
    for rank in state.ranks:
        if rank.alive and runs(rank.pid, rank.started):
            _ask(state, rank, Op.DRAIN, {"rank": dead, "leave": True})
            return


def _ask(state: PoolState, rank: RankState, op: Op, what: dict[str, Any]) -> dict[str, Any]:
    link = Link(rank, bytes.fromhex(state.key), state.kv_layout, "resize", False, lambda epoch: None)
    try:
        body = pack_map(what) if what or op is Op.DRAIN else b""
        return unpack_map(link.call(op, body, time.monotonic() + ANSWER_S))
    finally:
        link.close()


def _settled(state: PoolState, rank: RankState, until_s: float, progress: Progress) -> Draining:
    while True:
        found = _look(state, rank)
        progress(found)
        if found.settled:
            return found
        if time.monotonic() >= until_s:
            raise PoolUnavailable(
                f"rank {rank.rank} has {found.left} blocks left to move; it goes on, ask again with a longer --timeout"
            )
        time.sleep(_POLL_S)


def _look(state: PoolState, rank: RankState) -> Draining:
    copying = _ask(state, rank, Op.STATUS, {})["copying"]
    at_work = copying["owed"] or copying["flying"] or copying["left"] > copying["homeless"]
    return Draining(rank.rank, copying["left"], copying["homeless"], copying["leaving"] and not at_work)


def _await_end(ranks: list[RankState]) -> None:
    until_s = time.monotonic() + ENDED_S
    while running := [rank.rank for rank in ranks if runs(rank.pid, rank.started)]:
        if time.monotonic() >= until_s:
            raise PoolUnavailable(f"ranks {running} were told to leave and still run after {ENDED_S:g} s")
        time.sleep(_POLL_S)


def _await_new(run_dir: Path, ranks: list[int], until_s: float) -> None:
    missing = set(ranks)
    while missing:
        state = read_state(run_dir / FILE)
        for rank in state.ranks:
            if rank.rank in missing and rank.alive and runs(rank.pid, rank.started):
                try:
                    _ask(state, rank, Op.STATUS, {})
                    missing.discard(rank.rank)
                except KvtoolError:
                    pass  # not yet
        if missing and time.monotonic() >= until_s:
            raise PoolUnavailable(f"ranks {sorted(missing)} did not start in time; see pool.log in {run_dir}")
        if missing:
            time.sleep(_POLL_S)
