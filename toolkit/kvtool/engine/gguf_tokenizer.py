"""The tokenizer inside a GGUF file, written as Hugging Face's tokenizer.json.

GGUF keeps vocabulary, merges, token types and the name of a pre-tokenizer; how text is cut before merging is code in
llama.cpp (`llama-vocab.cpp`, by that name). The four cuts here are the ones of the families that this kvtool computes;
another name is refused, since a wrong cut gives other tokens and so other answers, silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtool.errors import CheckpointRefused

_CONTROL, _USER_DEFINED = 3, 4
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _cut(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "qwen2": _cut(_QWEN),
    "llama-bpe": _cut(_LLAMA3),
}


def tokenizer_files(metadata: dict[str, Any], vocab: int, context: int, path: Path) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json for the tokenizer that `metadata` describes.

    Raises:
        CheckpointRefused: a tokenizer that is not byte-level BPE, an unknown cut, or lists that do not fit.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise CheckpointRefused(
            f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r}; this kvtool reads gpt2 with "
            f"{', '.join(_PRE_TOKENIZERS)}. Build from the model's Hugging Face directory, which has tokenizer.json"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    merges = _strings(metadata, "tokenizer.ggml.merges", path)
    if len(tokens) != vocab or len(set(tokens)) != vocab:
        raise CheckpointRefused(f"{path}: wanted {vocab} different tokens, found {len(set(tokens))} of {len(tokens)}")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * vocab)
    if not isinstance(kinds, list) or len(kinds) != vocab:
        raise CheckpointRefused(f"{path}: tokenizer.ggml.token_type: wanted {vocab} numbers")
    special = {name: _special(metadata, key, tokens) for name, key in _SPECIAL.items()}
    bos = special["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token") else None
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], kind) for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _leading(bos, tokens) if bos else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [_merge(pair, path) for pair in merges],
        },
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bos is not None,
        **{name: token for name, token in special.items() if token is not None},
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return {"tokenizer.json": _dump(whole), "tokenizer_config.json": _dump(settings)}


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _dump(table: dict[str, Any]) -> bytes:
    return json.dumps(table, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")


def _strings(metadata: dict[str, Any], key: str, path: Path) -> list[str]:
    found = metadata.get(key)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise CheckpointRefused(f"{path}: {key}: wanted a list of strings, found a {type(found).__name__}")
    return found


def _special(metadata: dict[str, Any], key: str, tokens: list[str]) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _added(index: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": kind == _CONTROL,
    }  # fmt: skip


def _leading(bos: str, tokens: list[str]) -> dict[str, Any]:
    """A post-processor that puts `bos` in front."""
    one = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": one,
        "pair": [*one, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _merge(pair: str, path: Path) -> list[str]:
    parts = pair.split(" ")
    if len(parts) != 2:
        raise CheckpointRefused(f"{path}: tokenizer.ggml.merges: wanted two parts, found {pair!r}")
    return parts
