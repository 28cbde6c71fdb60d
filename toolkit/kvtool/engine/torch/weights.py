"""The weights of a torch engine in memory, in the forms that its products want.

bf16 tensors are mapped from the engine directory, so processes on one machine share their pages. The q, k and v
projections are joined to one matrix, gate and up to another: fewer, larger products. The intermediate size is padded
with zeros to whole vectors of 64, which keeps elementwise kernels off their scalar tails, whose exp rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from kvtool.engine.family import Family
from kvtool.engine.torch.builder import CODES, WEIGHTS
from kvtool.engine.torch.rows import DECODE_ROWS, LinearMaker, RowPlan, Rows, probe
from kvtool.errors import EngineRefused

GROUP = 32
VECTOR = 64


@dataclass(frozen=True)
class Linears:
    """The four products of a layer, for one of the two paths."""

    qkv: Rows
    out: Rows
    gate_up: Rows
    down: Rows


@dataclass(frozen=True)
class Layer:
    """`norm_*` and `bias_qkv` are float32."""

    norm_attention: torch.Tensor
    norm_mlp: torch.Tensor
    bias_qkv: torch.Tensor | None
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
    prefill: Linears
    decode: Linears


@dataclass(frozen=True)
class Weights:
    embedding: torch.Tensor
    """bfloat16 [vocab, hidden], mapped."""
    layers: list[Layer]
    norm: torch.Tensor
    head: Rows
    decode_dtype: torch.dtype
    """What the decode products take."""


class _Files:
    """Tensors of an engine directory by name, mapped."""

    def __init__(self, directory: Path, codes: bool) -> None:
        self._open: dict[str, Any] = {}
        for file in (WEIGHTS, CODES) if codes else (WEIGHTS,):
            try:
                self._open[file] = safe_open(directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise EngineRefused(f"{directory / file}: {error}; build the engine again") from None

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open[WEIGHTS].get_tensor(name)
        return tensor

    def codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes as int32 [out, in], scale and offset as float32 [out, in / 32]."""
        file = self._open[CODES]
        raw: torch.Tensor = file.get_tensor(f"{name}.codes")
        codes = torch.stack([raw & 15, raw >> 4], dim=2).view(raw.shape[0], -1)
        return codes.int(), file.get_tensor(f"{name}.scale").float(), file.get_tensor(f"{name}.offset").float()


class Int4Maker:
    """Makes `Rows` over torch's 4-bit weight-only kernel from GGUF codes; scale and offset are rounded to bfloat16."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], RowPlan] = {}

    def make(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Rows:
        codes, scale, offset = (torch.cat(part) for part in zip(*parts, strict=True))
        # The kernel computes (code - 8) * scale + zero.
        terms = torch.stack([scale, offset + 8 * scale], dim=2).transpose(0, 1).contiguous().bfloat16()
        packed = torch._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)

        def product(rows: torch.Tensor) -> torch.Tensor:
            return torch._weight_int4pack_mm_for_cpu(rows, packed, GROUP, terms)

        shape = tuple(codes.shape)
        if shape not in self._plans:
            self._plans[shape] = probe(product, shape[1], torch.bfloat16, DECODE_ROWS, anchor=DECODE_ROWS[-1])
        return Rows(product, self._plans[shape])


def load_weights(directory: Path, family: Family, dtype: torch.dtype, int4: bool) -> Weights:
    """Everything that the forward passes need. `dtype`: of the prefill products.

    Raises:
        EngineRefused: weight files that cannot be read.
    """
    files, linear, four = _Files(directory, int4), LinearMaker(dtype), Int4Maker()
    layers = [_layer(files, family, index, linear, four if int4 else None) for index in range(family.layers)]
    embedding = files.tensor("model.embed_tokens.weight")
    head = embedding if family.tied else files.tensor("lm_head.weight")
    return Weights(
        embedding=embedding,
        layers=layers,
        norm=files.tensor("model.norm.weight").float(),
        head=_int8(head) if int4 else linear.make(head),
        decode_dtype=torch.bfloat16 if int4 else dtype,
    )


def _layer(files: _Files, family: Family, index: int, linear: LinearMaker, four: Int4Maker | None) -> Layer:
    at = f"model.layers.{index}."
    attention, mlp = at + "self_attn.", at + "mlp."
    qkv = [f"{attention}{part}_proj.weight" for part in "qkv"]
    pad = -family.intermediate % VECTOR

    def joined(names: Sequence[str], rows: int = 0) -> torch.Tensor:
        return torch.cat([F.pad(files.tensor(name), (0, 0, 0, rows)) for name in names])

    prefill = Linears(
        qkv=linear.make(joined(qkv)),
        out=linear.make(files.tensor(f"{attention}o_proj.weight")),
        gate_up=linear.make(joined([f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"], pad)),
        down=linear.make(F.pad(files.tensor(f"{mlp}down_proj.weight"), (0, pad))),
    )
    decode = prefill
    if four is not None:
        decode = Linears(
            qkv=four.make([files.codes(name) for name in qkv]),
            out=four.make([files.codes(f"{attention}o_proj.weight")]),
            gate_up=four.make([files.codes(f"{mlp}gate_proj.weight"), files.codes(f"{mlp}up_proj.weight")]),
            down=four.make([files.codes(f"{mlp}down_proj.weight")]),
        )
    bias = [files.tensor(f"{attention}{part}_proj.bias").float() for part in "qkv"] if family.qkv_bias else None
    return Layer(
        norm_attention=files.tensor(at + "input_layernorm.weight").float(),
        norm_mlp=files.tensor(at + "post_attention_layernorm.weight").float(),
        bias_qkv=torch.cat(bias) if bias else None,
        norm_q=files.tensor(attention + "q_norm.weight").float() if family.qk_norm else None,
        norm_k=files.tensor(attention + "k_norm.weight").float() if family.qk_norm else None,
        prefill=prefill,
        decode=decode,
    )


def _int8(weight: torch.Tensor) -> Rows:
    """The head in 8 bits, one scale a row: half the bytes of bfloat16, and logits are bfloat16 either way."""
    values = weight.float()
    scale = (values.abs().amax(1) / 127).clamp_min(1e-12).bfloat16()
    codes = (values / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(rows, codes, scale)

    return Rows(product, probe(product, weight.shape[1], torch.bfloat16, DECODE_ROWS, anchor=DECODE_ROWS[-1]))
