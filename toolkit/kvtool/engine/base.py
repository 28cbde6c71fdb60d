"""What an engine is to the rest of the house.

An engine turns tokens into KV blocks (prefill) and KV blocks into next tokens (decode). It knows nothing of pools,
servers or requests. Two engines stand behind this interface: `engine.torch` (the CPU default) and `engine.oracle` (a
fake whose next token depends on every KV byte it reads, for proving the path around it).

**Two paths, one rule.** `prefill` writes the canonical KV of prompt tokens; only canonical KV goes to the pool.
`decode` feeds one token per sequence at its position, writes that position's KV in the sequence's own memory and
returns logits. The last prompt token always goes through `decode`, cold or warm, so the first output token takes the
same path whether or not the prompt was a hit, and a full hit needs no prefill compute.

**Shape-stable.** The KV of a position depends on the tokens up to it, and on nothing else: not on how a prompt was
chunked, where a hit ended, who shares the batch. Logits of `decode` likewise. `numerics` names the rounding of this
machine's kernels; keys are seeded with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtool.kv.layout import KVLayout


class SequenceKV(Protocol):
    """KV memory of one sequence: a table of fixed-size blocks owned by the engine that opened it."""

    @property
    def capacity_tokens(self) -> int: ...

    length: int
    """Tokens [0, length) have KV. The caller moves it after import_block; prefill and decode move it themselves."""


@dataclass(frozen=True)
class LayerHooks:
    """Calls around each layer of a prefill chunk: `before(layer)` may wait for that layer's loads, `after(layer)` may
    start its stores. Both run on the engine's thread and must be short."""

    before: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None


@dataclass(frozen=True)
class DecodeStep:
    """Feed `token` at `position` of `sequence`; its KV of [0, position) must be there."""

    sequence: SequenceKV
    token: int
    position: int


class Engine(Protocol):
    """One model in this process. Not thread-safe, except that `import_block` and `export_block` may run in another
    thread for a sequence that is in no running `prefill` or `decode` call."""

    layout: KVLayout
    model_digest: str
    numerics: str
    vocab_size: int
    context_tokens_max: int
    eos_token_ids: frozenset[int]
    blocks_total: int

    @property
    def blocks_free(self) -> int: ...

    def open(self, capacity_tokens: int) -> SequenceKV:
        """Reserve blocks for `capacity_tokens`.

        Raises:
            EngineFull: fewer blocks are free than that needs.
        """
        ...

    def close(self, sequence: SequenceKV) -> None:
        """Give the blocks back. Idempotent."""
        ...

    def prefill(
        self, sequence: SequenceKV, tokens: Sequence[int], start: int, end: int, hooks: LayerHooks | None = None
    ) -> None:
        """Write the canonical KV of positions [start, end); `tokens` is the whole prompt, KV of [0, start) is there."""
        ...

    def decode(self, batch: Sequence[DecodeStep]) -> npt.NDArray[np.float32]:
        """One step for each of `batch` -> logits, float32 [len(batch), vocab_size]."""
        ...

    def export_block(self, sequence: SequenceKV, index: int, out: memoryview) -> None:
        """Copy block `index` to `out` (layout.block_size bytes, layout.shape). Positions without KV are zero."""
        ...

    def import_block(self, sequence: SequenceKV, index: int, data: memoryview) -> None:
        """Copy `data` (layout.block_size bytes) into block `index`. Does not move `length`."""
        ...
