"""The house's import direction, and which rooms may know heavy packages. What ARCHITECTURE.md claims, checked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtool

ROOT = Path(kvtool.__file__).parent
BELOW = {
    "errors": set(),
    "clock": set(),
    "units": {"errors"},
    "assets": {"errors"},
    "kv": {"errors", "clock", "units"},
    "transfer": {"kv"},
    "pool": {"transfer", "kv"},
    "engine": {"kv"},
    "conductor": {"kv"},
    "serve": {"pool", "engine", "conductor", "transfer", "kv"},
    "config": set(),
    "triton": {"config", "serve", "pool", "engine", "conductor", "transfer", "kv"},
    "batch": {"config", "triton", "serve", "pool", "engine", "kv"},
    "doctor": {"config", "engine", "pool", "transfer", "triton", "kv"},
    "sim": {"config", "pool", "transfer", "kv"},
    "measure": {"config", "batch", "triton", "serve", "pool", "engine", "transfer", "kv"},
}
EVERYWHERE = {"errors", "clock", "units", "assets", "__version__"}
DOORS = {
    "mpi4py": {"pool"},
    "nixl_cu13": {"transfer"},
    "nixl": {"transfer"},
    "tritonclient": {"triton"},
    "typer": {"cli"},
    "rich": {"cli"},
    "torch": {"engine", "measure"},
    "transformers": {"measure"},
    "tensorrt_llm": {"engine"},
}


def _rooms() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).parts[0].removesuffix(".py"), path


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "kvtool":
                yield from ((f"kvtool.{name.name}", node.lineno) for name in node.names)
            else:
                yield node.module, node.lineno


def test_rooms_import_only_what_lies_below_them() -> None:
    wrong = []
    for room, path in _rooms():
        if room in ("cli", "__init__"):
            continue
        allowed = BELOW[room] | EVERYWHERE | {room}
        for name, line in _imports(path):
            words = name.split(".")
            if words[0] == "kvtool" and len(words) > 1 and words[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} {name}")
    assert not wrong, "imports run one way only (ARCHITECTURE.md): " + ", ".join(wrong)


@pytest.mark.parametrize("package", DOORS)
def test_heavy_packages_have_their_doors(package: str) -> None:
    rooms = {
        room for room, path in _rooms() for name, _ in _imports(path) if name.split(".")[0] == package
    }  # fmt: skip
    assert rooms <= DOORS[package], f"{package} is known in {rooms - DOORS[package]}"
