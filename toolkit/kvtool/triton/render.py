"""Complete Triton model repositories from a spec: one for each role, the same bytes for the same spec.

Templates lie in `triton_models/`; what a spec decides stands in them as ${name}. A name that is not known, or one left
over, is refused: Triton would serve it as text. Whatever differs between two instances of a role, or between two
starts, comes by the environment (`settings`), so a repository can be copied to another host or baked into an image.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtool.assets import asset_dir
from kvtool.config.spec import Spec
from kvtool.engine.trtllm.version import Adapter
from kvtool.errors import Refused
from kvtool.triton.target import Target, engine_values, role_files, target_of

ROLES = {
    "front": ("front",),
    "prefill": ("preprocessing", "prefill_engine", "prefill"),
    "decode": ("preprocessing", "decode_engine", "postprocessing", "decode"),
}
"""Role -> its models. Decode has preprocessing too: prompts go straight to it while no prefill server is there."""

LAUNCH = "launch"
"""Beside them, where launch files were asked for."""

SERVED_AS = {"front": "kvtool"}
"""Template folder -> name of the served model, where they differ."""

_PYTORCH = {"prefill_engine": "trtllm/prefill_engine", "decode_engine": "trtllm/decode_engine"}
"""Model -> its template over TensorRT-LLM's PyTorch backend, where that differs from the one over torch."""


@dataclass(frozen=True)
class _Model:
    """One model of a repository: `template` its folder, `files` what stands beside its model.py, name -> text."""

    role: str
    served: str
    template: str
    files: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    """Placeholders of this model alone."""


def render(spec: Spec, out: Path, templates: Path | None = None) -> list[Path]:
    """Write a repository for each role into OUT, replacing what an earlier render left; the files written.

    Raises:
        Refused: OUT holds something else, a template has a placeholder that no spec fills, or (target tensorrt_llm)
            the spec asks for what its engines or their version cannot do.
    """
    templates = templates or asset_dir("triton_models")
    models, values = _models(spec), placeholders(spec)
    texts: dict[Path, str] = {}
    for model in models:
        folder, place = templates / model.template, Path(model.role, model.served)
        for source in sorted(path for path in folder.rglob("*") if path.suffix in (".pbtxt", ".py")):
            texts[place / source.relative_to(folder)] = _fill(source, values | _escaped(model.values))
        for name, text in model.files.items():
            texts[place / "1" / name] = text
    _clear(out)
    for path, text in texts.items():
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for model in models:  # an ensemble has no files in its version, and Triton wants the folder
        (out / model.role / model.served / "1").mkdir(exist_ok=True)
    return sorted(out / path for path in texts)


def _models(spec: Spec) -> list[_Model]:
    plain = [_Model(role, SERVED_AS.get(name, name), name) for role, names in ROLES.items() for name in names]
    if spec.target == "torch":
        return plain
    target = target_of(spec)
    if target.can.adapter is Adapter.ENGINE_1_2:
        return _engine_models(target)
    files = {f"{each.role}_engine": role_files(target, each) for each in target.roles}
    return [
        replace(model, template=_PYTORCH.get(model.template, model.template), files=files.get(model.served, {}))
        for model in plain
    ]


def _engine_models(target: Target) -> list[_Model]:
    """One server for both roles: the C++ backend hands KV over between models of one MPI job."""
    block = {"block_tokens": target.decode.manifest.kv.block_tokens}
    return [
        _Model("front", "kvtool", "front"),
        *(_Model("decode", name, name) for name in ("preprocessing", "postprocessing", "decode")),
        _Model("decode", "decode_engine", "trtllm_engine/decode_engine", values=block),
        *(_Model("decode", name, "trtllm_engine/engine", values=each) for name, each in engine_values(target).items()),
    ]


def placeholders(spec: Spec) -> dict[str, str]:
    """Name -> text for the templates, escaped for a quoted string in a pbtxt."""
    values: dict[str, object] = {
        "engine": spec.engine,
        "namespace": spec.pool.namespace,
        "pool_path": spec.pool.path,
        "handoff": "pool",
        "shared_cores": "true" if spec.target == "torch" else "false",
        "prefill_threads": spec.prefill.threads,
        "prefill_kv_blocks": spec.prefill.kv_blocks,
        "chunk_tokens": spec.prefill.chunk_tokens,
        "decode_threads": spec.decode.threads,
        "prompt_threads": spec.decode.prompt_threads,
        "decode_kv_blocks": spec.decode.kv_blocks,
        "batch_max": spec.decode.batch_max,
        "match_budget_s": spec.budgets.match,
        "fetch_budget_s": spec.budgets.fetch,
        "put_budget_s": spec.budgets.put,
        "max_tokens_default": spec.limits.max_tokens_default,
        "max_tokens_max": spec.limits.max_tokens_max,
        "deadline_s": spec.limits.deadline,
        "concurrent_max": spec.limits.concurrent_max,
    }
    if spec.target == "tensorrt_llm":
        values |= _of_target(spec)
    return _escaped(values)


def _escaped(values: Mapping[str, object]) -> dict[str, str]:
    return {name: json.dumps(str(value), ensure_ascii=False)[1:-1] for name, value in values.items()}


def _of_target(spec: Spec) -> dict[str, object]:
    """What only templates over TensorRT-LLM ask for."""
    target = target_of(spec)
    values: dict[str, object] = {
        "handoff": target.handoff,
        "start_timeout_s": round(0.95 * spec.supervise.start_timeout, 3),  # its own words come before ours
    }
    for each in target.roles:
        values |= {f"{each.role}_engine": each.engine, f"{each.role}_gpus": each.gpus}
    return values


def _fill(source: Path, values: dict[str, str]) -> str:
    text = source.read_text(encoding="utf-8")
    if source.suffix != ".pbtxt":
        return text
    try:
        return string.Template(text).substitute(values)
    except KeyError as unknown:
        raise Refused(f"{source}: placeholder ${{{unknown.args[0]}}} is unknown; known: {', '.join(values)}") from None
    except ValueError as error:
        raise Refused(f"{source}: {error}; write $$ for a plain dollar sign") from None


def _clear(out: Path) -> None:
    """Only what a render wrote may be replaced."""
    if not out.exists():
        return
    ours = (*ROLES, LAUNCH)
    strange = sorted(entry.name for entry in out.iterdir() if entry.name not in ours) if out.is_dir() else [out.name]
    if strange:
        raise Refused(f"{out}: wanted a new or rendered folder, found {', '.join(strange[:3])} in it; give another")
    for role in ROLES:
        if (out / role).exists():
            shutil.rmtree(out / role)
