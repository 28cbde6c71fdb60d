"""A tritonserver that is on the PATH, as in a Triton container, serves in place of the one that pip brought."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from deployed import Deployed

from kvtool.triton import install

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_a_tritonserver_on_the_path_is_taken(
    smollm2_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pip's server again, but reached only through a command that brings its own backends and libraries."""
    piped = install.find()
    backends = install.backend_dir(piped, tmp_path / "container")
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "tritonserver"
    libraries = f"{sysconfig.get_config_var('LIBDIR')}:{piped.libraries}"
    command.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH={libraries}\nexec {piped.binary} --backend-directory={backends} "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert install.find().binary == command and install.find().wheel is None

    running = Deployed(tmp_path, smollm2_engine)
    try:
        answer = running.ask("The capital of France is", 4)
        assert answer.finish == "length", answer
        assert not (running.run_dir / "backends").exists(), "nothing of pip's was laid out for it"
    finally:
        running.down()
    assert running.left() == set()
