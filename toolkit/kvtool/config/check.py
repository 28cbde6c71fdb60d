"""Whether a spec and an engine fit each other, before anything starts."""

from __future__ import annotations

from typing import Protocol

from kvtool.config.spec import Spec
from kvtool.errors import SpecRefused
from kvtool.units import show_size

DRAM_BLOCKS_MIN = 16
"""Fewest blocks that one rank's shared memory must hold; below that even short prompts evict themselves."""


class Layout(Protocol):
    @property
    def block_tokens(self) -> int: ...

    @property
    def block_size(self) -> int: ...


class EngineFacts(Protocol):
    """What `engine.manifest.Manifest` says, as far as a spec depends on it."""

    target: str
    context_tokens_max: int

    @property
    def layout(self) -> Layout: ...


def check(spec: Spec, engine: EngineFacts) -> None:
    """Refuse a spec that this engine cannot be served with.

    Raises:
        SpecRefused: one sentence for each misfit.
    """
    faults: list[str] = []
    block_tokens, block_size = engine.layout.block_tokens, engine.layout.block_size
    if spec.target != engine.target:
        faults.append(f"target: the spec says {spec.target}, the engine in {spec.engine} was built for {engine.target}")
    blocks_needed = -(-engine.context_tokens_max // block_tokens)
    for role, blocks in (("prefill", spec.prefill.kv_blocks), ("decode", spec.decode.kv_blocks)):
        if blocks < blocks_needed:
            faults.append(
                f"{role}.kv_blocks: {blocks} blocks of {block_tokens} tokens are less than one full context of "
                f"{engine.context_tokens_max} tokens; set at least {blocks_needed}"
            )
    if spec.prefill.chunk_tokens % block_tokens:
        faults.append(
            f"prefill.chunk_tokens: {spec.prefill.chunk_tokens} is not a multiple of the engine's block of "
            f"{block_tokens} tokens"
        )
    if spec.pool.enabled and spec.pool.dram_size < DRAM_BLOCKS_MIN * block_size:
        faults.append(
            f"pool.dram_size: {show_size(spec.pool.dram_size)} hold {spec.pool.dram_size // block_size} blocks of "
            f"{show_size(block_size)}; set at least {show_size(DRAM_BLOCKS_MIN * block_size)}"
        )
    if spec.pool.enabled and 0 < spec.pool.file_size < block_size:
        faults.append(
            f"pool.file_size: {show_size(spec.pool.file_size)} are less than one block of {show_size(block_size)}; "
            "raise it, or set 0 to switch the file tier off"
        )
    if spec.limits.max_tokens_default >= engine.context_tokens_max:
        faults.append(
            f"limits.max_tokens_default: {spec.limits.max_tokens_default} leave no room for a prompt in the engine's "
            f"context of {engine.context_tokens_max} tokens"
        )
    if faults:
        raise SpecRefused("\n".join(faults))
