"""One request in TensorRT-LLM's terms: sampling keywords, and what a context request leaves for its generation request.

Free of TensorRT-LLM's types. Keywords are checked against its signatures where they are passed (`engine.trtllm.llm`).
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from kvtool.errors import EngineFailed, RequestRefused
from kvtool.serve.request import Request

CONTEXT, GENERATION = "context_only", "generation_only"
FINISHED = "finished"
"""In a hand-off: the first token ended the answer, and nothing is to be generated."""
_OPAQUE = "opaque_state"
_CARRIED = (
    "first_gen_tokens", "ctx_request_id", _OPAQUE, "draft_tokens", "disagg_request_id", "ctx_dp_rank",
    "ctx_info_endpoint",
)  # fmt: skip
"""Of DisaggregatedParams, what goes from a context server to a generation server; None is left out."""
_IDS_FROM = 1 << 61
"""Far above the ids that an engine counts for its own requests."""


def sampling_keywords(request: Request, max_tokens: int, eos_token_ids: Collection[int]) -> dict[str, Any]:
    """Keywords of SamplingParams.

    TensorRT-LLM is greedy where top_k is absent or 1 and top_p absent or 0; so a greedy request names none of them, and
    any other names top_p even where it is 1. Stop strings stay here (`serve.text`): they may end inside a token. Ends
    are named because the engine may run without a tokenizer.
    """
    ends = sorted(eos_token_ids)
    first = ends[0] if ends else -1
    keywords: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": first,
        "pad_id": max(first, 0),
        "detokenize": False,
        "add_special_tokens": False,
    }
    if request.ignore_eos:
        keywords["ignore_eos"] = True
    elif ends[1:]:
        keywords["stop_token_ids"] = ends[1:]
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.top_k == 1:
        return keywords
    keywords |= {"temperature": float(sampling.temperature), "top_p": float(sampling.top_p), "seed": sampling.seed}
    if sampling.top_k:
        keywords["top_k"] = sampling.top_k
    return keywords


def context_keywords(own_ids: bool) -> dict[str, Any]:
    """Keywords of DisaggregatedParams for a context request. `own_ids`: the version wants an id that no other context
    server gives, since generation servers may pull from several."""
    keywords: dict[str, Any] = {"request_type": CONTEXT}
    if own_ids:
        keywords["disagg_request_id"] = _IDS_FROM + secrets.randbits(61)
    return keywords


def handoff_state(params: Any, finish_reason: str | None) -> dict[str, Any]:
    """What of a context request's DisaggregatedParams goes into the hand-off: plain JSON, opaque bytes as base64.

    Raises:
        EngineFailed: the context request came back without them.
    """
    if params is None:
        raise EngineFailed(
            "the context request came back without DisaggregatedParams; does llm.yaml have cache_transceiver_config?"
        )
    state: dict[str, Any] = {name: getattr(params, name, None) for name in _CARRIED}
    opaque = state[_OPAQUE]
    if isinstance(opaque, bytes):
        state[_OPAQUE] = base64.b64encode(opaque).decode("ascii")
    if finish_reason == "stop":
        state[FINISHED] = True
    return {name: value for name, value in state.items() if value is not None}


def generation_keywords(state: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of DisaggregatedParams for the generation request that goes with `state`.

    Raises:
        RequestRefused: `state` is not what a context request left.
    """
    unknown = sorted(state.keys() - {*_CARRIED, FINISHED})
    if unknown or "first_gen_tokens" not in state:
        found = f"unknown {', '.join(unknown)}" if unknown else "no first_gen_tokens"
        raise RequestRefused(f"wanted a hand-off as the prefill instance wrote it, found one with {found}")
    keywords = {name: value for name, value in state.items() if name != FINISHED}
    if _OPAQUE in keywords:
        try:
            keywords[_OPAQUE] = base64.b64decode(keywords[_OPAQUE], validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise RequestRefused("wanted base64 in the hand-off's opaque_state, found something else") from None
    return {"request_type": GENERATION, **keywords}
