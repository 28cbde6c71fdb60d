"""What fits: bytes on each GPU for weights, workspace and KV blocks, and what is refused because it does not.

Pure arithmetic over a model's facts, a recipe's block and the GPU table; all sizes are bytes on one rank. Weights and
KV are exact up to padding. Workspace and the reserve are allowances: TensorRT-LLM measures its own by a forward pass at
start and gives KV the rest, so its log has the last word.

    memory of the GPU
      - RESERVE (CUDA context, libraries, CUDA graphs), RESERVE_LINK more where ranks talk
      - weights / tensor_parallel, with what every rank holds whole
      - workspace of a forward pass of max_num_tokens
      = free, and x memory_fraction: the room for KV blocks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kvtool.engine.facts import ModelFacts, count
from kvtool.engine.trtllm.gpus import GPUS, Gpu, gpu
from kvtool.engine.trtllm.settings import LAYOUT_DTYPE, Quantisation, TrtllmSettings
from kvtool.errors import EngineRefused
from kvtool.kv.layout import KVLayout
from kvtool.units import show_size

GIB = 1 << 30
RESERVE = 2 * GIB
RESERVE_LINK = GIB
"""NCCL's buffers and those of the custom all-reduce, on each of several ranks."""

WEIGHT_BITS: dict[Quantisation, tuple[int, int]] = {
    "none": (16, 1),
    "fp8": (8, 1),
    "fp8_block_scales": (8 * 128 * 128 + 32, 128 * 128),
    "w4a16_awq": (4 * 128 + 16, 128),
    "nvfp4": (4 * 16 + 8, 16),
}
"""Bits of so many values of a linear weight, scales included."""
GROUP: dict[Quantisation, int] = {"fp8_block_scales": 128, "w4a16_awq": 128, "nvfp4": 16}
"""Values that share a scale: a rank's part of a weight is a whole number of groups wide."""
SM_MIN: dict[Quantisation, int] = {"none": 80, "fp8": 89, "fp8_block_scales": 90, "w4a16_awq": 80, "nvfp4": 100}
SM_MIN_FP8_KV = 89
ADVISED_SEQUENCES = 4
"""What holds fewer runs, but is not what a refusal recommends."""


@dataclass(frozen=True)
class Weights:
    """Bytes on one rank."""

    embeddings: int
    attention: int
    mlp: int
    experts: int
    other: int

    @property
    def total(self) -> int:
        return self.embeddings + self.attention + self.mlp + self.experts + self.other


@dataclass(frozen=True)
class Fit:
    """What one rank of an engine holds. Every field in bytes but the counts."""

    memory: int
    reserve: int
    weights: Weights
    workspace: int
    free: int
    """What those leave; negative where they alone are too much."""
    kv_room: int
    kv_token: int
    """KV of one token on this rank."""
    block: int
    """KV of one block on this rank."""
    blocks: int
    sequences: int
    """Of max_seq_len, at once."""


def weights_size(facts: ModelFacts, quantisation: Quantisation, tensor_parallel: int, stages: int = 1) -> Weights:
    """Linear weights are quantised and split; embeddings (2 bytes a value) are split by vocabulary; norms and routers
    (2 bytes) are whole on every rank. KV projections are split no further than there are KV heads. Experts are split
    over all ranks, whole or in parts, which is the same number of bytes. `stages`: of a pipeline; the largest, with the
    embeddings, is what counts."""
    counted, tp = count(facts), tensor_parallel
    kv_parts = tp if facts.latent else min(tp, facts.kv_heads)

    def stage(values: int) -> int:
        return _up(values * _up(facts.layers, stages), facts.layers)

    attention = _up(counted.q_out, tp) + _up(counted.kv, kv_parts) + counted.attention_shared
    return Weights(
        embeddings=2 * _up(facts.vocab, tp) * facts.hidden * (1 if facts.tied or stages > 1 else 2),
        attention=_linear(stage(attention), quantisation),
        mlp=_linear(stage(_up(counted.mlp, tp)), quantisation),
        experts=_linear(stage(_up(counted.experts, tp)), quantisation),
        other=2 * stage(counted.other),
    )


