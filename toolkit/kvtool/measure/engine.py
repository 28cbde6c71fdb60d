"""One engine in one process, beside transformers and llama.cpp: prefill and decode speed, and what stability costs.

All contestants run in this process on the same number of threads, in turns (A B A B), so that whatever else the machine
does falls on each of them. A prefill is timed from token ids to KV; a decode step from token ids to logits, at a full
context that does not grow between samples. transformers runs as its users run it: bfloat16, SDPA, DynamicCache.
"""

from __future__ import annotations

import importlib.util
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvtool.engine.base import DecodeStep
from kvtool.engine.manifest import read_manifest
from kvtool.errors import Missing, Refused

if TYPE_CHECKING:
    from kvtool.engine.torch.engine import TorchEngine

PREFILL_TOKENS = (512, 2048)
DECODE_BATCHES = (1, 4, 16)
CONTEXT = 512
LLAMA_CPP_INSTALL = "pip install --no-binary llama-cpp-python llama-cpp-python"
PEERS = ("transformers", "llama.cpp")

Step = Callable[[], float]
"""Runs one decode step and returns its seconds."""
Tell = Callable[[str], None]


class Contestant(Protocol):
    name: str

    def prefill(self, tokens: Sequence[int]) -> float:
        """Seconds from token ids to their KV."""
        ...

    def decode(self, batch: int, tokens: Sequence[int]) -> Step | None:
        """A step for `batch` sequences that hold `tokens`; None if it cannot be had."""
        ...

    def rest(self) -> None:
        """Drop what the last `decode` holds."""
        ...


@dataclass(frozen=True)
class Row:
    """Samples of one measurement, in seconds, by contestant; taken in turns, so equal indices are neighbours."""

    what: str
    tokens: int
    """What one sample works on: prompt tokens, or sequences in the batch."""
    seconds: dict[str, list[float]]


