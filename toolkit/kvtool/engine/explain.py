"""Sizes of an engine before it is built, as rows for a person: what, how much, and where the number comes from.

Rows are made here and printed by the command line. This file has what all targets share, and the torch target.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.engine.family import Family
from kvtool.kv.layout import KVLayout
from kvtool.units import show_size

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    what: str
    amount: str
    how: str = ""
    """The arithmetic, in words."""


@dataclass(frozen=True)
class Table:
    title: str
    rows: tuple[Row, ...]


def pool_rows(layout: KVLayout) -> tuple[Row, ...]:
    """What a block of `layout`, the whole model's, takes in the pool."""
    each = layout.block_size
    kinds = "K and V in one" if layout.kv_factor == 1 else "K and V"
    heads = f"{layout.kv_heads} KV heads x " if layout.kv_factor == 2 else ""
    return (
        Row(
            "KV per token",
            show_size(layout.token_size),
            f"{layout.layers} layers x {kinds} x {heads}{layout.head_dim} x {layout.dtype}",
        ),
        Row("block", show_size(each), f"{layout.block_tokens} tokens"),
        Row(
            "blocks per GiB of pool",
            f"{GIB // each:,}" if each <= GIB else "none",
            f"{GIB // each * layout.block_tokens:,} tokens",
        ),
    )


def explain_torch(family: Family, codes: bool, block_tokens: int) -> list[Table]:
    """The torch target. `codes`: the checkpoint has 4-bit codes, which decode multiplies beside prefill's bfloat16."""
    total = linear = 0
    for name, shape in family.tensors().items():
        values = 1
        for side in shape:
            values *= side
        total += values
        linear += values if "_proj.weight" in name else 0
    weights = [Row("parameters", f"{total / 1e6:,.1f} M", family.architecture)]
    weights.append(Row("weights", show_size(2 * total), "bfloat16, for prefill and the pool's numerics"))
    if codes:
        size = linear // 2 + linear // 32 * 4
        weights.append(Row("weights of decode", show_size(size), "4-bit codes, scale and offset for 32 values"))
    layout = KVLayout(family.layers, family.kv_heads, family.head_dim, block_tokens)
    longest = -(-family.context // block_tokens)
    full = Row(
        "longest sequence", show_size(longest * layout.block_size), f"{family.context:,} tokens, {longest:,} blocks"
    )
    return [Table("weights", tuple(weights)), Table("KV cache", (*pool_rows(layout), full))]
