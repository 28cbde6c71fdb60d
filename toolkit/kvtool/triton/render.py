"""Complete Triton model repositories from a spec: one for each role, the same bytes for the same spec.

Templates lie in `triton_models/`; what a spec decides stands in them as ${name}. A name that is not known, or one left
over, is refused: Triton would serve it as text. Whatever differs between two instances of a role, or between two
starts, comes by the environment (`settings`), so a repository can be copied to another host or baked into an image.
"""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

from kvtool.assets import asset_dir
from kvtool.config.spec import Spec
from kvtool.errors import Refused

ROLES = {
    "front": ("front",),
    "prefill": ("preprocessing", "prefill_engine", "prefill"),
    "decode": ("preprocessing", "decode_engine", "postprocessing", "decode"),
}
"""Role -> its models. Decode has preprocessing too: prompts go straight to it while no prefill server is there."""

SERVED_AS = {"front": "kvtool"}
"""Template folder -> name of the served model, where they differ."""


def render(spec: Spec, out: Path, templates: Path | None = None) -> list[Path]:
    """Write OUT/front, OUT/prefill and OUT/decode, replacing what an earlier render left; the files written.

    Raises:
        Refused: OUT holds something else, or a template has a placeholder that no spec fills.
    """
    templates = templates or asset_dir("triton_models")
    values = placeholders(spec)
    texts: dict[Path, str] = {}
    for role, models in ROLES.items():
        for model in models:
            for source in sorted(path for path in (templates / model).rglob("*") if path.suffix in (".pbtxt", ".py")):
                served = Path(role, SERVED_AS.get(model, model)) / source.relative_to(templates / model)
                texts[served] = _fill(source, values)
    _clear(out)
    for path, text in texts.items():
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for role, models in ROLES.items():
        for model in models:  # an ensemble has no files in its version, and Triton wants the folder
            (out / role / SERVED_AS.get(model, model) / "1").mkdir(exist_ok=True)
    return sorted(out / path for path in texts)


def placeholders(spec: Spec) -> dict[str, str]:
    """Name -> text for the templates, escaped for a quoted string in a pbtxt."""
    values: dict[str, object] = {
        "engine": spec.engine,
        "namespace": spec.pool.namespace,
        "pool_path": spec.pool.path,
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
    return {name: json.dumps(str(value), ensure_ascii=False)[1:-1] for name, value in values.items()}


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
    strange = sorted(entry.name for entry in out.iterdir() if entry.name not in ROLES) if out.is_dir() else [out.name]
    if strange:
        raise Refused(f"{out}: wanted a new or rendered folder, found {', '.join(strange[:3])} in it; give another")
    for role in ROLES:
        if (out / role).exists():
            shutil.rmtree(out / role)
