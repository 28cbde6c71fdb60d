"""The torch engine: a Llama-family forward pass over paged KV, the same bits however a prompt arrives.

Prefill runs in the checkpoint's weights, bfloat16 where the CPU has units for it and float32 where it has not; decode
runs on 4-bit weights where the checkpoint came with them. The residual stream is float32 on both paths, K and V are
rounded to bfloat16 once, when they are stored. Nothing here decides by timing, so two processes on one machine with the
same number of threads compute the same KV, and `numerics` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from blake3 import blake3

from kvtool.engine.base import DecodeStep, LayerHooks, SequenceKV
from kvtool.engine.checkpoint import read_json
from kvtool.engine.family import Family, read_family
from kvtool.engine.manifest import Manifest
from kvtool.engine.torch.attention import TILE, Attention
from kvtool.engine.torch.memory import KVMemory, TorchSequence
from kvtool.engine.torch.rope import rope_tables
from kvtool.engine.torch.rows import ROWS_MAX, native_bfloat16, pattern
from kvtool.engine.torch.weights import Layer, Linears, load_weights
from kvtool.errors import CheckpointRefused, EngineRefused

GRAIN = 32768
"""Elements below which torch runs an elementwise kernel on one thread (at::internal::GRAIN_SIZE)."""


class TorchEngine:
    """One model in this process; see `engine.base.Engine` for the contract.

    `blocks`: KV blocks to reserve; their pages are taken when first written. `dtype`: of the prefill products; the
    default suits the CPU, tests ask for float32. `prompt_threads`: of prefill, if others than those of decode.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        threads: int,
        blocks: int,
        prompt_threads: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        assert threads >= 1 and blocks >= 1
        self.decode_threads, self.prompt_threads = threads, prompt_threads or threads
        self.threads = 0
        self._use(self.prompt_threads)
        self.family = _family(directory)
        self.layout = manifest.layout
        self.model_digest = manifest.model_digest
        self.vocab_size = manifest.vocab_size
        self.context_tokens_max = manifest.context_tokens_max
        self.eos_token_ids = frozenset(manifest.eos_token_ids)
        self.blocks_total = blocks
        self.dtype = dtype or (torch.bfloat16 if native_bfloat16() else torch.float32)
        with torch.inference_mode():
            self.memory = KVMemory(self.layout, blocks)
            self.attention = Attention(self.family, self.memory, self.dtype)
            self._weights = load_weights(directory, self.family, self.dtype, manifest.decode_weights == "int4_g32")
            tokens = min(self.context_tokens_max, blocks * self.layout.block_tokens)
            self._cos, self._sin = rope_tables(self.family, tokens)
        self.numerics = self._probe()

    @property
    def blocks_free(self) -> int:
        return self.memory.table.free_count

    def open(self, capacity_tokens: int) -> TorchSequence:
        return self.memory.open(capacity_tokens)

    def close(self, sequence: SequenceKV) -> None:
        self.memory.close(_own(sequence))

    def export_block(self, sequence: SequenceKV, index: int, out: memoryview) -> None:
        self.memory.export_block(_own(sequence), index, out)

    def import_block(self, sequence: SequenceKV, index: int, data: memoryview) -> None:
        self.memory.import_block(_own(sequence), index, data)

    def prefill(
        self, sequence: SequenceKV, tokens: Sequence[int], start: int, end: int, hooks: LayerHooks | None = None
    ) -> None:
        own = _own(sequence)
        assert own.open and 0 <= start <= own.length and start < end <= min(len(tokens), own.capacity_tokens)
        assert end <= self.context_tokens_max, f"position {end - 1} is beyond the context of {self.context_tokens_max}"
        self._use(self.prompt_threads)
        with torch.inference_mode():
            at = start
            while at < end:
                stop = min(end, (at // ROWS_MAX + 1) * ROWS_MAX)
                self._prefill_rows(own, torch.tensor(tokens[at:stop]), at, stop, hooks or LayerHooks())
                at = stop
        own.length = max(own.length, end)

    def _prefill_rows(
        self, sequence: TorchSequence, ids: torch.Tensor, start: int, end: int, hooks: LayerHooks
    ) -> None:
        x = F.embedding(ids, self._weights.embedding).float()
        slots, last = sequence.slots[start:end], self.family.layers - 1
        cos, sin = self._cos[start:end, None], self._sin[start:end, None]
        for index, layer in enumerate(self._weights.layers):
            if hooks.before:
                hooks.before(index)
            queries, kv = self._qkv(layer, layer.prefill, x, cos, sin, self.dtype)
            self.memory.write(index, slots, kv)
            if index < last:  # nobody reads what the last layer would add
                mixed = self.attention.prefill(index, sequence, queries, start, end)
                x = x + layer.prefill.out(mixed)
                x = x + self._mlp(layer, layer.prefill, x, self.dtype)
            if hooks.after:
                hooks.after(index)

    def decode(self, batch: Sequence[DecodeStep]) -> npt.NDArray[np.float32]:
        owns = [_own(step.sequence) for step in batch]
        for own, step in zip(owns, batch, strict=True):
            assert own.open and 0 <= step.position <= own.length and step.position < own.capacity_tokens
            assert step.position < self.context_tokens_max
        self._use(self.decode_threads)
        with torch.inference_mode():
            logits = self._decode_rows(batch, owns)
        for own, step in zip(owns, batch, strict=True):
            own.length = max(own.length, step.position + 1)
        return logits.numpy()

    def _decode_rows(self, batch: Sequence[DecodeStep], owns: list[TorchSequence]) -> torch.Tensor:
        weights, dtype = self._weights, self._weights.decode_dtype
        positions = torch.tensor([step.position for step in batch])
        x = F.embedding(torch.tensor([step.token for step in batch]), weights.embedding).float()
        slots = torch.stack([own.slots[step.position] for own, step in zip(owns, batch, strict=True)])
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        for index, layer in enumerate(weights.layers):
            queries, kv = self._qkv(layer, layer.decode, x, cos, sin, torch.bfloat16)
            self.memory.write(index, slots, kv)
            mixed = torch.stack([
                self.attention.decode(index, own, queries[row], step.position + 1)
                for row, (own, step) in enumerate(zip(owns, batch, strict=True))
            ])  # fmt: skip
            x = x + layer.decode.out(mixed.to(dtype))
            x = x + self._mlp(layer, layer.decode, x, dtype)
        return weights.head(self._norm(x, weights.norm).to(dtype)).float()

    def _use(self, threads: int) -> None:
        if threads != self.threads:
            torch.set_num_threads(threads)
            self.threads = threads

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.family.norm_eps)

    def _qkv(
        self, layer: Layer, linears: Linears, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [rows, heads, head_dim] in `dtype`, and K and V [2, kv_heads, rows, head_dim] in bfloat16."""
        family, rows = self.family, x.shape[0]
        heads, groups = family.heads, family.kv_heads
        joined = linears.qkv(self._norm(x, layer.norm_attention).to(self._input(linears, layer))).float()
        if layer.bias_qkv is not None:
            joined = joined + layer.bias_qkv
        parts = joined.view(rows, heads + 2 * groups, family.head_dim)
        turning = parts[:, : heads + groups]
        if layer.norm_q is not None and layer.norm_k is not None:
            turning = torch.cat(
                [self._norm(turning[:, :heads], layer.norm_q), self._norm(turning[:, heads:], layer.norm_k)], 1
            )
        turned = turning * cos + torch.roll(turning, family.head_dim // 2, -1) * sin
        kv = torch.stack([turned[:, heads:], parts[:, heads + groups :]]).bfloat16().transpose(1, 2)
        return turned[:, :heads].to(dtype), kv

    def _input(self, linears: Linears, layer: Layer) -> torch.dtype:
        return self.dtype if linears is layer.prefill else self._weights.decode_dtype

    def _mlp(self, layer: Layer, linears: Linears, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        gate, up = linears.gate_up(self._norm(x, layer.norm_mlp).to(dtype)).chunk(2, -1)
        return linears.down(self._silu(gate).mul_(up))

    def _silu(self, x: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(x), always by the vector kernel: its scalar tail rounds differently, and where a tail falls
        depends on how threads share the rows. Rows are whole vectors (see `weights`), so an even share has no tail."""
        rows, columns = x.shape
        even = rows if rows * columns < GRAIN else rows - rows % self.threads
        if even == rows:
            return F.silu(x)
        step = max(1, (GRAIN - 1) // columns)
        return torch.cat([F.silu(x[:even]), *(F.silu(x[at : at + step]) for at in range(even, rows, step))])

    def _probe(self) -> str:
        """Digest of what this machine's kernels make of a fixed prompt: KV, then logits of two decode steps, and one
        attention tile with long keys. Equal digests, equal rounding."""
        whole = blake3(b"kvtool numerics 1\0")
        count = min(TILE + TILE // 2, self.context_tokens_max - 1, self.blocks_total * self.layout.block_tokens - 1)
        tokens = [(31 * at + 7) % self.vocab_size for at in range(count + 1)]
        sequence = self.open(count + 1)
        self.prefill(sequence, tokens, 0, count)
        logits = self.decode([DecodeStep(sequence, tokens[count], count)])
        out = bytearray(self.layout.block_size)
        for index in range(len(sequence.blocks)):
            self.export_block(sequence, index, memoryview(out))
            whole.update(out)
        whole.update(logits.tobytes())
        self.close(sequence)
        with torch.inference_mode():
            keys = pattern(2, self.family.kv_heads, 16 * TILE, self.family.head_dim).bfloat16()
            whole.update(self.attention.probe(keys).numpy().tobytes())
        return whole.hexdigest()


def _own(sequence: SequenceKV) -> TorchSequence:
    assert isinstance(sequence, TorchSequence), "the sequence belongs to another engine"
    return sequence


def _family(directory: Path) -> Family:
    path = directory / "config.json"
    try:
        return read_family(read_json(path, "a model's config"), str(path))
    except CheckpointRefused as error:
        raise EngineRefused(f"{error}; build the engine again") from None
