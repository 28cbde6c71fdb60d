"""What TensorRT-LLM is given to build from, recognised by its own rule over config.json.

    pretrained_config and build_config    a TensorRT engine directory
    architecture and dtype                a TensorRT-LLM checkpoint, already split over ranks
    else                                  a Hugging Face checkpoint

Weights are never loaded and never copied; digest.py says how they are told apart.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvtool.engine.facts import ModelFacts, facts_of
from kvtool.errors import CheckpointRefused

Kind = Literal["huggingface", "trtllm", "engine"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

QUANTISATION = {"FP8": "fp8", "FP8_BLOCK_SCALES": "fp8_block_scales", "W4A16_AWQ": "w4a16_awq", "NVFP4": "nvfp4"}
"""TensorRT-LLM's QuantAlgo -> the word in settings."""


@dataclass(frozen=True)
class Source:
    """`quantisation` and `kv_dtype` are what the weights carry, in the words of settings; `kv_dtype` None: they carry
    no scales for KV. `path` None: a rehearsal without the checkpoint, named by its repository."""

    name: str
    path: Path | None
    kind: Kind
    facts: ModelFacts
    dtype: str
    quantisation: str
    kv_dtype: str | None
    config: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    """Of an engine or a TensorRT-LLM checkpoint: as it was split."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


def kind_of(config: dict[str, Any]) -> Kind:
    """TensorRT-LLM's rule (`get_model_format`)."""
    if "pretrained_config" in config and "build_config" in config:
        return "engine"
    return "trtllm" if "architecture" in config and "dtype" in config else "huggingface"


