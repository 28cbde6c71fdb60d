"""What one request used, over both stages, as the client gets it."""

from __future__ import annotations

from typing import Any


def usage_fields(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """Token counts are the decode stage's, which knows the hand-off; bytes and blocks are summed over the stages.

    prompt_tokens = sum(hit_tokens) + computed_tokens: hits are what was in the pool before the request came.
    """
    path_bytes: dict[str, int] = {}
    for stage in (prefill, decode):
        for path, size in (stage.get("path_bytes") or {}).items():
            path_bytes[path] = path_bytes.get(path, 0) + int(size)
    return {
        "prompt_tokens": int(decode.get("prompt_tokens", 0)),
        "completion_tokens": int(decode.get("completion_tokens", 0)),
        "hit_tokens": {"dram": 0, "file": 0, **(decode.get("hit_tokens") or {})},
        "computed_tokens": int(decode.get("computed_tokens", 0)),
        "pool": {
            "blocks_put": int(prefill.get("put_blocks", 0)) + int(decode.get("put_blocks", 0)),
            "path_bytes": path_bytes,
        },
        "seconds": {"prefill": prefill.get("seconds") or {}, "decode": decode.get("seconds") or {}},
    }
