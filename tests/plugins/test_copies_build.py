"""The kernels' library: compiled once for what it was made of, kept, and refused in a sentence where it cannot be."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvtool.errors import EngineFailed, Missing  # noqa: E402
from kvtool.kv.layout import KVLayout  # noqa: E402
from kvtool_trtllm import build as building  # noqa: E402
from kvtool_trtllm import copies  # noqa: E402
from kvtool_trtllm.copies import Piece, checksum, gather  # noqa: E402
from kvtool_trtllm.kernel import Kernel  # noqa: E402
from kvtool_trtllm.packing import Packing, pack  # noqa: E402
from kvtool_trtllm.twin import Twin  # noqa: E402

FAKE = """#!/bin/sh
case "$*" in *--version*) echo "release {version}"; exit 0;; esac
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
{does}
"""


def _nvcc(folder: Path, version: str = "13.0", does: str = 'echo library > "$out"') -> Path:
    """A compiler that notes how it was called."""
    path = folder / "nvcc"
    path.write_text(FAKE.format(version=version, log=folder / "calls", does=does))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_the_source_compiles_for_a100_h100_and_b200_without_a_warning(tmp_path: Path) -> None:
    """Warnings are errors here. It compiles; whether it runs is for a GPU to say."""
    try:
        building.find_nvcc()
    except Missing as error:
        pytest.skip(str(error))
    library = building.build(["80", "90", "100"], tmp_path, more=["-Werror=all-warnings", "-Xptxas=--warn-on-spills"])
    assert library.read_bytes()[:4] == b"\x7fELF"
    Kernel(library)  # loads, and has each function of the interface
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == [library.name]


def test_a_library_is_compiled_once_and_anew_when_anything_it_is_made_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, nvcc = tmp_path / "cache", _nvcc(tmp_path)
    first = building.build(["90"], cache, nvcc)
    assert building.build(["90"], cache, nvcc) == first and _calls(tmp_path) == 1
    assert "arch=compute_90,code=sm_90" in (tmp_path / "calls").read_text()
    made = {first, building.build(["90", "100"], cache, nvcc), building.build(["80"], cache, nvcc)}
    changed = tmp_path / "copies.cu"
    changed.write_bytes(building.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(building, "SOURCE", changed)
    made.add(building.build(["90"], cache, nvcc))
    made.add(building.build(["90"], cache, _nvcc(tmp_path, "13.1")))
    assert len(made) == 5 and _calls(tmp_path) == 5


def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    """The compiler waits until all are there; the lock is of files, so threads stand for processes."""
    nvcc = _nvcc(tmp_path, does=f'while [ ! -e "{tmp_path}/go" ]; do :; done; echo library > "$out"')
    made: list[Path] = []

    def start() -> None:
        made.append(building.build(["90"], tmp_path / "c", nvcc))

    ranks = [threading.Thread(target=start) for _ in range(4)]
    for rank in ranks:
        rank.start()
    (tmp_path / "go").touch()
    for rank in ranks:
        rank.join(30)
    assert len(made) == 4 and len(set(made)) == 1 and _calls(tmp_path) == 1
    assert made[0].read_text() == "library\n"


def test_a_compiler_that_fails_leaves_nothing_and_its_words_are_told(tmp_path: Path) -> None:
    nvcc = _nvcc(tmp_path, does='echo half > "$out"; echo "error: no such thing" >&2; exit 2')
    with pytest.raises(EngineFailed, match=r"nvcc: exit 2: error: no such thing"):
        building.build(["90"], tmp_path / "cache", nvcc)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    silent = _nvcc(tmp_path, does="exit 3")
    with pytest.raises(EngineFailed, match="exit 3: no words"):
        building.build(["90"], tmp_path / "cache", silent)


def test_waits_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "COMPILE_S", 0.2)
    with pytest.raises(EngineFailed, match="not done after 0 s"):
        building.build(["90"], tmp_path / "cache", _nvcc(tmp_path, does="exec sleep 20"))
    nvcc = _nvcc(tmp_path)
    folder = tmp_path / "held"
    library = building.build(["90"], folder, nvcc)
    library.unlink()
    with building._alone(library.with_suffix(".lock")), pytest.raises(EngineFailed, match="another process"):
        building.build(["90"], folder, nvcc)


def test_without_a_compiler_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_NVCC", str(tmp_path / "none"))
    with pytest.raises(Missing, match=r"KVTOOL_NVCC names .*/none; install the CUDA toolkit"):
        building.find_nvcc()
    with pytest.raises(Missing, match="does not start"):
        building.build(["90"], tmp_path, tmp_path / "none")
    monkeypatch.delenv("KVTOOL_NVCC")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda path: None)
    with pytest.raises(Missing, match="no nvcc: looked in CUDA_HOME, the PATH and /usr/local/cuda"):
        building.find_nvcc()


def test_nvcc_is_found_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = _nvcc(tmp_path / "bin")
    monkeypatch.delenv("KVTOOL_NVCC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert building.find_nvcc() == nvcc
    monkeypatch.setenv("KVTOOL_NVCC", str(nvcc))
    assert building.find_nvcc() == nvcc


def test_the_cache_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path))
    assert building.cache_folder() == tmp_path
    monkeypatch.delenv("KVTOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert building.cache_folder() == Path("/x/kvtool")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert building.cache_folder() == Path.home() / ".cache" / "kvtool"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineFailed, match=r"cannot keep the kernels.*set KVTOOL_CACHE"):
        building.build(["90"], tmp_path / "file" / "under", _nvcc(tmp_path))


def test_a_gpu_without_a_compiler_goes_by_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(architectures: list[str]) -> Path:
        assert architectures == ["100"]
        raise Missing("no nvcc: install it")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    monkeypatch.setattr(copies, "build", no_compiler)
    copies._gpu_mover.cache_clear()
    try:
        for _ in range(3):
            assert isinstance(copies.mover_for(torch.device("cuda", 0)), Twin)
    finally:
        copies._gpu_mover.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "device copies go by torch operations, not by kernels: no nvcc: install it"
    ]


def test_a_library_of_another_kind_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(EngineFailed, match=r"text\.so: does not load.*delete it"):
        Kernel(text)
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    for source, words in (("int other;", "does not load"), (OTHER_ABI, "interface 99, wanted 1")):
        (tmp_path / "a.c").write_text(source)
        library = tmp_path / f"{len(source)}.so"
        assert os.spawnl(os.P_WAIT, compiler, "gcc", "-shared", "-fPIC", str(tmp_path / "a.c"), "-o", str(library)) == 0
        with pytest.raises(EngineFailed, match=words):
            Kernel(library)


OTHER_ABI = """
int kvtool_abi() { return 99; }
void kvtool_error() {} void kvtool_device_pointer() {} void kvtool_copy() {}
void kvtool_checksum() {} void kvtool_pack() {}
"""


@pytest.mark.parametrize("call", range(2))
def test_an_error_of_the_device_is_a_sentence(call: int, on_cpu: Kernel) -> None:
    """Of making the device current, and of the launch."""
    pool = torch.zeros(4, 64, dtype=torch.uint8)
    out = torch.zeros(1, 64, dtype=torch.uint8)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=16, block_tokens=1)
    doing = {
        "gather of 1 blocks in 1 pieces: invalid argument": lambda: gather([Piece(pool, 0)], [0], out, mover=on_cpu),
        "checksum of 1 blocks: invalid argument": lambda: checksum(out, mover=on_cpu),
        "packing of 1 blocks: invalid argument": lambda: pack(out, layout, Packing(), mover=on_cpu),
    }
    for words, do in doing.items():
        on_cpu._library.host_refuse(call + 1, 1)
        with pytest.raises(EngineFailed, match=rf"device copies, {words} \(CUDA error 1\)"):
            do()


def test_pinned_host_memory_is_addressed_as_the_device_sees_it(on_cpu: Kernel) -> None:
    host = torch.zeros(4, dtype=torch.uint8)
    assert on_cpu._seen(0, host) == host.data_ptr()
    on_cpu._library.host_refuse(1, 1)
    with pytest.raises(EngineFailed, match="looking up pinned host memory: invalid argument"):
        on_cpu._seen(0, host)