def read_source(path: Path) -> Source:
    """Look into the checkpoint or engine directory at `path`; weights are not read.

    Raises:
        CheckpointRefused: no such directory, or one that lacks or says what TensorRT-LLM would refuse.
    """
    if not path.is_dir():
        raise CheckpointRefused(
            f"{path}: wanted a Hugging Face or TensorRT-LLM checkpoint directory, found "
            f"{'a file' if path.exists() else 'nothing there'}"
            + ("; GGUF is for --target torch" if path.suffix == ".gguf" else "")
        )
    where = path / "config.json"
    config = read_table(where)
    kind = kind_of(config)
    files = {name: (path / name).read_bytes() for name in TOKENIZER_FILES if (path / name).is_file()}
    if "tokenizer.json" not in files:
        raise CheckpointRefused(
            f"{path}: tokenizer.json is missing; copy it from the Hugging Face checkpoint, with its "
            "tokenizer_config.json and generation_config.json"
        )
    if kind == "huggingface":
        return _huggingface(path, config, files)
    return _trtllm(path, config, files, kind)


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointRefused: missing, or not one.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointRefused(f"{path}: wanted a model's config, the file is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"{path}: wanted a model's config, found something else ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointRefused(f"{path}: wanted a JSON object, found {type(raw).__name__}")
    return raw


def special_ids(source: Source) -> tuple[list[int], int | None]:
    """EOS ids and the BOS id; generation_config.json knows better where both speak."""
    raw = json.loads(source.files.get("generation_config.json", b"{}"))
    eos = raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return ids or source.facts.eos_token_ids, source.facts.bos_token_id


def weight_files(path: Path) -> list[Path]:
    """The files that hold weights, in order.

    Raises:
        CheckpointRefused: none, or not all that the index names.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = read_table(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointRefused(f"{index}: wanted a weight_map from tensor to file, found {type(names).__name__}")
        found = [path / str(name) for name in sorted(set(names.values()))]
    else:
        found = sorted([*path.glob("*.safetensors"), *path.glob("rank*.engine")])
    missing = [file.name for file in found if file.parent != path or not file.is_file()]
    if not found or missing:
        lacks = f"{missing[0]} ({len(missing)} of {len(found)} files) is missing" if missing else "no weights here"
        raise CheckpointRefused(f"{path}: {lacks}; wanted safetensors files, whole, as the checkpoint was published")
    return found


def _huggingface(path: Path, config: dict[str, Any], files: dict[str, bytes]) -> Source:
    where = str(path / "config.json")
    facts = facts_of(config, where)
    weight_files(path)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    quantisation, kv = _quantised(path, config)
    return Source(
        str(path.resolve()), path, "huggingface", facts, _float(dtype, where), quantisation, kv, config, files
    )


def _quantised(path: Path, config: dict[str, Any]) -> tuple[str, str | None]:
    """How the weights are quantised: hf_quant_config.json (ModelOpt), else config.json's quantization_config."""
    modelopt = path / "hf_quant_config.json"
    if modelopt.is_file():
        table = read_table(modelopt).get("quantization")
        if not isinstance(table, dict):
            raise CheckpointRefused(f"{modelopt}: wanted a table quantization, found {type(table).__name__}")
        return _algorithm(table.get("quant_algo"), str(modelopt)), _kv(table.get("kv_cache_quant_algo"), str(modelopt))
    table = config.get("quantization_config")
    if not table:
        return "none", None
    where = f"{path / 'config.json'}: quantization_config"
    if not isinstance(table, dict):
        raise CheckpointRefused(f"{where}: wanted a table, found {type(table).__name__}")
    method = table.get("quant_method")
    if method == "fp8":
        return ("fp8_block_scales" if table.get("weight_block_size") else "fp8"), None
    if method == "awq":
        return "w4a16_awq", None
    if method == "modelopt":
        return _algorithm(table.get("quant_algo"), where), _kv(
            ((table.get("kv_cache_scheme") or {}) and "FP8") or table.get("kv_cache_quant_algo"), where
        )
    raise CheckpointRefused(
        f"{where}: quant_method {method!r}; kvtool builds from fp8, awq and ModelOpt checkpoints, and from float ones"
    )


def _algorithm(named: Any, where: str) -> str:
    if named in (None, "", "NO_QUANT"):
        return "none"
    if named not in QUANTISATION:
        raise CheckpointRefused(
            f"{where}: quant_algo: found {named!r}; kvtool knows {', '.join(QUANTISATION)} and none at all"
        )
    return QUANTISATION[named]


def _kv(named: Any, where: str) -> str | None:
    if named in (None, "", "auto"):
        return None
    if named not in ("FP8", "INT8"):
        raise CheckpointRefused(f"{where}: kv_cache_quant_algo: found {named!r}; kvtool knows FP8 and INT8")
    return str(named).lower()


def _float(dtype: str, where: str) -> str:
    if dtype not in ("bfloat16", "float16"):
        raise CheckpointRefused(f"{where}: dtype: wanted bfloat16 or float16, found {dtype}; save the model in one")
    return dtype


def _trtllm(path: Path, config: dict[str, Any], files: dict[str, bytes], kind: Kind) -> Source:
    where = str(path / "config.json")
    table = config["pretrained_config"] if kind == "engine" else config
    if not isinstance(table, dict):
        raise CheckpointRefused(f"{where}: pretrained_config: wanted a table, found {type(table).__name__}")
    facts = facts_of(_as_huggingface(table, files), where)
    mapping, quantisation = table.get("mapping") or {}, table.get("quantization") or {}
    source = Source(
        str(path.resolve()),
        path,
        kind,
        facts,
        _float(str(table.get("dtype")), where),
        _algorithm(quantisation.get("quant_algo"), where),
        _kv(quantisation.get("kv_cache_quant_algo"), where),
        config,
        files,
        int(mapping.get("tp_size", 1)),
        int(mapping.get("pp_size", 1)),
        int(mapping.get("cp_size", 1)),
    )
    wanted = [f"rank{rank}.{'engine' if kind == 'engine' else 'safetensors'}" for rank in range(source.world_size)]
    missing = [name for name in wanted if not (path / name).is_file()]
    if missing:
        raise CheckpointRefused(
            f"{path}: {missing[0]} is missing ({len(missing)} of {len(wanted)} ranks); config.json says tp_size "
            f"{source.tensor_parallel}, pp_size {source.pipeline_parallel}, cp_size {source.context_parallel}"
        )
    return source


_RENAMED = {
    "num_hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
}


def _as_huggingface(table: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    """A TensorRT-LLM checkpoint's config in the words of Hugging Face, so far as facts need them."""
    made = {there: table[here] for here, there in _RENAMED.items() if here in table}
    generation = json.loads(files.get("generation_config.json", b"{}"))
    ids = {key: generation.get(key) for key in ("eos_token_id", "bos_token_id")}
    name, moe = str(table.get("architecture")), table.get("moe") or {}
    if moe.get("num_experts") and name == "LlamaForCausalLM":
        name = "MixtralForCausalLM"
    if name == "QWenForCausalLM":
        name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}.get(
            str(table.get("qwen_type")), name
        )
    experts = {
        "num_local_experts": moe.get("num_experts"),
        "num_experts": moe.get("num_experts"),
        "num_experts_per_tok": moe.get("top_k"),
        "moe_intermediate_size": table.get("moe_intermediate_size"),
    }
    return {**made, **ids, "architectures": [name], **{k: v for k, v in experts.items() if v}}
