"""Random work for an engine, and what must be true of it afterwards.

A run is drawn from one seed: set-up, prompts that share prefixes, tenants and adapters, when requests come, which are
cancelled or reset and when, when the engine forgets its own pages, and how late the device is. `play` checks every
answer against the model's, and prints the seed where one is wrong.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
import threading
from collections.abc import Callable
from typing import Any


def forget() -> None:
    """What was imported from a generated package, and the connector, which chose its base classes there."""
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorrt_llm" or name == "kvtool_trtllm.connector":
            del sys.modules[name]
    importlib.invalidate_caches()


def fake(name: str) -> Any:
    """A module behind the generated package that is on the path now."""
    return importlib.import_module(f"tensorrt_llm._fake.{name}")


def setup_of(rng: random.Random, *, v2: bool, tp: int = 1, **fixed: Any) -> Any:
    """A set-up for `tp` ranks; `fixed` fields are not drawn."""
    model, groups = fake("model"), ()
    layers = 4
    if v2 and rng.random() < 0.7:
        groups = (model.Group((0, 2)), model.Group((1, 3), window=rng.choice([9, 12])))
    size = fixed.pop("size", None) or rng.choice([4, 8])
    shape = {"layers": layers, "kv_heads": fixed.pop("kv_heads", 4), "groups": fixed.pop("groups", groups)}
    made = fake("executor").Setup(
        model.Model(block_tokens=size, **shape),
        v2=v2,
        split=rng.random() < 0.5,
        pages=rng.choice([28, 40, 64]) * 4 // size,
        batch=rng.choice([2, 4, 6]),
        chunk=rng.choice([None, size, 2 * size, 20]),
        graphs=rng.random() < 0.5,
        overlap=rng.random() < 0.5,
        keep=rng.choice([0.0, 0.5, 1.0]),
        evicting=v2 and rng.random() < 0.4,
        late_s=rng.choice([0.0, 0.0005]),
        seed=rng.randrange(1 << 30),
    )
    return dataclasses.replace(made, **fixed)


def requests_of(rng: random.Random, setup: Any, count: int, *, tenants: bool = True) -> list[Any]:
    """Prompts over a few shared prefixes, some of whole blocks, some not; equal ones among tenants and adapters."""
    given, model, size = fake("request").Given, setup.model, setup.model.block_tokens
    prefixes = [[rng.randrange(model.vocab_size) for _ in range(rng.choice([2, 3, 5]) * size)] for _ in range(3)]
    longest = min(9 * size, (setup.pages - 3) * size // 2)
    out: list[Any] = []
    for at in range(count):
        tokens = list(rng.choice(prefixes)) + [
            rng.randrange(model.vocab_size) for _ in range(rng.randrange(1, 2 * size + 2))
        ]
        if out and rng.random() < 0.3:
            again = rng.choice(out)  # the next turn: what was asked, what was answered, and more
            tokens = again.tokens + model.answer(again) + [rng.randrange(model.vocab_size) for _ in range(3)]
        if rng.random() < 0.2:  # the same blocks in another order
            tokens = tokens[size : 2 * size] + tokens[:size] + tokens[2 * size :]
        if rng.random() < 0.2:
            tokens = tokens[: len(tokens) // size * size]
        salt, lora = (rng.choice([None, None, "ann", "bob"]), rng.choice([None, None, 7])) if tenants else (None, None)
        most = rng.choice([1, 2, size, 2 * size + 1])
        one = given(at + 1, tokens[:longest], most, None, salt, lora)
        out.append(one if rng.random() < 0.7 else dataclasses.replace(one, end_id=rng.choice(model.answer(one))))
    return out


class Work:
    """What comes in: each request once, in the order and at the times that the seed draws."""

    def __init__(
        self, seed: int, requests: list[Any], *, cancels: float = 0.15, drops: float = 0.05, rush: float = 0.4
    ) -> None:
        self.rng = random.Random(seed)
        self.left = list(requests)
        self.cancels, self.drops, self.rush = cancels, drops, rush
        self.given: dict[int, Any] = {}
        self.cancelled: set[int] = set()

    def __call__(self, executor: Any) -> Any:
        rng, submit = self.rng, []
        while self.left and rng.random() < self.rush:
            submit.append(self.left.pop(0))
            self.given[submit[-1].request_id] = submit[-1]
        alive = [state for state in (*executor.active, *executor.waiting) if not state.cancelled]
        cancel = [s.request_id for s in alive if rng.random() < self.cancels * self._danger(s)]
        self.cancelled.update(cancel)
        reset = [s.request_id for s in alive if executor.setup.evicting and rng.random() < 0.03]
        return fake("executor").Commands(
            tuple(submit), tuple(cancel), tuple(reset), drop=rng.random() < self.drops, stop=not self.left
        )

    def _danger(self, state: Any) -> float:
        """Loading is where a cancellation hurts most; it must not be the end of every request."""
        return {"DISAGG_GENERATION_TRANS_IN_PROGRESS": 0.5, "CONTEXT_INIT": 0.2}.get(state.state.name, 0.05)


@dataclasses.dataclass
class Played:
    executors: list[Any]
    work: Any
    answers: dict[int, list[int]]

    @property
    def stats(self) -> dict[str, int]:
        return dict(self.executors[0].stats)


def play(setup: Any, work: Any, connector: Any, *, tp: int = 1, llm_args: Any = None, what: str = "") -> Played:
    """Run `work` on `tp` ranks, threads of this process; every answer must be the model's."""
    ranks, executor = fake("ranks"), fake("executor")
    every = ranks.threaded(tp) if tp > 1 else [ranks.alone()]
    made: list[Any] = [None] * tp
    errors: list[BaseException] = []

    def one(rank: Any) -> None:
        try:
            own = connector(rank.rank) if callable(connector) else connector
            made[rank.rank] = executor.Executor(setup, work, rank=rank, connector=own, llm_args=llm_args)
            made[rank.rank].run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    alive = [thread for thread in threads if thread.is_alive()]
    for ended in made:
        if ended is not None and not alive:
            ended.close()
    assert not alive, f"{what}: a rank hangs"
    broken = sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if broken:
        raise broken[0]
    check(setup, work, made, what)
    return Played(made, work, {one: done.tokens for one, done in made[0].done.items()})


def check(setup: Any, work: Any, executors: list[Any], what: str) -> None:
    wrong = [line for one in executors for line in one.wrong]
    assert not wrong, f"{what}: {len(wrong)} wrong reads, first: {wrong[0]}"
    for request_id, given in work.given.items():
        right, done = setup.model.answer(given), executors[0].done[request_id]
        assert all(one.done[request_id].tokens == done.tokens for one in executors), f"{what}: ranks differ"
        if done.reason.name == "CANCELLED":
            assert request_id in work.cancelled, f"{what}: request {request_id} was cancelled by nobody"
            assert done.tokens == right[: len(done.tokens)], f"{what}: request {request_id}, before it was cancelled"
        else:
            assert done.tokens == right, f"{what}: request {request_id} got {done.tokens}, wanted {right}"


def replayed(test: Callable[..., Any], seed: int, *args: Any) -> Any:
    """`test(seed, ...)`; its seed is in the error."""
    try:
        return test(seed, *args)
    except BaseException as error:
        error.args = (f"seed {seed}: {error}",)
        raise
