"""How one block's bytes are laid out, and whether two peers agree on it.

A block is contiguous and holds K and V of `block_tokens` tokens for all layers of one layer group on one shard:
shape [layers, kv_factor, kv_heads, block_tokens, head_dim], K before V, C order. One block is one transfer. Peers
compare fingerprints when they meet and refuse each other with both layouts printed, since a block read under another
layout is a wrong answer and not an error.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from blake3 import blake3

DTYPE_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class KVLayout:
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str = "bfloat16"
    order: str = "L2HTD"
    kv_factor: int = 2
    """K and V; 1 where one tensor stands for both (multi-head latent attention)."""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"KV layout: {name} must be at least 1, got {getattr(self, name)}")
        if self.kv_factor not in (1, 2):
            raise ValueError(f"KV layout: kv_factor must be 1 or 2, got {self.kv_factor}")
        if self.dtype not in DTYPE_SIZE:
            raise ValueError(f"KV layout: dtype {self.dtype!r} is not one of {', '.join(DTYPE_SIZE)}")
        if self.order != "L2HTD":
            raise ValueError(f"KV layout: order {self.order!r} is unknown, only L2HTD is")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, self.kv_factor, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def token_size(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return self.layers * self.kv_factor * self.kv_heads * self.head_dim * DTYPE_SIZE[self.dtype]

    @property
    def block_size(self) -> int:
        """Bytes of one block."""
        return self.token_size * self.block_tokens

    @property
    def fingerprint(self) -> str:
        """32 hex digits over every field; equal if and only if the bytes mean the same."""
        fields = asdict(self)
        if self.kv_factor == 2:
            del fields["kv_factor"]  # as it was before there was another
        raw = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return blake3(b"kvtool layout 1\0" + raw).hexdigest()[:32]

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.kv_heads} KV heads x {self.head_dim} dims, "
            f"{self.block_tokens} tokens a block, {self.dtype}, {self.order}"
            + (", K and V in one" if self.kv_factor == 1 else "")
        )
