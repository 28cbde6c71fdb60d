"""Rotary position tables (RoFormer, Su et al., arXiv:2104.09864), with Llama 3's scaling where a config asks for it."""

from __future__ import annotations

import math

import torch

from kvtool.engine.family import Family, RopeScaling


def rope_tables(family: Family, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [tokens, head_dim]; the first half of sin is negated, so that a rotation is

        x * cos + roll(x, head_dim / 2) * sin

    Angles are float32 products, as in training; cos and sin are taken in float64 and rounded once.
    """
    frequencies = 1.0 / family.rope_theta ** (torch.arange(0, family.head_dim, 2).float() / family.head_dim)
    if family.rope_scaling is not None:
        frequencies = _scale(frequencies, family.rope_scaling)
    angles = torch.outer(torch.arange(tokens).float(), frequencies).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow rotations are slowed by `factor`, fast ones kept, those between interpolated."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return frequencies * (share + (1 - share) / scaling.factor)
