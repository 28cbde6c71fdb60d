"""Small checkpoints for TensorRT-LLM builds, a fake of its build programs, and distributions that are not there."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from engine_samples import small_config, write_checkpoint

from kvtool.engine.trtllm.request import Asked, Request, prepare

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "intermediate_size": 104, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 160, "max_position_embeddings": 512,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip


def checkpoint(folder: Path, family: str = "LlamaForCausalLM", **changes: Any) -> Path:
    """A Hugging Face directory with real weights, or another family's config with weights that are not its own."""
    if family in ("MixtralForCausalLM", "DeepseekV3ForCausalLM"):
        mixtral = small_config("LlamaForCausalLM") | {"num_local_experts": 4, "num_experts_per_tok": 2}
        config = {**(DEEPSEEK if family[0] == "D" else mixtral), "architectures": [family], **changes}
        write_checkpoint(folder, "LlamaForCausalLM")
    else:
        config = small_config(family, **changes)
        write_checkpoint(folder, family)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked(source: Path | str, *changes: str, version: str | None = "1.2.1", **more: Any) -> Asked:
    """For an H100, short enough for a small model."""
    small = (
        ("gpu=h100-80gb", "max_seq_len=512", "max_num_tokens=256", "max_batch_size=8") if Path(source).exists() else ()
    )
    return Asked(str(source), version=version, changes=(*small, *changes), **more)


def request(source: Path | str, *changes: str, version: str = "1.2.1", **more: Any) -> Request:
    return prepare(asked(source, *changes, version=version, **more), None)


PROGRAM = '''#!{python}
"""Stands for trtllm-build, convert_checkpoint.py and quantize.py: reads the same flags, writes the same names."""
import json, os, pathlib, struct, sys, time

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
mode, name = os.environ.get("FAKE_MODE", ""), pathlib.Path(sys.argv[0]).name
here = mode.partition(":")[0] in (name, "")
what = mode.partition(":")[2] if here else ""
job = [key for key in os.environ if key.startswith(("OMPI_COMM", "PMIX", "PMI_"))]
if what != "mute":
    print(f"{{name}} begins", flush=True)
if job:
    sys.exit(f"would join an MPI job: {{job}}")
if what in ("hang", "mute"):
    pathlib.Path(os.environ["FAKE_PIDS"]).write_text(str(os.getpid()))
    time.sleep(600)
out = pathlib.Path(flags["--output_dir"])
out.mkdir(exist_ok=True)
if name == "trtllm-build":
    config = json.loads((pathlib.Path(flags["--checkpoint_dir"]) / "config.json").read_text())
    build = json.loads(pathlib.Path(flags["--build_config"]).read_text())
    ranks = config["mapping"]["world_size"]
    if what == "drops-fmha":
        build["plugin_config"]["use_paged_context_fmha"] = False
    if what == "other-size":
        build["max_batch_size"] = 1
    table = {{"version": os.environ["FAKE_VERSION"], "pretrained_config": config, "build_config": build}}
    suffix = "engine"
    pathlib.Path("model.cache").write_text("timings")
    if what == "folder":
        (out / "lora").mkdir()
else:
    sizes = {{key: int(flags["--" + key]) for key in ("tp_size", "pp_size", "cp_size")}}
    ranks = sizes["tp_size"] * sizes["pp_size"] * sizes["cp_size"]
    mapping = {{**sizes, "world_size": ranks}}
    table = {{"architecture": "LlamaForCausalLM", "dtype": flags["--dtype"], "mapping": mapping}}
    suffix = "safetensors"
if what == "fail":
    print("[E] CUDA out of memory", flush=True)
    sys.exit(3)
scale = struct.pack("<f", float(os.environ.get("FAKE_SCALE", "0.5")))
head = json.dumps({{"transformer.layers.0.attention.kv_cache_scaling_factor":
    {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}} if what != "no-scales" else {{}}).encode()
for rank in range(ranks - (what == "short")):
    whole = struct.pack("<Q", len(head)) + head + scale
    (out / f"rank{{rank}}.{{suffix}}").write_bytes(whole)
    print(f"[I] rank {{rank}} done", flush=True)
(out / "config.json").write_text("{{" if what == "garbage" else json.dumps(table))
'''


def install_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str = "1.2.1") -> Path:
    """Put the programs on the PATH, their scripts where TensorRT-LLM's container has them, and a dist-info behind
    importlib.metadata. Returns the file in which a hanging program leaves its pid."""
    bin_, examples = folder / "bin", folder / "examples"
    text = PROGRAM.format(python=sys.executable)
    for path in (
        bin_ / "trtllm-build",
        examples / "models" / "core" / "llama" / "convert_checkpoint.py",
        examples / "models" / "core" / "qwen" / "convert_checkpoint.py",
        examples / "quantization" / "quantize.py",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (bin_ / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(bin_))
    monkeypatch.setenv("KVTOOL_TRTLLM_EXAMPLES", str(examples))
    monkeypatch.setenv("FAKE_VERSION", version)
    monkeypatch.setenv("FAKE_PIDS", str(folder / "pid"))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")  # as under a mpiexec that started kvtool
    monkeypatch.setenv("PMIX_RANK", "3")
    distribution(monkeypatch, {"tensorrt_llm": version, "tensorrt": "10.14.1.48"}, ["tensorrt~=10.14.1"])
    return folder / "pid"


def distribution(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: list[str]) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        if name.startswith("tensorrt"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
