"""Transfer: blocks from where they are to a rank that the caller names, by the caller's own hands.

Read under a lease here, reserved, written and committed there, in parts and in the order of the keys. Whatever dies in
between, at any step, leaves the receiver with whole blocks from the front of what was asked and nothing else: a block
is indexed by its commit, after its last byte; before that the receiver takes the reservation back, and the sender its
lease, when the connection ends or the clock says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.kv.block import BlockKey
from kvtool.kv.retention import DEFAULT, Retention
from kvtool.pool.base import Cancelling, Outcome, Put, PutResult
from kvtool.pool.calls import Calls

PART = 64
"""Blocks under one lease while they are written elsewhere."""


async def transfer(
    calls: Calls,
    keys: Sequence[BlockKey],
    to: int | str,
    origin: int | str | None,
    budget_s: float,
    transient_s: float | None,
    parent: BlockKey | None,
    retention: Retention = DEFAULT,
    cancel: Cancelling | None = None,
) -> list[PutResult]:
    """One result for each of `keys`; a key that is not there ends it, as do a full receiver and the budget."""
    now_s = calls.setting.now_s
    deadline_s = now_s() + budget_s
    results: list[PutResult] = []
    while len(results) < len(keys):
        left_s = deadline_s - now_s()
        some = keys[len(results) : len(results) + PART]
        if left_s <= 0:
            return results + _rest(keys, results, "timeout")
        with await calls.read(some, left_s / 2, origin, cancel) as read:
            puts = []
            for block in read.blocks:
                puts.append(
                    Put(block.key, len(block.data), None, parent, transient_s, retention, block.data.toreadonly())
                )
                parent = block.key
            part = await calls.write(puts, deadline_s - now_s(), to, cancel) if puts else []
            whole = read.whole()
        results += part
        if len(puts) < len(some):
            return results + _rest(keys, results, "cancelled" if cancel and cancel.is_set() else "absent")
        if whole < len(puts) or any(one.outcome in (Outcome.FAILED, Outcome.REFUSED) for one in part):
            return results + _rest(keys, results, "not tried: a block before it did not arrive")
    return results


def _rest(keys: Sequence[BlockKey], results: Sequence[PutResult], reason: str) -> list[PutResult]:
    return [PutResult(Outcome.FAILED, reason=reason)] * (len(keys) - len(results))
