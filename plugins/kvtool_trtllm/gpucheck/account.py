"""A step's account of itself, and what all steps share: how to skip, how to fail, what a GPU is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Evidence = Mapping[str, Any]
MARK = "KVTOOL_GPU_CHECK"


class Skip(Exception):
    """The step cannot be run here; the reason is its text."""


class Wrong(Exception):
    """What the step was to show is not so; what was found is its text."""


@dataclass(frozen=True)
class Context:
    """`work` is shared by all steps of one check: what one made, a later one may use."""

    work: Path
    model: Path | None


Show = Callable[[Context], tuple[str, Evidence]]
"""A step: what was found, in words, and the numbers that show it. Raises Skip or Wrong."""


def tell(step: str, status: str, detail: str, evidence: Evidence) -> None:
    """Write the account where the check looks for it, whole or not at all."""
    path = Path(os.environ[f"{MARK}_ACCOUNT"])
    claim = {
        "number": os.environ[MARK],
        "step": step,
        "status": status,
        "detail": detail,
        "evidence": dict(evidence),
    }
    half = path.with_suffix(".half")
    half.write_text(json.dumps(claim, default=str), encoding="utf-8")
    half.replace(path)


def gpu() -> Any:
    """torch, on a machine where it computes on a GPU.

    Raises:
        Skip: there is no torch, or it sees no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise Skip(f"torch is not installed ({error})") from None
    if torch.version.cuda is None:
        raise Skip(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise Skip("torch sees no GPU (torch.cuda.is_available() is False)")
    return torch
