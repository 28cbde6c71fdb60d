"""TensorRT engines: real processes stand for TensorRT-LLM's programs; they convert, build, fail, hang, are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trtllm_samples import checkpoint, distribution, install_fake, request

from kvtool.engine.build import verify
from kvtool.engine.manifest import FILE
from kvtool.engine.trtllm import build as building
from kvtool.engine.trtllm import tools
from kvtool.engine.trtllm.build import build
from kvtool.engine.trtllm.bundle import read_bundle
from kvtool.engine.trtllm.check import check_installed
from kvtool.engine.trtllm.run import run
from kvtool.errors import BuildFailed, CheckpointRefused, EngineRefused, Missing

ENGINE = "backend=tensorrt"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "m")


@pytest.fixture
def pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trt").mkdir()
    return install_fake(tmp_path / "trt", monkeypatch)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [([], 1), (["tensor_parallel=2", "pipeline_parallel=2"], 4), (["quantisation=fp8", "kv_dtype=fp8"], 1)],
)
def test_engine_is_converted_built_checked_and_described(
    source: Path, pid_file: Path, tmp_path: Path, changes: list[str], ranks: int
) -> None:
    lines: list[str] = []
    seen: list[tuple[str, int, int]] = []
    result = build(
        request(source, ENGINE, *changes), tmp_path / "out", log=lines.append, progress=lambda *step: seen.append(step)
    )
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    engines = [f"rank{rank}.engine" for rank in range(ranks)]
    assert names == ["build_config.json", "config.json", FILE, *engines, "tokenizer.json"]
    first = "quantize" if "kv_dtype=fp8" in changes else "convert_checkpoint"
    assert lines[0] == f"{first}.py begins" and f"[I] rank {ranks - 1} done" in lines
    assert (first, 0, ranks) in seen and ("trtllm-build", ranks, ranks) in seen
    fields = verify(tmp_path / "out").tensorrt_llm
    assert fields is not None and fields.world_size == ranks
    assert (fields.adapter, fields.version, fields.tensorrt_version) == ("engine-1.2", "1.2.1", "10.14.1.48")
    check_installed(result.manifest, "out")
    assert not build(request(source, ENGINE, *changes), tmp_path / "out").built
    with pytest.raises(EngineRefused, match="found a TensorRT engine"):
        read_bundle(tmp_path / "out")


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("convert_checkpoint.py:fail", r"convert_checkpoint: ended with exit status 3; .*CUDA out of memory"),
        ("trtllm-build:fail", r"trtllm-build: ended with exit status 3; its last lines were:\s+trtllm-build begins"),
        ("trtllm-build:short", r"ended well, but wanted rank0\.\.1\.engine in .*, found 1 of 2"),
        ("convert_checkpoint.py:short", r"wanted rank0\.\.1\.safetensors"),
        ("trtllm-build:garbage", r"trtllm-build made no engine: .*config\.json: wanted a model's config"),
        ("trtllm-build:drops-fmha", r"plugin_config\.use_paged_context_fmha: asked for True, the engine has False"),
        ("trtllm-build:other-size", r"build_config\.max_batch_size: asked for 8, the engine has 1"),
        ("trtllm-build:folder", "left a folder that kvtool does not know, lora"),
    ],
)
def test_what_failed_or_is_not_what_was_asked_for_leaves_nothing(
    source: Path, pid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    with pytest.raises(BuildFailed, match=f"(?s){words}"):
        build(request(source, ENGINE, "tensor_parallel=2"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "trt"]


@pytest.mark.parametrize(
    ("mode", "words"), [("mute", "said nothing for 1 s after its start"), ("hang", "silent for 1 s")]
)
def test_program_that_hangs_is_ended(
    source: Path, pid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_MODE", f"convert_checkpoint.py:{mode}")

    def hurried(*arguments: object) -> None:
        run(*arguments, first_line_s=1.0 if mode == "mute" else 30.0, silence_s=1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(building, "run", hurried)
    with pytest.raises(BuildFailed, match=words):
        build(request(source, ENGINE), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    assert not _alive(int(pid_file.read_text()))


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_killed_build_leaves_no_process_and_no_engine(
    source: Path, pid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Interrupted, it clears up by itself; killed, its program goes with it, and the next build clears up."""
    monkeypatch.setenv("FAKE_MODE", "trtllm-build:hang")
    script = (
        "import sys, pathlib, pytest\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}\n"
        "from trtllm_samples import install_fake, request\n"
        "from kvtool.engine.trtllm.build import build\n"
        "source, folder, out = map(pathlib.Path, sys.argv[1:])\n"
        "install_fake(folder / 'again', pytest.MonkeyPatch())\n"
        f"build(request(source, '{ENGINE}'), out, log=lambda line: print(line, flush=True))\n"
    )
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(source), str(tmp_path / "trt"), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert any(line == "trtllm-build begins\n" for line in child.stdout)
        pid = _read_pid(tmp_path / "trt" / "again" / "pid")
        child.send_signal(number)
        child.wait(30)
    finally:
        child.kill()
        child.wait(10)
        assert child.stdout is not None
        child.stdout.close()
    _until(lambda: not _alive(pid))
    assert not out.exists()
    assert bool(list(tmp_path.glob(".out.building-*"))) == (number == signal.SIGKILL)
    monkeypatch.setenv("FAKE_MODE", "")
    assert build(request(source, ENGINE), out).built
    assert not list(tmp_path.glob(".out.building-*"))


