"""`kvtool build --explain` for TensorRT-LLM: rows from the arithmetic of sizing.py and estimate.py, for each role."""

from __future__ import annotations

from kvtool.engine.explain import Row, Table, pool_rows
from kvtool.engine.facts import ModelFacts, count
from kvtool.engine.trtllm.estimate import HostTier, host_tier, refetch
from kvtool.engine.trtllm.gpus import gpu
from kvtool.engine.trtllm.settings import LAYOUT_DTYPE, Role, TrtllmSettings
from kvtool.engine.trtllm.sizing import Fit, check
from kvtool.units import show_size

STAGING = 1 << 30
"""The connector's pinned memory of each rank, unless its settings say otherwise."""
PREFIX = 4096
"""Tokens of the prefix whose fetch is compared with its computation."""


def explain_trtllm(name: str, facts: ModelFacts, block: TrtllmSettings, block_tokens: int) -> list[Table]:
    """Tables of the model, of each engine, of the host and of the pool.

    Raises:
        EngineRefused: it does not fit; with what would.
    """
    tables = [Table("model", _model(facts))]
    for role in block.roles():
        settings = block.of(role)
        got = check(facts, settings, block_tokens, f"{name}{f' ({role})' if role else ''}")
        card = gpu(settings.gpu)
        title = f"{role or 'prefill and decode'}: {settings.world_size} x {card.title} ({card.arch})"
        tables.append(
            Table(title, (*_engine(facts, settings, got, block_tokens), *_moving(facts, settings, got, role)))
        )
    host = host_tier(block.node, STAGING, name)
    tables.append(Table(f"host memory of a node of {block.node.gpus} GPUs", _host(facts, block, host, block_tokens)))
    layout = facts.kv_layout(block_tokens, LAYOUT_DTYPE[block.kv_dtype])
    width = block.stored_parallel
    shards = min(width, layout.kv_heads)
    stored = Row(
        "stored as",
        f"{shards} shard{'' if shards == 1 else 's'} a block",
        f"width {width}, so that each role reads whole ones",
    )
    tables.append(Table("pool, all ranks together", (*pool_rows(layout), stored)))
    return tables


def _model(facts: ModelFacts) -> tuple[Row, ...]:
    counted, rows = count(facts), [Row("parameters", f"{facts.parameters / 1e9:.2f} billion", facts.architecture)]
    if facts.experts:
        active = (counted.active + counted.embeddings) / 1e9
        rows.append(
            Row(
                "of them for one token",
                f"{active:.1f} billion",
                f"{facts.experts.active} of {facts.experts.count} experts",
            )
        )
    heads = f"{facts.layers} layers, {facts.heads} query heads"
    rows.append(
        Row("attention", "MLA", f"{heads}, latent of {facts.latent.kv_rank} + {facts.latent.rope_dim}")
        if facts.latent
        else Row("attention", "GQA", f"{heads}, {facts.kv_heads} KV heads of {facts.head_dim}")
    )
    rows.append(Row("context", f"{facts.context:,} tokens", f"rope theta {facts.rope_theta:,.0f}"))
    return tuple(rows)


def _engine(facts: ModelFacts, settings: TrtllmSettings, got: Fit, block_tokens: int) -> tuple[Row, ...]:
    parts = got.weights
    kinds = [("attention", parts.attention), ("MLP", parts.mlp), ("experts", parts.experts)]
    listed = ", ".join(f"{kind} {show_size(size)}" for kind, size in kinds if size)
    heads = max(1, facts.kv_heads // settings.tensor_parallel)
    share = "the latent, whole on each rank" if facts.latent else f"{heads} of {facts.kv_heads} KV heads"
    return (
        Row("memory of the GPU", show_size(got.memory), "as CUDA reports it"),
        Row(
            "weights",
            show_size(parts.total),
            f"{settings.quantisation_title}: {listed}; embeddings {show_size(parts.embeddings)} bfloat16",
        ),
        Row(
            "workspace",
            show_size(got.workspace),
            f"allowance for {settings.max_num_tokens:,} tokens, {settings.max_batch_size} sequences",
        ),
        Row("CUDA", show_size(got.reserve), "allowance for context, libraries, graphs, NCCL"),
        Row("room for KV", show_size(got.kv_room), f"{settings.memory_fraction:.0%} of the {show_size(got.free)} left"),
        Row("KV per token", show_size(got.kv_token), f"{share}, {settings.kv_dtype}"),
        Row("blocks that fit", f"{got.blocks:,}", f"of {show_size(got.block)}: {got.blocks * block_tokens:,} tokens"),
        Row("sequences that fit", f"{got.sequences:,}", f"of max_seq_len {settings.max_seq_len:,}"),
    )


def _moving(facts: ModelFacts, settings: TrtllmSettings, got: Fit, role: Role | None) -> tuple[Row, ...]:
    tokens = min(PREFIX, settings.max_seq_len)
    found = refetch(facts, settings, got.kv_token, tokens)
    fetch = Row(
        f"fetch {tokens:,} tokens",
        f"{found.here_s * 1e3:.0f} ms",
        f"estimate: {show_size(found.size)} a rank, pool to GPU; {found.away_s * 1e3:.0f} ms from another node",
    )
    if role == "decode":
        return (fetch,)
    ratio = found.compute_s / found.here_s
    again = Row(
        f"compute {tokens:,} tokens",
        f"{found.compute_s * 1e3:.0f} ms",
        f"estimate: {ratio:.1f} x the fetch"
        if ratio >= 1
        else f"estimate: cheaper than the fetch, which takes {1 / ratio:.1f} x as long",
    )
    return (fetch, again)


def _host(facts: ModelFacts, block: TrtllmSettings, host: HostTier, block_tokens: int) -> tuple[Row, ...]:
    node = block.node
    whole = facts.kv_layout(block_tokens, LAYOUT_DTYPE[block.kv_dtype])
    own = f"host_cache {show_size(node.host_cache)} of the node" if host.own else "off: host memory goes to the pool"
    return (
        Row("host tier per rank", show_size(host.pool), f"pool {show_size(node.pool)} / {host.ranks} ranks"),
        Row("TensorRT-LLM's own per rank", show_size(host.own), own),
        Row("pinned staging per rank", show_size(host.staging), "of the connector"),
        Row("in all", show_size(host.node_total), f"at most {show_size(host.limit)} of {show_size(node.memory)}"),
        Row("tokens in the node's pool", f"{node.pool // whole.block_size * block_tokens:,}", "all layers and heads"),
    )
