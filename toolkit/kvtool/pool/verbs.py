"""Calls that are other calls by another name, or in another shape: the same for every kind of pool.

MemServe's names stand beside ours where they fit: `insert` is a put of buffers, `delete` and `match` are what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from kvtool.kv.block import BlockKey
from kvtool.kv.retention import DEFAULT, Retention
from kvtool.pool.base import Put, PutResult
from kvtool.pool.buffers import bytes_of

T = TypeVar("T", bound="Verbs")
NOT_PICKLED = (
    "a {} has sockets and mapped memory, which no other process can be handed; connect anew there, with "
    "kvtool.pool.connect(run_dir). A child that was forked may go on using its parent's client."
)


class Verbs:
    """Beside `write` of whoever inherits this."""

    def write(self, blocks: Sequence[Put], budget_s: float = 2.0) -> list[PutResult]:
        raise NotImplementedError

    def put_from(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        budget_s: float = 2.0,
        *,
        parent: BlockKey | None = None,
        chained: bool = True,
        transient_s: float | None = None,
        retention: Retention = DEFAULT,
    ) -> list[PutResult]:
        """Store what `buffers` hold, one each for `keys`: any contiguous buffer, numpy array or torch tensor.

        `chained`: each key follows the one before it, and the first follows `parent`; else every one follows `parent`.

        Raises:
            ValueError: not one buffer for each key, or one that is not contiguous.
        """
        return self.write(
            puts_of(keys, buffers, parent, chained, transient_s, retention),
            budget_s,
        )

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """
        Raises:
            TypeError: always; with what to do.
        """
        raise TypeError(NOT_PICKLED.format(type(self).__name__))

    def put(self, blocks: Sequence[Put], budget_s: float = 2.0) -> list[PutResult]:
        return self.write(blocks, budget_s)

    insert = put_from


def puts_of(
    keys: Sequence[BlockKey],
    buffers: Sequence[Any],
    parent: BlockKey | None,
    chained: bool,
    transient_s: float | None,
    retention: Retention,
) -> list[Put]:
    lengths_match(keys, buffers)
    puts = []
    for key, buffer in zip(keys, buffers, strict=True):
        data = bytes_of(buffer)
        puts.append(Put(key, len(data), None, parent, transient_s, retention, data))
        if chained:
            parent = key
    return puts


def lengths_match(keys: Sequence[BlockKey], buffers: Sequence[Any]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"wanted one buffer for each of {len(keys)} keys, got {len(buffers)}")