def test_trtllm_checkpoint_is_not_converted_and_an_engine_only_copied(
    source: Path, pid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "converted"
    ready.mkdir()
    config = {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "num_hidden_layers": 3, "hidden_size": 64,
        "intermediate_size": 104, "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 16,
        "vocab_size": 160, "max_position_embeddings": 512, "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "INT8"},
    }  # fmt: skip
    (ready / "config.json").write_text(json.dumps(config))
    (ready / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (ready / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5], "bos_token_id": 0}))
    head = b'{"transformer.layers.0.attention.kv_cache_scaling_factor":{"data_offsets":[0,4]}}'
    weights = len(head).to_bytes(8, "little") + head + bytes(4)
    (ready / "rank0.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointRefused, match=r"rank1\.safetensors is missing \(1 of 2 ranks\); .*tp_size 2"):
        request(ready, ENGINE)
    (ready / "rank1.safetensors").write_bytes(weights)
    want = (ENGINE, "tensor_parallel=2", "kv_dtype=int8")
    with pytest.raises(EngineRefused, match=r"split for tensor, pipeline, context parallel \(2, 1, 1\), the settings"):
        request(ready, ENGINE, "kv_dtype=int8")
    with pytest.raises(EngineRefused, match="the PyTorch backend reads Hugging Face checkpoints"):
        request(_without_int8(ready), "tensor_parallel=2")
    lines: list[str] = []
    made = build(request(ready, *want), tmp_path / "one", log=lines.append)
    assert lines[0] == "trtllm-build begins" and made.manifest.eos_token_ids == [1, 5]
    assert made.manifest.kv.dtype == "int8"
    monkeypatch.setenv("FAKE_MODE", "trtllm-build:fail")
    again = build(request(tmp_path / "one", *want), tmp_path / "two")
    assert again.manifest.tensorrt_llm is not None and again.manifest.tensorrt_llm.checkpoint.kind == "engine"
    assert (tmp_path / "two" / "rank1.engine").read_bytes() == (tmp_path / "one" / "rank1.engine").read_bytes()


def _without_int8(ready: Path) -> Path:
    other = ready.parent / "plain"
    other.mkdir()
    for path in ready.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    config["quantization"] = {}
    (other / "config.json").write_text(json.dumps(config))
    return other


def test_quantised_kv_is_known_by_its_scales(
    source: Path, pid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calibrations that found other scales give KV that must not meet; two splits of one calibration may."""
    want, digests = (ENGINE, "quantisation=fp8", "kv_dtype=fp8"), {}
    for name, scale, changes in (
        ("one", "0.5", ()),
        ("split", "0.5", ("tensor_parallel=2",)),
        ("stages", "0.5", ("pipeline_parallel=2",)),
        ("other", "0.25", ()),
    ):
        monkeypatch.setenv("FAKE_SCALE", scale)
        digests[name] = build(request(source, *want, *changes), tmp_path / name).manifest.model_digest
    assert digests["one"] == digests["split"] != digests["other"] and digests["stages"] != digests["other"]
    monkeypatch.setenv("FAKE_MODE", "quantize.py:no-scales")
    with pytest.raises(CheckpointRefused, match="quantised KV without scales"):
        build(request(source, *want), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_is_missing_here_is_refused_before_anything_is_written(
    source: Path, pid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, want = tmp_path / "out", request(source, ENGINE)
    program = tmp_path / "trt" / "bin" / "trtllm-build"
    monkeypatch.setattr(tools, "gpu_arch_here", lambda: "sm_80")
    with pytest.raises(EngineRefused, match="H100 80 GB SXM is sm_90, the GPU here is sm_80"):
        build(want, out)
    monkeypatch.setenv("KVTOOL_TRTLLM_EXAMPLES", str(tmp_path / "none"))
    with pytest.raises(Missing, match=r"convert_checkpoint\.py is not there; .* set KVTOOL_TRTLLM_EXAMPLES"):
        build(want, out)
    program.rename(program.with_suffix(".away"))
    monkeypatch.setenv("KVTOOL_TRTLLM_EXAMPLES", str(tmp_path / "trt" / "examples"))
    with pytest.raises(EngineRefused, match=r"trtllm-build is not on the PATH, though tensorrt_llm 1\.2\.1"):
        build(want, out)
    distribution(monkeypatch, {"tensorrt_llm": "1.2.0"}, ["tensorrt~=10.13"])
    with pytest.raises(EngineRefused, match=r"asked for 1\.2\.1, tensorrt_llm 1\.2\.0 is installed"):
        build(want, out)
    distribution(monkeypatch, {}, [])
    with pytest.raises(EngineRefused, match=r"not installed here; a TensorRT engine is built in NVIDIA's"):
        build(want, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "trt"]


def test_engine_fits_only_the_tensorrt_that_built_it(
    source: Path, pid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = build(request(source, ENGINE), tmp_path / "out").manifest
    distribution(monkeypatch, {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.2"}, [])
    with pytest.raises(EngineRefused, match=r"built with TensorRT 10\.14\.1\.48, found 10\.14\.2"):
        check_installed(manifest, "out")
    distribution(monkeypatch, {"tensorrt_llm": "1.2.0"}, [])
    with pytest.raises(EngineRefused, match=r"an engine of TensorRT-LLM 1\.2\.1, found 1\.2\.0"):
        check_installed(manifest, "out")
    with pytest.raises(EngineRefused, match=r"removed in 1\.3"):
        check_installed(manifest, "out", "1.4.0rc1")


@pytest.mark.parametrize(("said", "arch"), [("9.0\n9.0\n", "sm_90"), ("10.0", "sm_100"), ("", None), ("N/A", None)])
def test_gpu_is_asked_for_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, arch: str | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n/usr/bin/printf '%s' '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.gpu_arch_here() == arch
    monkeypatch.setenv("PATH", "")
    assert tools.gpu_arch_here() is None


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def _until(holds: object, wait_s: float = 20.0) -> None:
    assert callable(holds)
    ends_s = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < ends_s, "still not so"
        os.sched_yield()


def _read_pid(path: Path) -> int:
    _until(lambda: path.is_file() and path.read_text())
    return int(path.read_text())
