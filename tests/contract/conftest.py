"""A generated `tensorrt_llm` for each version, on the path of one test at a time."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversary import forget
from generate import VERSIONS, write


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As it was: what an engine's process sets for itself is not the next test's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tensorrt_llm")
    return {version: write(folder / version, version) for version in VERSIONS}


@pytest.fixture
def trtllm(packages):
    """`trtllm("1.2.1")` puts that version on the path and returns the package; the one before is forgotten."""
    entered: list[str] = []

    def enter(version: str):
        leave()
        entered.append(str(packages[version]))
        sys.path.insert(0, entered[0])
        forget()
        return importlib.import_module("tensorrt_llm")

    def leave() -> None:
        for entry in entered:
            with contextlib.suppress(ValueError):
                sys.path.remove(entry)
        entered.clear()
        forget()

    yield enter
    leave()
