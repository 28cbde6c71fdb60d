"""Whether a spec and an engine fit each other, before anything starts. On GPUs there is more to hold: `config.gpus`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvtool.config.fault import Fault, refuse
from kvtool.config.spec import Spec
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
    refuse(faults(spec, engine))


def faults(spec: Spec, engine: EngineFacts) -> Iterator[Fault]:
    """Every misfit of the two, but for what only GPUs have."""
    if spec.target != engine.target:
        yield Fault("target", f"the spec says {spec.target}, the engine in {spec.engine} was built for {engine.target}")
    if spec.target == "torch":  # TensorRT-LLM takes what KV memory there is, and cuts prompts by itself
        yield from _compute_faults(spec, engine)
        yield from pool_faults(spec, engine.layout.block_size)
    if spec.limits.max_tokens_default >= engine.context_tokens_max:
        yield Fault(
            "limits.max_tokens_default",
            f"{spec.limits.max_tokens_default} leave no room for a prompt in the engine's context of "
            f"{engine.context_tokens_max} tokens",
        )


def pool_faults(spec: Spec, block_size: int) -> Iterator[Fault]:
    """`block_size`: of what lies in the pool as one block."""
    if spec.pool.enabled and spec.pool.dram_size < DRAM_BLOCKS_MIN * block_size:
        yield Fault(
            "pool.dram_size",
            f"{show_size(spec.pool.dram_size)} hold {spec.pool.dram_size // block_size} blocks of "
            f"{show_size(block_size)}; set at least {show_size(DRAM_BLOCKS_MIN * block_size)}",
        )
    if spec.pool.enabled and 0 < spec.pool.file_size < block_size:
        yield Fault(
            "pool.file_size",
            f"{show_size(spec.pool.file_size)} are less than one block of {show_size(block_size)}; "
            "raise it, or set 0 to switch the file tier off",
        )


def _compute_faults(spec: Spec, engine: EngineFacts) -> Iterator[Fault]:
    block_tokens = engine.layout.block_tokens
    blocks_needed = -(-engine.context_tokens_max // block_tokens)
    for role, blocks in (("prefill", spec.prefill.kv_blocks), ("decode", spec.decode.kv_blocks)):
        if blocks < blocks_needed:
            yield Fault(
                f"{role}.kv_blocks",
                f"{blocks} blocks of {block_tokens} tokens are less than one full context of "
                f"{engine.context_tokens_max} tokens; set at least {blocks_needed}",
            )
    if spec.prefill.chunk_tokens % block_tokens:
        yield Fault(
            "prefill.chunk_tokens",
            f"{spec.prefill.chunk_tokens} is not a multiple of the engine's block of {block_tokens} tokens",
        )
