"""Every knob of the two workers, with its default. Those that the deployment spec shows have the same default there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PoolOptions:
    """How a worker uses the pool. Budgets bound every wait; what is not there in time is recomputed.

    `path`: auto, shm or ucx. `fetch_threads`: reads and imports that run at once.
    `fetch_slack`: no fetch may take longer than this share of the time that recomputing would take, unless the measured
    bandwidth says that it needs it; a stalled pool therefore costs a request a fifth of its prefill at most.
    `recompute_if_faster`: compute instead of fetching where that was measured to be faster; off, a resident block is
    always fetched. `breaker_failures` waits in vain in a row close the way to the pool for `breaker_rest_s`.
    """

    path: str = "auto"
    match_budget_s: float = 0.5
    fetch_budget_s: float = 2.0
    put_budget_s: float = 2.0
    fetch_threads: int = 2
    fetch_slack: float = 0.2
    fetch_floor_s: float = 0.15
    recompute_if_faster: bool = True
    breaker_failures: int = 3
    breaker_rest_s: float = 5.0


@dataclass(frozen=True)
class PrefillOptions:
    """`active_max`: requests that hold KV blocks at once and take turns at chunk boundaries. `staging_blocks_max`:
    blocks copied out for the pool and not yet written; a prompt keeps its KV memory until all of its blocks are.
    `tail_transient_s`: how long the pool keeps a hand-off's trailing partial block. `tail_to_decode`: when the trailing
    partial block is all that is missing, leave it to the decode instance, which needs the prefix anyway."""

    threads: int = 2
    kv_blocks: int = 512
    chunk_tokens: int = 512
    queue_max: int = 256
    active_max: int = 4
    staging_blocks_max: int = 64
    tail_transient_s: float = 60.0
    tail_to_decode: bool = True
    pool: PoolOptions = PoolOptions()


@dataclass(frozen=True)
class DecodeOptions:
    """`threads`: of decode steps. One by default: a step is short and bound by memory, and a second thread would wait
    at every layer for a core that the servers need for each token. `prompt_threads`: of prompts, or parts of them, that
    this worker computes itself. `chunk_tokens`: prompt tokens recomputed between two decode steps, and
    `recompute_share` of the engine's time that may go into it while a batch runs; `canonicalise_share` likewise for
    finished requests, whose generated blocks go to the pool for the conversation's next turn, `tidy_tokens` at a time:
    a new request waits no longer than that takes. `put_prompts`: whole blocks of prompts that this worker computed go
    to the pool as soon as they are there, for where no prefill worker does that. `backlog_max`: finished requests that
    may wait for that; the oldest are dropped beyond it, and whenever their memory is wanted."""

    threads: int = 1
    prompt_threads: int = 2
    kv_blocks: int = 1024
    batch_max: int = 16
    queue_max: int = 256
    chunk_tokens: int = 128
    recompute_share: float = 0.5
    canonicalise: bool = True
    put_prompts: bool = False
    canonicalise_share: float = 0.1
    tidy_tokens: int = 32
    backlog_max: int = 16
    staging_blocks_max: int = 64
    pool: PoolOptions = PoolOptions()


@dataclass(frozen=True)
class LlmOptions:
    """Of both workers over TensorRT-LLM, which batches by itself. `handoff`: how KV gets from prefill to decode.
    `put_budget_s`: longest that prefill waits for the pool to have what the connector saves; `match_budget_s`: for each
    time that it asks."""

    handoff: Literal["pool", "transceiver"] = "pool"
    queue_max: int = 256
    start_timeout_s: float = 600.0
    match_budget_s: float = 0.5
    put_budget_s: float = 2.0
