"""The door: what a person sees when a command works, is refused, breaks, or lacks a package."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvtool import __version__
from kvtool.cli import lazy, main
from kvtool.cli.lazy import Entry
from kvtool.errors import PoolFull, SpecRefused

HEAVY = ["torch", "numpy", "tritonclient", "mpi4py", "nixl_cu13", "yaml", "grpc", "safetensors", "tokenizers", "blake3"]


@pytest.fixture(autouse=True)
def state_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("KVTOOL_DEBUG", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kvtool"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """`kvtool broken` raises what the test puts into the list."""
    raised: list[BaseException] = []

    def broken() -> None:
        raise raised[0]

    monkeypatch.setattr(sys.modules[__name__], "broken_command", broken, raising=False)
    monkeypatch.setitem(main.COMMANDS, "broken", Entry(f"{__name__}:broken_command", "Breaks."))
    return raised


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], [*HEAVY, "pydantic"]),
        (["--version"], [*HEAVY, "pydantic"]),
        (["bench", "--help"], HEAVY),  # typer itself imports pydantic once it has an option to convert
    ],
)
def test_help_imports_no_heavy_package(arguments: list[str], heavy: list[str]) -> None:
    code = (
        "import sys; from kvtool.cli.main import main; code = main(sys.argv[2:]); "
        "found = sorted(set(sys.argv[1].split(',')) & set(sys.modules)); print('HEAVY', found); sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, ",".join(heavy), *arguments], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert "HEAVY []" in ran.stdout


def test_help_lists_every_command_and_loads_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in main.COMMANDS)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtool {__version__}\n"


def test_typo_is_refused_with_the_nearest_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["docter"]) == 2
    assert "Did you mean 'doctor'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(PoolFull("rank 1: no room"), 1), (SpecRefused("spec.yaml:3: [pool] is odd"), 2)]
)
def test_error_is_its_sentence_and_its_exit_code(
    command: list[BaseException], error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in the sentence are text and not markup, and there is no traceback."""
    command.append(error)
    assert main.main(["broken"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error}\n"


def test_unforeseen_error_leaves_its_traceback_in_a_private_file(
    command: list[BaseException], state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.append(KeyError("what"))
    assert main.main(["broken"]) == 1
    err = capsys.readouterr().err
    (log,) = state_dir.glob("crash-*.log")
    assert str(log) in err
    assert "Traceback" not in err
    assert "KeyError: 'what'" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_unforeseen_error_without_a_place_to_write_shows_its_traceback(
    command: list[BaseException], state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_dir.write_text("a file where the folder should be")
    command.append(KeyError("what"))
    assert main.main(["broken"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "no file could hold it" in err


def test_debug_shows_the_traceback_of_an_expected_error(
    command: list[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTOOL_DEBUG", "1")
    command.append(PoolFull("rank 1: no room"))
    assert main.main(["broken"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("torch", "pip install 'kvtool[cpu]'"),
        ("tritonclient.grpc", "pip install 'kvtool[serve]'"),
        ("mpi4py.MPI", "pip install 'kvtool[mpi]'"),
        ("nixl_cu13", "pip install 'kvtool[ucx]'"),
        ("some_thing", "pip install some-thing"),
    ],
)
def test_missing_package_is_named_with_its_pip_line(
    command: list[BaseException], module: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command.append(ModuleNotFoundError(f"No module named '{module}'", name=module))
    assert main.main(["broken"]) == 1
    err = capsys.readouterr().err
    assert module.partition(".")[0] in err
    assert err.endswith(f"run: {line}\n")


def test_missing_part_of_kvtool_is_not_blamed_on_pip(
    command: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    command.append(ModuleNotFoundError("No module named 'kvtool.nothing'", name="kvtool.nothing"))
    assert main.main(["broken"]) == 1
    assert "this should not have happened" in capsys.readouterr().err


def test_interrupt_exits_130(command: list[BaseException]) -> None:
    command.append(KeyboardInterrupt())
    assert main.main(["broken"]) == 130


def test_reader_that_goes_away_is_no_error() -> None:
    """A pipe whose reading end is closed before the first byte: no traceback, nothing on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "kvtool.cli.main", "--help"], stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert ran.stderr == b""


def test_every_entry_can_be_loaded_and_says_what_it_does() -> None:
    from kvtool.cli.bench import BenchGroup

    for name, entry in {**main.COMMANDS, **BenchGroup.entries}.items():
        command = lazy.load(name, entry)
        assert command.name == name
        assert command.help, f"{name} has no help"


def test_group_without_a_command_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = typer.Typer(help="A group of one.")
    group.command("only", help="Its one command.")(lambda: None)
    monkeypatch.setattr(sys.modules[__name__], "a_group", group, raising=False)
    monkeypatch.setitem(main.COMMANDS, "group", Entry(f"{__name__}:a_group", "A group."))
    main.main(["group"])
    shown = capsys.readouterr()
    assert "Its one command." in shown.out + shown.err
    assert main.main(["group", "only"]) == 0