def rank_layout(facts: ModelFacts, kv_dtype: str, tensor_parallel: int, block_tokens: int, stages: int = 1) -> KVLayout:
    """A block as one rank holds it: kv_heads / tensor_parallel heads, at least one; MLA's latent whole on each; the
    layers of a pipeline's largest stage."""
    whole = facts.kv_layout(block_tokens, LAYOUT_DTYPE[kv_dtype])
    heads, layers = max(1, whole.kv_heads // tensor_parallel), _up(whole.layers, stages)
    return KVLayout(layers, heads, whole.head_dim, block_tokens, whole.dtype, kv_factor=whole.kv_factor)


def workspace_size(facts: ModelFacts, settings: TrtllmSettings) -> int:
    """Activations at the widest point of a forward pass, and logits: an allowance.

    A token has, in values of 2 bytes, its residual and normed state (2 x hidden), q, k, v and the attention's output
    of this rank's heads, and the MLP's gate, up and product (3 x width / tensor_parallel); with experts, instead, a
    copy for each active one in and out (2 x hidden) with its three intermediates. A quarter is added for what the
    allocator cannot use. Logits are float32, of each sequence, twice (as computed and as sampled).
    """
    tp, moe = settings.tensor_parallel, facts.experts
    q_heads, kv_heads = _up(facts.heads, tp), max(1, facts.kv_heads // tp)
    values = 2 * facts.hidden + (2 * q_heads + 2 * kv_heads) * facts.head_dim
    dense = 3 * _up(facts.intermediate, tp)
    if moe:
        split = tp // settings.expert_parallel
        active = _up(moe.active, settings.expert_parallel)
        sparse = active * (2 * facts.hidden + 3 * _up(moe.intermediate, split)) + 3 * moe.shared * moe.intermediate
        dense = max(dense if moe.dense_layers else 0, sparse)
    tokens = 2 * (values + dense) * settings.max_num_tokens * 5 // 4
    return tokens + 2 * 4 * facts.vocab * settings.max_batch_size


def fit(facts: ModelFacts, settings: TrtllmSettings, block_tokens: int) -> Fit:
    """What one rank holds, whether or not that is enough; `check` refuses.

    Raises:
        EngineRefused: a GPU that is not in the table.
    """
    tp, card = settings.tensor_parallel, gpu(settings.gpu)
    weights = weights_size(facts, settings.quantisation, tp, settings.pipeline_parallel)
    reserve = RESERVE + (RESERVE_LINK if settings.world_size > 1 else 0)
    workspace = workspace_size(facts, settings)
    free = card.memory - reserve - weights.total - workspace
    room = int(max(0, free) * settings.memory_fraction)
    layout = rank_layout(facts, settings.kv_dtype, tp, block_tokens, settings.pipeline_parallel)
    blocks = room // layout.block_size
    return Fit(
        memory=card.memory,
        reserve=reserve,
        weights=weights,
        workspace=workspace,
        free=free,
        kv_room=room,
        kv_token=layout.token_size,
        block=layout.block_size,
        blocks=blocks,
        sequences=blocks // _up(settings.max_seq_len, block_tokens),
    )


def check(facts: ModelFacts, settings: TrtllmSettings, block_tokens: int, where: str) -> Fit:
    """`fit`, refused where it cannot run. `where` names model and role in errors.

    Raises:
        EngineRefused: the GPU cannot compute it, it cannot be split so, its weights do not fit, or the KV blocks that
            fit do not hold one sequence of max_seq_len; with what would.
    """
    check_spread(facts, settings, where)
    got, title = fit(facts, settings, block_tokens), gpu(settings.gpu).title
    if got.free <= 0:
        raise EngineRefused(
            f"{where} on {settings.world_size} x {title}: each rank needs {show_size(got.weights.total)} for "
            f"weights ({settings.quantisation_title}), {show_size(got.workspace)} of workspace and "
            f"{show_size(got.reserve)} for CUDA, of {show_size(got.memory)} there are; "
            f"{advice(facts, settings, block_tokens)}"
        )
    if got.sequences < 1:
        need = _up(settings.max_seq_len, block_tokens)
        raise EngineRefused(
            f"{where} on {settings.world_size} x {title}: {got.blocks} KV blocks of {show_size(got.block)} fit "
            f"({show_size(got.kv_room)}), one sequence of max_seq_len {settings.max_seq_len} needs {need}; lower "
            f"max_seq_len to {max(0, got.blocks * block_tokens)}, or {advice(facts, settings, block_tokens)}"
        )
    return got


def check_spread(facts: ModelFacts, settings: TrtllmSettings, where: str) -> None:
    """Whether the GPU computes in this quantisation, and the model can be split over so many ranks.

    Raises:
        EngineRefused: it cannot; with the GPU or width that can.
    """
    card = gpu(settings.gpu)
    if card.sm < SM_MIN[settings.quantisation] or (settings.quantisation == "nvfp4" and not card.nvfp4):
        able = [one.name for one in GPUS.values() if one.sm >= SM_MIN[settings.quantisation]]
        raise EngineRefused(
            f"{where}: quantisation {settings.quantisation}: {card.title} ({card.arch}) does not compute it; use "
            f"{' or '.join(able)}, or another quantisation"
        )
    if settings.kv_dtype == "fp8" and card.sm < SM_MIN_FP8_KV:
        raise EngineRefused(f"{where}: kv_dtype fp8: {card.title} ({card.arch}) has no FP8; use kv_dtype bfloat16")
    if settings.context_parallel > 1:
        raise EngineRefused(
            f"{where}: context_parallel {settings.context_parallel}: kvtool does not work out what fits then; use 1"
        )
    for sentence in unsplit(facts, settings.quantisation, settings.tensor_parallel, settings.expert_parallel):
        raise EngineRefused(f"{where}: {sentence}")


def unsplit(facts: ModelFacts, quantisation: Quantisation, tp: int, ep: int) -> list[str]:
    """Why the model cannot be split over `tp` ranks in groups of `ep`; empty where it can."""
    found, moe, kv = [], facts.experts, facts.kv_heads
    if facts.heads % tp:
        found.append(f"tensor_parallel {tp}: {facts.heads} query heads cannot be split so; use {_widths(facts.heads)}")
    if not facts.latent and kv % tp and tp % kv:
        found.append(f"tensor_parallel {tp}: {kv} KV heads can be neither split nor copied evenly; use {_widths(kv)}")
    if moe is None:
        if ep != 1:
            found.append(f"expert_parallel {ep}: {facts.architecture} has no experts; leave it out")
    elif tp % ep or moe.count % ep:
        found.append(f"expert_parallel {ep}: wanted a divisor of tensor_parallel {tp} and of {moe.count} experts")
    if found:
        return found
    widths = {"experts' intermediate": (moe.intermediate, tp // ep)} if moe else {}
    if not moe or moe.dense_layers:
        widths["intermediate"] = (facts.intermediate, tp)
    for name, (width, parts) in widths.items():
        group = GROUP.get(quantisation, 1)
        if width % (parts * group):
            found.append(
                f"tensor_parallel {tp}, expert_parallel {ep}: {name} {width} does not split into {parts} parts of "
                f"whole groups of {group} ({quantisation})" + ("; use a larger expert_parallel" if moe else "")
            )
    return found


def advice(facts: ModelFacts, settings: TrtllmSettings, block_tokens: int) -> str:
    """What would fit: more ranks; or with fewer of them a smaller quantisation, or another GPU. The least of each."""
    kinds: dict[str, TrtllmSettings] = {}
    for kind, tried in _changes(facts, settings):
        narrower = "tensor_parallel" not in kinds or tried.tensor_parallel < kinds["tensor_parallel"].tensor_parallel
        if kind not in kinds and narrower and _serves(facts, tried, block_tokens):
            kinds[kind] = tried
    said = []
    for kind, tried in kinds.items():
        keys = dict.fromkeys((kind, "tensor_parallel", "expert_parallel"))
        changed = [f"{key} {getattr(tried, key)}" for key in keys if getattr(tried, key) != getattr(settings, key)]
        said.append(" and ".join(changed))
    return "use " + ", or ".join(said) if said else "no width of up to 16 ranks in the table holds it"


def _serves(facts: ModelFacts, tried: TrtllmSettings, block_tokens: int) -> bool:
    cannot = unsplit(facts, tried.quantisation, tried.tensor_parallel, tried.expert_parallel)
    return not cannot and fit(facts, tried, block_tokens).sequences >= ADVISED_SEQUENCES


def _changes(facts: ModelFacts, settings: TrtllmSettings) -> Iterator[tuple[str, TrtllmSettings]]:
    """What could be changed, by kind, from the nearest on."""
    card, tp = gpu(settings.gpu), settings.tensor_parallel
    wider = [n for n in (2, 4, 8, 16) if n > tp]

    def over(n: int, **change: object) -> TrtllmSettings:
        experts = {"expert_parallel": n} if facts.experts and settings.expert_parallel > 1 else {}
        return settings.model_copy(update={"tensor_parallel": n, **experts, **change})

    for n in wider:
        yield "tensor_parallel", over(n)
    if settings.quantisation == "none":
        for n in (tp, *wider):
            yield "quantisation", over(n, quantisation="fp8" if card.fp8_flops else "w4a16_awq")
    larger = [one.name for one in sorted(GPUS.values(), key=lambda one: one.memory) if _replaces(one, card, settings)]
    for n, name in product((tp, *wider), larger):
        yield "gpu", over(n, gpu=name)


def _replaces(one: Gpu, card: Gpu, settings: TrtllmSettings) -> bool:
    return one.memory > card.memory and one.sm >= max(SM_MIN[settings.quantisation], card.sm)


def _linear(values: int, quantisation: Quantisation) -> int:
    bits, group = WEIGHT_BITS[quantisation]
    return _up(values * bits, 8 * group)


def _widths(heads: int) -> str:
    return ", ".join(str(n) for n in (1, 2, 4, 8, 16) if heads % n == 0)


def _up(amount: int, parts: int) -> int:
    return -(-amount // parts)
