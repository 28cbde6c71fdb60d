"""The `tensorrt_llm:` block of a recipe: how a model is built and spread over GPUs.

Prefill and decode may be spread differently; what a role does not say is as in the block. Sizes are as people write
them ("512GiB"). What fits is worked out by sizing.py; here is only what can be asked for.
"""

from __future__ import annotations

from math import lcm
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvtool.units import parse_size

Role = Literal["prefill", "decode"]
Quantisation = Literal["none", "fp8", "fp8_block_scales", "w4a16_awq", "nvfp4"]
KVDtype = Literal["bfloat16", "float16", "fp8", "int8"]
Size = Annotated[int, BeforeValidator(parse_size)]

LAYOUT_DTYPE: dict[str, str] = {"bfloat16": "bfloat16", "float16": "float16", "fp8": "float8_e4m3fn", "int8": "int8"}
"""TensorRT-LLM's name of a KV dtype -> kvtool's."""


class RoleSettings(BaseModel):
    """What one role has otherwise than the block."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tensor_parallel: int | None = Field(default=None, ge=1)
    """As `tensor_parallel` of the block, for this role."""
    expert_parallel: int | None = Field(default=None, ge=1)
    """As `expert_parallel` of the block, for this role."""
    max_seq_len: int | None = Field(default=None, ge=1)
    """As `max_seq_len` of the block, for this role."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """As `max_batch_size` of the block, for this role."""
    max_num_tokens: int | None = Field(default=None, ge=1)
    """As `max_num_tokens` of the block, for this role."""
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    """As `memory_fraction` of the block, for this role."""


class Node(BaseModel):
    """The host that the ranks run on, for sizes that ranks share."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gpus: int = Field(default=8, ge=1)
    """GPUs of the host."""
    memory: Size = parse_size("1TiB")
    """What the ranks may use together: the cgroup's limit where there is one."""
    pool: Size = 0
    """kvtool's pool on this node."""
    host_cache: Size = 0
    """TensorRT-LLM's own host tier on this node, all ranks together; 0 leaves host memory to the pool."""
    network: Size = 25_000_000_000
    """Bytes a second that the pool brings from another node to one GPU's rank."""


class TrtllmSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    backend: Literal["pytorch", "tensorrt"] = "pytorch"
    """TensorRT-LLM's: pytorch loads checkpoints (1.1 to 1.4), tensorrt compiles engines (up to 1.2)."""
    version: str | None = None
    """TensorRT-LLM on the GPU hosts; None: what is installed where the engine is built."""
    gpu: str
    """What it runs on: a100-40gb, a100-80gb, l40s, h100-80gb, h200 or b200."""
    quantisation: Quantisation = "none"
    """Of linear weights, as the checkpoint has it: fp8 has one scale a tensor, fp8_block_scales one for 128 x 128."""
    kv_dtype: KVDtype = "bfloat16"
    """Of the KV cache: the model's own dtype, fp8 or (engines only) int8."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks, a GPU each, that every layer is split over."""
    expert_parallel: int = Field(default=1, ge=1)
    """Of the tensor_parallel ranks, groups of so many share the experts whole; the rest splits each expert."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Groups of layers on ranks of their own. A KV-offload connector takes 1 only."""
    context_parallel: int = Field(default=1, ge=1)
    """Parts of a prompt on ranks of their own. A KV-offload connector takes 1 only."""
    max_seq_len: int = Field(default=8192, ge=2)
    """Prompt and answer of one sequence, tokens."""
    max_batch_size: int = Field(default=64, ge=1)
    """Sequences in one forward pass."""
    max_num_tokens: int = Field(default=8192, ge=1)
    """Tokens in one forward pass; longer prompts are computed in chunks."""
    memory_fraction: float = Field(default=0.85, gt=0, lt=1)
    """Of the memory that weights and workspace leave, the share that KV blocks get."""
    block_reuse: bool = True
    """Blocks of earlier prompts are found again: by the engine itself, and in the pool."""
    plugins: tuple[str, ...] = ()
    """Libraries of TensorRT plugins that a TensorRT engine needs, as paths. Compiled ones only."""
    node: Node = Node()
    prefill: RoleSettings = RoleSettings()
    decode: RoleSettings = RoleSettings()

    def of(self, role: Role | None) -> TrtllmSettings:
        """As one role has it, with no roles in it; None: the block as it stands."""
        plain: dict[str, Any] = {"prefill": RoleSettings(), "decode": RoleSettings()}
        own = {} if role is None else getattr(self, role).model_dump(exclude_none=True)
        return self.model_copy(update={**plain, **own})

    def roles(self) -> list[Role | None]:
        """The engines that there are to build: one for both roles where they are alike."""
        return [None] if self.of("prefill") == self.of("decode") else ["prefill", "decode"]

    @property
    def quantisation_title(self) -> str:
        return "bfloat16" if self.quantisation == "none" else self.quantisation

    @property
    def world_size(self) -> int:
        """Ranks, and so GPUs, of one instance."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def stored_parallel(self) -> int:
        """The width under which blocks lie in the pool, so that both roles read them."""
        return lcm(self.of("prefill").tensor_parallel, self.of("decode").tensor_parallel)
