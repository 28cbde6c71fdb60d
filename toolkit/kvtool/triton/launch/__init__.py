"""Launch files: how a rendered deployment is started by mpirun, Slurm, Docker Compose or Kubernetes.

Pure functions from a plan (spec and manifests) to text. They hold no secret and no path of the machine that wrote them:
what differs between hosts comes by variables that each file names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtool.config.spec import Spec
from kvtool.errors import SpecRefused
from kvtool.triton.launch.compose import compose_peers, compose_text
from kvtool.triton.launch.container import contained, render_for_containers
from kvtool.triton.launch.kubernetes import kubernetes_text
from kvtool.triton.launch.plan import Launch, plan_of
from kvtool.triton.launch.scripts import mpirun_text, peers_text, pool_text, server_text
from kvtool.triton.launch.slurm import slurm_text
from kvtool.triton.render import LAUNCH

KINDS = ("mpirun", "slurm", "compose", "kubernetes")
_TEXTS: dict[str, tuple[str, Callable[[Launch], str]]] = {
    "mpirun": ("mpirun.sh", mpirun_text),
    "slurm": ("slurm.sbatch", slurm_text),
    "compose": ("compose.yaml", compose_text),
    "kubernetes": ("kubernetes.yaml", kubernetes_text),
}


def parse_kinds(text: str) -> tuple[str, ...]:
    """ "all", or names divided by commas.

    Raises:
        SpecRefused: a name that there is not.
    """
    kinds = KINDS if text == "all" else tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise SpecRefused(f"--launch: wanted all, or some of {', '.join(KINDS)}, found {text!r}")
    return kinds


def texts(launch: Launch, kinds: Sequence[str]) -> dict[str, str]:
    """File name -> text."""
    found = {}
    for kind in kinds:
        name, make = _TEXTS[kind]
        found[name] = make(launch)
    if {"mpirun", "slurm", "compose"} & set(kinds):
        found |= {"server.sh": server_text(launch), "pool.sh": pool_text(launch), "peers.json": peers_text(launch)}
    if "compose" in kinds:
        found["peers-compose.json"] = compose_peers(launch)
    return found


def render_launch(spec: Spec, out: Path, kinds: Sequence[str]) -> list[Path]:
    """Write OUT/launch, replacing what an earlier render left; the files written.

    Raises:
        SpecRefused: the spec lacks what one of them needs.
        EngineRefused: no engine for TensorRT-LLM there.
    """
    launch = plan_of(spec)
    written = texts(launch, kinds)
    folder = out / LAUNCH
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, text in written.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    if contained(kinds):
        render_for_containers(spec, folder / "container")
    return sorted(path for path in folder.rglob("*") if path.is_file())
