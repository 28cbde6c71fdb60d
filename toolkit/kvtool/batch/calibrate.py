"""How fast this machine is with this engine: a few seconds of prefill and batched decoding, before a job is planned."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from kvtool.batch.order import Plan
from kvtool.engine.base import DecodeStep
from kvtool.engine.load import load_engine
from kvtool.engine.manifest import read_manifest

_PROMPT, _STEPS = 512, 6
_AWARE = 100
"""A token id that every vocabulary has, and that means nothing here."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second: of one prompt, and of a full batch together."""

    prefill: float
    decode: float


def calibrate(engine_dir: Path, threads: int, slots: int) -> Speed:
    """
    Raises:
        EngineRefused: no engine there that this machine can serve.
    """
    manifest = read_manifest(engine_dir)
    block = manifest.kv.block_tokens
    prompt = min(_PROMPT, (manifest.context_tokens_max - _STEPS - 1) // block * block)
    blocks = slots * -(-(prompt + _STEPS + 1) // block)
    engine = load_engine(engine_dir, threads=threads, blocks=blocks, prompt_threads=threads)
    tokens = [_AWARE] * prompt
    sequences = [engine.open(prompt + _STEPS + 1) for _ in range(slots)]
    engine.prefill(sequences[0], tokens, 0, block)  # the first call warms up
    began_s = time.perf_counter()
    engine.prefill(sequences[0], tokens, 0, prompt)
    prefill_s = time.perf_counter() - began_s
    buffer = memoryview(bytearray(engine.layout.block_size))
    for sequence in sequences[1:]:
        for index in range(prompt // block):
            engine.export_block(sequences[0], index, buffer)
            engine.import_block(sequence, index, buffer)
        sequence.length = prompt
    engine.decode([DecodeStep(sequence, _AWARE, prompt) for sequence in sequences])
    began_s = time.perf_counter()
    for step in range(1, _STEPS):
        engine.decode([DecodeStep(sequence, _AWARE, prompt + step) for sequence in sequences])
    decode_s = time.perf_counter() - began_s
    for sequence in sequences:
        engine.close(sequence)
    return Speed(prompt / prefill_s, slots * (_STEPS - 1) / decode_s)


def estimate_s(plan: Plan, speed: Speed) -> float:
    """At most: requests may end before they have generated all that they may."""
    return (plan.tokens_in - plan.reused) / speed.prefill + plan.tokens_out_max / speed.decode
