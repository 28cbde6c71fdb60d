"""The folders that ship: found in a checkout, and in a wheel that was really built and installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvtool import assets
from kvtool.assets import ASSETS, asset_dir
from kvtool.errors import Missing

ROOT = Path(__file__).resolve().parents[2]


def relative_files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", ASSETS)
def test_checkout_uses_the_folders_where_they_stand(name: str) -> None:
    assert asset_dir(name) == ROOT / name


def test_unknown_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted one of engines, triton_models, got 'tests'"):
        asset_dir("tests")


def test_incomplete_installation_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(assets, "__file__", str(tmp_path / "a" / "kvtool" / "assets.py"))
    with pytest.raises(Missing, match=r"'engines' is missing \(looked in .*shipped/engines and .*\); install"):
        asset_dir("engines")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("toolkit", "plugins", *ASSETS):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    return copy


def build(source: Path, hook: str, target: Path) -> Path:
    """Run one hook of setuptools' build backend, as pip would, without asking a registry for anything."""
    code = f"import setuptools.build_meta as backend, sys; print(backend.{hook}(sys.argv[1]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    (made,) = target.iterdir()
    return made


def test_wheel_brings_the_folders_and_finds_them_once_installed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    wheel = build(source, "build_wheel", tmp_path / "dist")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel],
        check=True,
        timeout=120,
    )
    code = (
        "import kvtool, sys; from kvtool.assets import asset_dir; print(kvtool.__file__, *map(asset_dir, sys.argv[1:]))"
    )
    environ = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code, *ASSETS]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    module, *folders = ran.stdout.split()
    assert Path(module).is_relative_to(site)
    for name, folder in zip(ASSETS, folders, strict=True):
        assert Path(folder).is_relative_to(site)
        assert relative_files(Path(folder)) == relative_files(ROOT / name)
    with zipfile.ZipFile(wheel) as archive:
        assert {"kvtool_trtllm/meta.py", "kvtool/engine/trtllm/api.json"} <= set(archive.namelist())
        assert not [name for name in archive.namelist() if name.endswith((".gguf", ".safetensors", ".pyc"))]


def test_source_distribution_can_build_that_wheel(source: Path, tmp_path: Path) -> None:
    for name in ("sdist", "dist"):
        (tmp_path / name).mkdir()
    with tarfile.open(build(source, "build_sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("kvtool-*")
    with zipfile.ZipFile(build(unpacked, "build_wheel", tmp_path / "dist")) as archive:
        held = set(archive.namelist())
    for name in ASSETS:
        assert {f"kvtool/shipped/{name}/{path}" for path in relative_files(ROOT / name)} <= held
