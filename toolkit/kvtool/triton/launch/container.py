"""Repositories as they are inside containers: engines in one folder, and GPUs counted from 0 for each instance.

A container runtime shows a container its own GPUs only, and numbers them anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvtool.config.spec import Spec
from kvtool.triton.render import render
from kvtool.triton.target import target_of

CONTAINED = ("compose", "kubernetes")


def contained(kinds: Sequence[str]) -> bool:
    return bool(set(kinds) & set(CONTAINED))


def render_for_containers(spec: Spec, out: Path) -> None:
    """Write front/, prefill/ and decode/ into `out`."""
    renumbered = spec.tensorrt_llm
    engine = target_of(spec).can.adapter.value == "engine-1.2"
    if not engine:  # one server that has all GPUs keeps their order
        update = {
            role: getattr(renumbered, role).model_copy(
                update={"gpus": [list(range(len(ids))) for ids in getattr(renumbered, role).gpus]}
            )
            for role in ("prefill", "decode")
        }
        renumbered = renumbered.model_copy(update=update)
    render(spec.model_copy(update={"tensorrt_llm": renumbered}), out)
    for path in sorted(out.rglob("config.pbtxt")):
        text = path.read_text(encoding="utf-8")
        for engine_dir, name in _engines(spec).items():
            text = text.replace(f'"{_escaped(engine_dir)}"', f'"{spec.tensorrt_llm.launch.engines}/{name}"')
        path.write_text(text, encoding="utf-8")


def _engines(spec: Spec) -> dict[str, str]:
    """Engine directory here -> its name in the folder of engines."""
    roles = (spec.tensorrt_llm.prefill, spec.tensorrt_llm.decode)
    return {str(path): path.name for path in (spec.engine, *(role.engine for role in roles)) if path is not None}


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