def fixed_tokens(count: int, vocab: int) -> list[int]:
    """A prompt without repeats short enough to matter; the same on every run."""
    return [(at * 7919 + 17 * (at // 97)) % (vocab - 10) + 5 for at in range(count)]


def measure(
    directory: Path, against: Sequence[str], threads: int, rounds: int, tell: Tell
) -> tuple[list[Row], list[str]]:
    """All rows, and a sentence for each contestant that could not take part.

    Raises:
        EngineRefused: no torch engine in `directory`.
        Refused: `against` names something else than `PEERS`.
        Missing: transformers was asked for and is not installed.
    """
    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise Refused(f"--against: wanted {', '.join(PEERS)}, found {unknown[0]!r}")
    ours = Ours(directory, threads)
    contestants: list[Contestant] = [ours]
    absent: list[str] = []
    for name in against:
        tell(f"loading {name}")
        if name == "transformers":
            contestants.append(Transformers(directory))
        else:
            found = _llama_cpp(directory, threads)
            if isinstance(found, str):
                absent.append(found)
            else:
                contestants.append(found)
    rows = []
    vocab = ours.engine.vocab_size
    fitting = [count for count in PREFILL_TOKENS if count <= ours.engine.context_tokens_max]
    for count in fitting:
        tell(f"prefill of {count} tokens, {rounds} rounds")
        rows.append(_turns(f"prefill {count}", count, contestants, rounds, _prefill(fixed_tokens(count, vocab))))
    for batch in DECODE_BATCHES:
        tell(f"decode, batch of {batch}, {CONTEXT} tokens of context")
        rows.append(_decode_row(contestants, batch, fixed_tokens(CONTEXT, vocab), rounds * 4))
    for count in fitting:
        tell(f"attention over {count} tokens")
        rows.append(stability_row(ours.engine, count, rounds))
    return rows, absent


def _prefill(tokens: list[int]) -> Callable[[Contestant], Step]:
    def bind(contestant: Contestant) -> Step:
        return lambda: contestant.prefill(tokens)

    return bind


def _turns(
    what: str, tokens: int, contestants: Sequence[Contestant], rounds: int, bind: Callable[[Contestant], Step]
) -> Row:
    """`rounds` samples of each, in turns, after one of each that is thrown away."""
    steps = {contestant.name: bind(contestant) for contestant in contestants}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            took_s = step()
            if turn:
                seconds[name].append(took_s)
    return Row(what, tokens, seconds)


def _decode_row(contestants: Sequence[Contestant], batch: int, tokens: list[int], rounds: int) -> Row:
    ready = {c.name: step for c in contestants if (step := c.decode(batch, tokens)) is not None}
    taking_part = [c for c in contestants if c.name in ready]
    row = _turns(f"decode batch {batch}", batch, taking_part, rounds, lambda c: ready[c.name])
    for contestant in contestants:
        contestant.rest()
    return row


def stability_row(engine: TorchEngine, count: int, rounds: int) -> Row:
    """Prefill attention of one layer, in position-fixed tiles and as one unconstrained SDPA call."""
    import torch
    import torch.nn.functional as F

    family = engine.family
    with torch.inference_mode():
        sequence = engine.open(count)
        kv = torch.randn(2, family.kv_heads, count, family.head_dim).bfloat16()
        engine.memory.write(0, sequence.slots[:count], kv)
        queries = torch.randn(count, family.heads, family.head_dim).to(engine.dtype)

    def tiles() -> float:
        with torch.inference_mode():
            began_s = time.perf_counter()
            engine.attention.prefill(0, sequence, queries, 0, count)
            return time.perf_counter() - began_s

    def one_call() -> float:
        with torch.inference_mode():
            began_s = time.perf_counter()
            k, v = engine.memory.read(0, sequence, count).to(engine.dtype)[:, None].unbind(0)
            q = queries.transpose(0, 1)[None]
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(count, -1)
            return time.perf_counter() - began_s

    seconds: dict[str, list[float]] = {"kvtool": [], "one SDPA call": []}
    for turn in range(4 * rounds + 1):
        took = tiles(), one_call()
        if turn:
            for name, took_s in zip(seconds, took, strict=True):
                seconds[name].append(took_s)
    engine.close(sequence)
    return Row(f"attention {count}, one layer", count, seconds)


class Ours:
    name = "kvtool"

    def __init__(self, directory: Path, threads: int) -> None:
        from kvtool.engine.load import load_engine
        from kvtool.engine.torch.engine import TorchEngine

        step = read_manifest(directory).layout.block_tokens
        room = max(PREFILL_TOKENS[-1], DECODE_BATCHES[-1] * (CONTEXT + step))
        engine = load_engine(directory, threads=threads, blocks=-(-room // step) + 1)
        assert isinstance(engine, TorchEngine)
        self.engine = engine
        self._open: list[Any] = []

    def prefill(self, tokens: Sequence[int]) -> float:
        sequence = self.engine.open(len(tokens))
        began_s = time.perf_counter()
        self.engine.prefill(sequence, tokens, 0, len(tokens))
        took_s = time.perf_counter() - began_s
        self.engine.close(sequence)
        return took_s

    def decode(self, batch: int, tokens: Sequence[int]) -> Step:
        engine, count = self.engine, len(tokens)
        first = engine.open(count + 1)
        engine.prefill(first, tokens, 0, count)
        self._open = [first]
        raw = bytearray(engine.layout.block_size)
        for _ in range(batch - 1):
            other = engine.open(count + 1)
            for index in range(count // engine.layout.block_tokens):
                engine.export_block(first, index, memoryview(raw))
                engine.import_block(other, index, memoryview(raw))
            other.length = count
            self._open.append(other)
        steps = [DecodeStep(sequence, 7 + row, count) for row, sequence in enumerate(self._open)]

        def step() -> float:
            began_s = time.perf_counter()
            engine.decode(steps)
            return time.perf_counter() - began_s

        return step

    def rest(self) -> None:
        for sequence in self._open:
            self.engine.close(sequence)
        self._open = []


class Transformers:
    name = "transformers"

    def __init__(self, directory: Path) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise Missing(
                "--against transformers: the package transformers is not installed; run: pip install transformers"
            )
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        known = inspect.signature(self._model.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.2x

    def _run(self, ids: Any, cache: Any) -> float:
        with self._torch.inference_mode():
            began_s = time.perf_counter()
            self._model(ids, **{self._cache: cache}, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - began_s

    def prefill(self, tokens: Sequence[int]) -> float:
        from transformers import DynamicCache

        return self._run(self._torch.tensor([list(tokens)]), DynamicCache())

    def decode(self, batch: int, tokens: Sequence[int]) -> Step:
        from transformers import DynamicCache

        cache = DynamicCache()
        self._run(self._torch.tensor([list(tokens)]), cache)
        cache.batch_repeat_interleave(batch)
        ids = self._torch.arange(7, 7 + batch)[:, None]

        def step() -> float:
            took_s = self._run(ids, cache)
            cache.crop(-1)
            return took_s

        return step

    def rest(self) -> None:
        pass


class LlamaCpp:
    """The GGUF that the engine was built from, as shipped."""

    name = "llama.cpp"

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            str(path),
            n_ctx=PREFILL_TOKENS[-1] + 8,
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def prefill(self, tokens: Sequence[int]) -> float:
        self._llama.reset()
        began_s = time.perf_counter()
        self._llama.eval(list(tokens))
        return time.perf_counter() - began_s

    def decode(self, batch: int, tokens: Sequence[int]) -> Step | None:
        if batch > 1:
            return None  # its Python class evaluates one sequence
        self.prefill(tokens)

        def step() -> float:
            self._llama.n_tokens = len(tokens)
            began_s = time.perf_counter()
            self._llama.eval([7])
            return time.perf_counter() - began_s

        return step

    def rest(self) -> None:
        self._llama.reset()


def _llama_cpp(directory: Path, threads: int) -> LlamaCpp | str:
    """The contestant, or why it is left out."""
    from kvtool.engine.recipe import find_recipe

    if importlib.util.find_spec("llama_cpp") is None:
        return f"llama.cpp is left out: its Python package is not installed; build it with: {LLAMA_CPP_INSTALL}"
    name = read_manifest(directory).name
    recipe = find_recipe(name)
    if recipe is None:
        return f"llama.cpp is left out: {name} is no recipe, so the GGUF file that it was built from is not known"
    return LlamaCpp(recipe.source(), threads)
