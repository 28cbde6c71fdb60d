"""What a prefill instance tells a decode instance: how much of the prompt's KV should be in the pool.

No keys and no bytes of KV travel here. The decode instance makes the keys from the tokens itself, so a hand-off that is
wrong or late can cost time but never names another prompt's blocks. `transfer` is TensorRT-LLM's own, where its cache
transceiver moves the KV: it names the one context request that holds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvtool.errors import KvtoolError, RequestRefused
from kvtool.serve.request import Usage


@dataclass(frozen=True)
class Handoff:
    """`blocks`: whole blocks that are in the pool as far as prefill knows. `tail`: tokens in the transient partial
    block behind them, 0 for none. `hit_blocks`: of `blocks`, those that were resident before the request came;
    `hit_tokens`: their tokens by tier, empty where prefill had no need to read them. `seed`: short digest of the key
    seed; instances that disagree on it cannot share blocks. `transfer`: for the generation request of TensorRT-LLM
    (`serve.trtllm_terms`), good for one; empty where KV goes by the pool."""

    blocks: int
    tail: int = 0
    hit_blocks: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    seed: str = ""
    transfer: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        said = {name: value for name, value in vars(self).items() if name != "transfer" or value}
        return json.dumps(said, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Handoff:
        """Raises RequestRefused when `text` is not a hand-off."""
        try:
            raw: Any = json.loads(text)
            handoff = cls(**raw)
        except (ValueError, TypeError) as error:
            raise RequestRefused(f"wanted a hand-off as the prefill instance wrote it, found {error}") from None
        counts = (handoff.blocks, handoff.tail, handoff.hit_blocks)
        fits = all(type(count) is int and count >= 0 for count in counts)
        fits = fits and isinstance(handoff.seed, str) and isinstance(handoff.transfer, dict)
        tiers = handoff.hit_tokens
        if not fits or not isinstance(tiers, dict) or not all(type(count) is int for count in tiers.values()):
            raise RequestRefused(f"wanted a hand-off with counts from 0 up, found {text[:200]!r}")
        return handoff


@dataclass(frozen=True)
class PrefillDone:
    """The end of a prefill request: a hand-off, or the error that ended it. `usage` is there either way."""

    request_id: str
    handoff: Handoff | None
    usage: Usage
    error: KvtoolError | None = None
