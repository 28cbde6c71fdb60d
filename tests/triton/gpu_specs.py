"""Specs for GPUs that are right, to be made wrong: engines of a tiny model, and the texts that serve them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from bundles import LONGEST, as_engine, build_bundle, sealed, write_checkpoint

from kvtool.cli.main import main

POOL = {
    "target": "tensorrt_llm",
    "engine": "prefill",
    "pool": {"dram_size": "64MiB"},
    "tensorrt_llm": {
        "version": "1.2.1",
        "prefill": {"gpus": [[0]]},
        "decode": {"engine": "decode", "gpus": [[1]]},
        "launch": {
            "image": "registry.example/kvtool:1.2.1",
            "gpu": "h100-80gb",
            "gpus_per_node": 8,
            "node_memory": "4GiB",
        },
    },
}
DIRECT = {
    **POOL,
    "tensorrt_llm": {
        **POOL["tensorrt_llm"],
        "handoff": "transceiver",
        "transceiver": {"backend": "UCX", "buffer_tokens": LONGEST, "timeout": "30s", "bandwidth": "1MiB"},
    },
}
ENGINE = {
    "target": "tensorrt_llm",
    "engine": "engine",
    "tensorrt_llm": {
        "version": "1.2.1",
        "handoff": "transceiver",
        "prefill": {"gpus": [[0]]},
        "decode": {"gpus": [[1]]},
        "launch": {"image": "registry.example/kvtool:1.2.1", "gpu_arch": "sm_90", "tensorrt_version": "10.14.1.48"},
    },
}
SPECS = {"pool": POOL, "direct": DIRECT, "engine": ENGINE}


def make_engines(folder: Path) -> Path:
    """Two bundles, prefill and decode, and a directory that says it is a TensorRT engine; nothing could load that."""
    checkpoint = write_checkpoint(folder / "checkpoint")
    bundle = build_bundle(folder, checkpoint, name="prefill")
    shutil.copytree(bundle, folder / "decode")
    as_engine(bundle, folder / "engine")
    return folder


class Case:
    """One deployment in `folder`, which may be changed."""

    def __init__(self, engines: Path, folder: Path, name: str) -> None:
        self.folder = folder
        for engine in ("prefill", "decode", "engine"):
            shutil.copytree(engines / engine, folder / engine)
        self.path = folder / "spec.yaml"
        self.spec: dict[str, Any] = json.loads(json.dumps(SPECS[name]))
        self.rendered: Path | None = None

    def put(self, key: str, value: Any) -> None:
        """Set one key of the spec."""
        _put(self.spec, key, value)

    def built(self, engine: str, key: str, value: Any) -> None:
        """Set one key of an engine's manifest."""
        path = self.folder / engine / "engine.json"
        table = json.loads(path.read_text())
        _put(table, key, value)
        if key.startswith("kv."):
            table["kv_fingerprint"] = _fingerprint(table["kv"])
        path.write_text(json.dumps(table))

    def file(self, engine: str, name: str, key: str, value: Any) -> None:
        """Set one key of a YAML or JSON file of an engine; None takes it out."""
        path = self.folder / engine / name
        table = yaml.safe_load(path.read_text())
        _put(table, key, value)
        path.write_text(json.dumps(table))
        sealed(self.folder / engine)

    def render(self) -> Path:
        """Repositories of the spec as it stands, to be changed."""
        self.path.write_text(yaml.safe_dump(self.spec))
        self.rendered = self.folder / "out"
        assert main(["deploy", "render", str(self.path), "-o", str(self.rendered)]) == 0
        return self.rendered

    def rendered_key(self, role: str, name: str, key: str, value: Any) -> None:
        path = (self.rendered or self.render()) / role / f"{role}_engine" / "1" / name
        table = yaml.safe_load(path.read_text())
        _put(table, key, value)
        path.write_text(yaml.safe_dump(table))

    def rendered_text(self, model: str, change: Callable[[str], str]) -> None:
        path = (self.rendered or self.render()) / model / "config.pbtxt"
        before = path.read_text()
        path.write_text(change(before))
        assert path.read_text() != before, f"{model}: nothing changed"

    def faults(self, capsys: Any) -> tuple[int, list[dict[str, str]]]:
        """(exit code, faults) of `kvtool check --json`."""
        self.path.write_text(yaml.safe_dump(self.spec))
        capsys.readouterr()
        extra = ["--repositories", str(self.rendered)] if self.rendered else []
        code = main(["check", str(self.path), "--json", *extra])
        return code, json.loads(capsys.readouterr().out)


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for part in outer:
        table = table.setdefault(part, {})
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def _fingerprint(kv: dict[str, Any]) -> str:
    from kvtool.kv.layout import KVLayout

    return KVLayout(**kv).fingerprint
