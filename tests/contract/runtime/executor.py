"""The executor: batches, pages and requests of one rank, and the connector's callbacks in their recorded order.

Every rank runs the same loop over the same commands, which rank 0 takes from its source and broadcasts. The order of an
iteration is that of `_executor_loop` and `_executor_loop_overlap`: schedule, prepare (match, allocate, scheduler
output), park what loads, metadata, start_load_kv, forward, tokens (of this pass, or of the one before), cancelled,
finished, get_finished. Where several orders are legal, the seed draws one.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from .forward import Forward, Item, Known
from .layout import KvCacheLayout
from .manager import ContractBroken, KvCacheConnectorManager, build, rule
from .model import Model
from .pages import Memory, Pages
from .ranks import Rank, alone, enter
from .request import FinishReason, Given, LlmRequestState, State
from .schema import RELEASE
from .stream import Stream

STUCK_S = 20.0
_WAITING, _RUNNING = LlmRequestState.CONTEXT_INIT, LlmRequestState.GENERATION_IN_PROGRESS
_LOADING = LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS


@dataclass(frozen=True)
class Setup:
    """`graphs`: passes without prompts run as one, without layer hooks. `keep`: how likely a finished request's pages
    stay for reuse. `evicting`: pages are promised to nobody, and requests are reset when they run out (V2 only)."""

    model: Model
    v2: bool = False
    split: bool = False
    pages: int = 48
    batch: int = 4
    chunk: int | None = None
    """Most tokens of prompts a pass; None: whole prompts."""
    graphs: bool = False
    hooked: tuple[int, ...] | None = None
    """Layers whose hooks run in an eager pass: others are pieces of CUDA graphs. None: all."""
    overlap: bool = False
    evicting: bool = False
    keep: float = 1.0
    late_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Commands:
    """Of one iteration. `reset`: requests to preempt (evicting set-ups only); `drop`: forget pages kept for reuse."""

    submit: tuple[Given, ...] = ()
    cancel: tuple[int, ...] = ()
    reset: tuple[int, ...] = ()
    drop: bool = False
    stop: bool = False


@dataclass
class Done:
    tokens: list[int]
    reason: FinishReason
    error: str | None = None
    matched: int = 0
    reused: int = 0


class Executor:
    """`connector`: (worker class, scheduler class) or None. `source(executor)`: commands, asked on rank 0.

    `on_token(state, token)` and `on_done(state)` are called on every rank, in the executor's thread.
    """

    def __init__(
        self,
        setup: Setup,
        source: Callable[[Executor], Commands],
        *,
        rank: Rank | None = None,
        connector: tuple[Any, Any] | None = None,
        llm_args: Any = None,
        stream: Any = None,
        on_token: Callable[[State, int], None] | None = None,
        on_done: Callable[[State], None] | None = None,
    ) -> None:
        self.setup, self.source, self.rank = setup, source, rank or alone()
        enter(self.rank)
        self.random = random.Random(setup.seed)
        self.model = setup.model
        self.heads = self.model.heads(self.rank.rank, self.rank.size)
        groups = self.model.layer_groups
        assert setup.v2 or len(groups) == 1, "several layer groups need the V2 cache manager"
        self.memories = [
            Memory(self.model, group, len(self.heads), setup.pages, v2=setup.v2, split=setup.split) for group in groups
        ]
        self.pages = [Pages(setup.pages, setup.seed * 31 + at) for at in range(len(groups))]
        self.stream = stream or Stream(setup.seed * 17 + self.rank.rank, setup.late_s)
        self.known: dict[int, Known] = {}
        self.waiting: list[State] = []
        self.active: list[State] = []
        self.held: dict[int, list[list[int]]] = {}
        """Pages of finished requests that are saved still."""
        self.done: dict[int, Done] = {}
        self.stats: dict[str, int] = {}
        self.wrong: list[str] = []
        self.iterations = 0
        self.previous: tuple[Forward, list[Item]] | None = None
        self.on_token, self.on_done = on_token or (lambda state, token: None), on_done or (lambda state: None)
        self.manager: KvCacheConnectorManager | None = None
        self.forward_callable: Callable[[], None] | None = None
        if connector is not None:
            try:
                self._connect(connector, llm_args)
            except BaseException:
                self.rank.host.abort()
                self.close()
                raise

    def _connect(self, connector: tuple[Any, Any], llm_args: Any) -> None:
        worker, scheduler = build(self.rank, *connector, llm_args)
        self.manager = KvCacheConnectorManager(self.rank, worker, scheduler)
        self.forward_callable = worker.register_forward_pass_callable()
        rule(
            self.forward_callable is None or callable(self.forward_callable),
            "register_forward_pass_callable must return a callable",
        )
        if self.setup.v2:
            groups = tuple(memory.layout(at) for at, memory in enumerate(self.memories))
            worker.register_kv_cache_layout(KvCacheLayout(self.model.block_tokens, groups))
        else:
            worker.register_kv_caches(self.memories[0].tensor())
        if RELEASE >= (1, 3) and scheduler is not None:
            scheduler.wait_for_initialization()
        self.rank.host.barrier()

    # the loop

    def run(self) -> None:
        """Until a command says stop and nothing is left. Raises what a broken contract raised."""
        try:
            self._run()
        except BaseException:
            self.rank.host.abort()
            self.rank.device.abort()
            raise

    def _run(self) -> None:
        stopping, moved_s, mark = False, time.monotonic(), None
        while True:
            commands = self.rank.host.bcast(self.source(self) if self.rank.rank == 0 else None)
            stopping = stopping or commands.stop
            self._obey(commands)
            self.step(commands)
            outstanding = self.manager.outstanding() if self.manager else []
            here = stopping and not (self.waiting or self.active or self.held or self.previous or outstanding)
            if all(self.rank.host.allgather(here)):
                break
            made = sum(state.made + state.position for state in self.active)
            now = (len(self.done), len(self.active), len(self.waiting), made, len(self.held))
            if now != mark or not (self.active or self.held or self.waiting):
                mark, moved_s = now, time.monotonic()
            rule(time.monotonic() - moved_s < STUCK_S, f"nothing moved for {STUCK_S:.0f} s: {self._where()}")
        self.stream.synchronize()
        self._audit()

    def _where(self) -> str:
        states = [f"{state.request_id} {state.state.name}" for state in (*self.active, *self.waiting)]
        outstanding = self.manager.outstanding() if self.manager else []
        return f"requests {states}, pages held for saves of {sorted(self.held)}, not reported {outstanding}"

    def _obey(self, commands: Commands) -> None:
        for given in commands.submit:
            tokens = [*given.tokens, *given.first_tokens]
            self.waiting.append(State(given, tokens, len(given.tokens), device=list(tokens)))
        if commands.drop:
            for pages in self.pages:
                pages.forget_all()

    def step(self, commands: Commands) -> None:
        for one in commands.reset:
            state = next((state for state in self.active if state.request_id == one), None)
            if state is not None and state.added and state.state in (_WAITING, _RUNNING):
                self._settle()
                if state in self.active:
                    self._reset(state)
        contexts, generations = self._schedule()
        items = self._prepare(contexts, generations)
        if items is not None:
            self._forward(items)
        elif self.previous is not None:
            self._settle()
        self._cancel(commands.cancel)
        self._finish()
        if self.manager is not None:
            self._get_finished()
        if items is None and (self.active or self.held):
            time.sleep(0.0005)  # the real loop spins here
        self.iterations += 1

    # scheduling and allocation

    def _schedule(self) -> tuple[list[State], list[State]]:
        """Contexts with their chunk set, and generations."""
        generations = [s for s in self.active if s.state is _RUNNING and self._wants(s)]
        contexts = [s for s in self.active if s.state is _WAITING and s.remaining > 0]
        busy = len(self.active)
        while self.waiting and busy < self.setup.batch and self._fits(self.waiting[0]):
            state = self.waiting.pop(0)
            self.active.append(state)
            busy += 1
            if state.given.kind == "generation_only":
                self._take_over(state)
            else:
                contexts.append(state)
        left = self.setup.chunk or 10**9
        scheduled = []
        for state in contexts:
            size = self.model.block_tokens
            chunk = min(state.remaining, left)
            if chunk < state.remaining:
                chunk -= (state.position + chunk) % size  # all chunks but the last end with a block
            if chunk <= 0:
                continue
            state.chunk, left = chunk, left - chunk
            scheduled.append(state)
        return scheduled, generations

    def _wants(self, state: State) -> bool:
        return state.made + state.pending < state.given.max_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.model.block_tokens)

    def _fits(self, state: State) -> bool:
        """Whether pages are there for it to the end, beside what others were promised; evicting: for its prompt."""
        whole = self._blocks(state.prompt_len + state.given.max_tokens)
        promised = sum(
            max(0, self._blocks(s.prompt_len + s.given.max_tokens) - len(s.pages[0] if s.pages else ()))
            for s in self.active
        )
        if self.setup.evicting:
            whole, promised = self._blocks(state.prompt_len + 1), 0
        room = min(pages.room for pages in self.pages)
        if whole > self.setup.pages:
            raise ContractBroken(f"request {state.request_id} needs {whole} pages of {self.setup.pages}")
        return whole + promised <= room

    def _prepare(self, contexts: list[State], generations: list[State]) -> list[Item] | None:
        """Allocation, scheduler output, metadata, loads; the items of the pass, None where nothing is queued."""
        if not contexts and not generations:
            return None
        if self.setup.evicting:  # the V2 scheduler serves running requests first
            generations = self._grown(generations)
            contexts = [state for state in contexts if state in self.active]
        contexts = [state for state in contexts if state.added or self._add(state)]
        if not self.setup.evicting:
            generations = self._grown(generations)
        if not contexts and not generations:
            return None
        if self.manager is not None:
            output = self._output(contexts, generations)
            contexts = self.manager.park(contexts)
            self.manager.bind(output)
        self._poison()
        if self.manager is not None:
            manager = self.manager
            manager.call("start_load_kv", lambda: manager.worker.start_load_kv(self.stream))
        items = [
            Item(s, s.position, s.position + s.chunk, self._copied(s), s.position + s.chunk == s.prompt_len)
            for s in contexts
        ]
        for state in generations:
            at = len(state.tokens) + state.pending - 1
            items.append(Item(state, at, at + 1, self._copied(state), True))
        return items or None

    def _copied(self, state: State) -> list[list[int]]:
        return [list(pages) for pages in state.pages]

    def _key(self, state: State, blocks: int) -> bytes:
        """What the engine's own reuse goes by: tokens, salt, adapter, images."""
        what = (
            state.tokens[: blocks * self.model.block_tokens],
            state.given.salt,
            state.given.lora,
            state.given.multimodal,
        )
        return blake3(repr(what).encode()).digest()

    def _first_block(self, window: int | None, position: int) -> int:
        """The first block that a query at `position` reads."""
        return 0 if window is None else max(0, position - window + 1) // self.model.block_tokens

    def _reusable(self, state: State) -> int:
        """Leading blocks that are in memory, in every group as far as its window goes; one token is left."""
        best = 0
        for blocks in range(1, (state.prompt_len - 1) // self.model.block_tokens + 1):
            keys = [self._key(state, block + 1) for block in range(blocks)]
            whole = all(
                all(
                    key in pages.kept
                    for key in keys[self._first_block(memory.group.window, blocks * self.model.block_tokens) :]
                )
                for memory, pages in zip(self.memories, self.pages, strict=True)
            )
            best = blocks if whole else best
        return best

    def _add(self, state: State) -> bool:
        """add_sequence: reuse, ask the connector, allocate. False where no page is left (evicting only)."""
        size, reused = self.model.block_tokens, self._reusable(state)
        total = self._blocks(state.prompt_len)
        state.pages = [[] for _ in self.memories]
        keys = [self._key(state, block + 1) for block in range(reused)]
        for memory, pages, held in zip(self.memories, self.pages, state.pages, strict=True):
            first = self._first_block(memory.group.window, reused * size)
            held.extend(-1 if block < first else self._shared(pages, keys[block]) for block in range(reused))
        if min(pages.room for pages in self.pages) < total - reused:
            self._drop_pages(state)
            self.active.remove(state)
            self.waiting.insert(0, state)
            return False
        matched = 0
        if self.manager is not None:
            matched = self.manager.get_num_new_matched_tokens(state, reused * size, v2=self.setup.v2)
        state.position = state.prepopulated = reused * size + matched
        self._count(state, matched, reused * size)
        if self.setup.chunk and state.chunk < state.prompt_len:
            end = (state.position + state.chunk) // size * size
            if end < state.prompt_len:
                state.chunk = max(end - state.position, 0) or min(size, state.remaining)
            else:
                state.chunk = state.remaining
        state.chunk = min(state.chunk, state.remaining)
        for memory, pages, held in zip(self.memories, self.pages, state.pages, strict=True):
            first = self._first_block(memory.group.window, state.position)
            for block in range(reused, total):
                held.append(-1 if block < first else self._taken(pages, memory))
        state.added = True
        if self.manager is not None:
            self.manager.update_state_after_alloc(state, self._copied(state), by_group=len(self.memories) > 1)
        return True

    def _count(self, state: State, matched: int, reused: int) -> None:
        for name, value in (("matched", matched), ("reused", reused), ("admitted", 1)):
            self.stats[name] = self.stats.get(name, 0) + value
        state.cached_blocks = (matched + reused) // self.model.block_tokens

    def _shared(self, pages: Pages, key: bytes) -> int:
        page = pages.share(key)
        assert page is not None
        return page

    def _taken(self, pages: Pages, memory: Memory) -> int:
        page = pages.take()
        assert page is not None, "pages were counted before"
        if page in pages.clean:
            pages.clean.discard(page)
            self.stream.enqueue(lambda: self._still_poisoned(memory, page))
        return page

    def _still_poisoned(self, memory: Memory, page: int) -> None:
        if not memory.poisoned(page):
            self.wrong.append(f"rank {self.rank.rank}: page {page} was written to after it was given back")

    def _grown(self, generations: list[State]) -> list[State]:
        grown = [state for state in generations if self._grow(state)]
        unfinished = [s for s in grown if s.finished is FinishReason.NOT_FINISHED and self._wants(s)]
        return [state for state in unfinished if state in self.active]  # one that grew may have been reset for another

    def _grow(self, state: State) -> bool:
        """A page for the next token where a block edge is passed; evicting: by resetting a later request."""
        need = self._blocks(len(state.tokens) + state.pending)
        if state not in self.active or state.state is not _RUNNING:
            return False
        while len(state.pages[0]) < need:
            if min(pages.room for pages in self.pages) < 1:
                assert self.setup.evicting, "pages were promised"
                self._settle()
                victims = [s for s in self.active if s.added and s.state in (_WAITING, _RUNNING)]
                self._reset(victims[-1])
                if state not in self.active or not self._wants(state):
                    return False
                continue
            for memory, pages, held in zip(self.memories, self.pages, state.pages, strict=True):
                held.append(self._taken(pages, memory))
        return True

    def _poison(self) -> None:
        """Pages given back since the last metadata: from here on anything may be in them."""
        for memory, pages in zip(self.memories, self.pages, strict=True):
            dirty, pages.dirty = pages.dirty, []
            pages.clean.update(page for page in dirty if page not in pages.refs)
            if dirty:
                self.stream.enqueue(lambda memory=memory, dirty=dirty: [memory.poison(page) for page in dirty])

    def _drop_pages(self, state: State) -> None:
        self._give_back(state.pages)
        state.pages = []

    def _give_back(self, held: list[list[int]]) -> None:
        for pages, ids in zip(self.pages, held, strict=True):
            for page in ids:
                if page >= 0:
                    pages.give_back(page)

    # what the connector is told

    def _output(self, contexts: list[State], generations: list[State]) -> Any:
        from .connector import SchedulerOutput

        assert self.manager is not None
        output = SchedulerOutput()
        for state in contexts:
            if state.request_id in self.manager.new_loading:
                continue
            fresh = state.told == 0 and not state.reported
            data = self._data(state, context=True)
            data.computed_position -= self.manager.matched.get(state.request_id, 0)
            (output.new_requests if fresh else output.cached_requests).append(data)
        output.cached_requests.extend(self._data(state, context=False) for state in generations)
        return output

    def _data(self, state: State, *, context: bool) -> Any:
        from .connector import RequestData
        from .schema import API

        reported = state.reported or [[] for _ in self.memories]
        fresh = [pages[len(seen) :] for pages, seen in zip(state.pages, reported, strict=True)]
        state.reported = self._copied(state)
        tokens, state.told = state.tokens[state.told :], len(state.tokens)
        flat = fresh[0] if len(fresh) == 1 else []
        has = {entry["name"] for entry in API["RequestData"]["fields"]}
        more: dict[str, Any] = {"cache_salt": state.given.salt}
        if context:
            position, count = state.position, min(state.remaining, state.chunk)
        else:
            position, count = len(state.tokens) - 1, 1
        if self.setup.v2:
            more["new_block_ids_by_layer_group"] = fresh
        else:
            whole = len(state.tokens) // self.model.block_tokens
            more["block_hashes"] = [int.from_bytes(self._key(state, n + 1)[:8], "little") for n in range(whole)]
            if state.given.retention is not None:
                first = len(state.pages[0]) - len(flat)
                size = self.model.block_tokens
                more["priorities"] = [state.given.retention.priority_of((first + n) * size) for n in range(len(flat))]
        if "num_scheduled_tokens" in has:
            more["num_scheduled_tokens"] = count
        known = {name: value for name, value in more.items() if name in has}
        return RequestData(state.request_id, tokens, list(flat), position, **known)

    # the pass

    def _forward(self, items: list[Item]) -> None:
        run = Forward(self.model, self.memories, self.rank, items, self.known)
        manager, stream = self.manager, self.stream
        eager = not (self.setup.graphs and all(item.state.state is _RUNNING for item in items))
        stream.enqueue(run.begin)
        for layer in range(self.model.layers):
            hooks = eager and (self.setup.hooked is None or layer in self.setup.hooked)
            if manager is not None and hooks:
                manager.call("wait_for_layer_load", lambda at=layer: manager.worker.wait_for_layer_load(at, stream))
            stream.enqueue(lambda at=layer: run.layer(at))
            if manager is not None and hooks:
                manager.call("save_kv_layer", lambda at=layer: manager.worker.save_kv_layer(at, stream))
        if self.forward_callable is not None:
            self.forward_callable()
        if manager is not None:
            manager.call("wait_for_save", lambda: manager.worker.wait_for_save(stream))
        stream.enqueue(run.finish)
        for item in items:
            self._advance(item)
        if self.setup.overlap:
            previous, self.previous = self.previous, (run, items)
            if previous is not None:
                self._tokens(*previous)
        else:
            self._tokens(run, items)

    def _advance(self, item: Item) -> None:
        """Positions move when a pass is queued; pages that no later query reads go back."""
        state = item.state
        state.position = item.end
        if state.state is _WAITING and state.remaining == 0:
            state.state = _RUNNING
        if item.sample:
            state.pending += 1
        if item.sample and item.end == state.prompt_len:
            self._keep(state, state.prompt_len)
        for memory, pages, held in zip(self.memories, self.pages, state.pages, strict=True):
            for block in range(self._first_block(memory.group.window, state.position)):
                if block < len(held) and held[block] >= 0:
                    pages.give_back(held[block])
                    held[block] = -1

    def _keep(self, state: State, tokens: int) -> None:
        """Whole blocks of the first `tokens`, for reuse by later requests."""
        if self.random.random() >= self.setup.keep:
            return
        for block in range(tokens // self.model.block_tokens):
            key = self._key(state, block + 1)
            for pages, held in zip(self.pages, state.pages, strict=True):
                if held[block] >= 0:
                    pages.keep(key, held[block])

    def _settle(self) -> None:
        """Take in the pass whose tokens the host has not seen."""
        if self.previous is not None:
            previous, self.previous = self.previous, None
            self._tokens(*previous)

    def _tokens(self, run: Forward, items: list[Item]) -> None:
        if not run.done.wait(30):
            self.stream.synchronize()
            raise ContractBroken("a forward pass did not end within 30 s: its stream waits for something")
        self.wrong.extend(run.wrong)
        if self.stream.errors:
            self.stream.synchronize()
        for item in items:
            state = item.state
            if not item.sample or state not in self.active:
                continue
            state.pending -= 1
            if state.finished is not FinishReason.NOT_FINISHED:
                continue
            token = run.tokens[state.request_id]
            state.tokens.append(token)
            state.made += 1
            if token == state.given.end_id:
                state.finished = FinishReason.END_ID
            elif state.made >= state.given.max_tokens:
                state.finished = FinishReason.LENGTH
            self.on_token(state, token)

    # ends

    def _cancel(self, ids: tuple[int, ...]) -> None:
        for state in (*self.waiting, *self.active):
            state.cancelled = state.cancelled or state.request_id in ids
        for state in [state for state in self.waiting if state.cancelled]:
            self.waiting.remove(state)
            state.finished = FinishReason.CANCELLED
            self._ended(state)
        for state in self.active:
            waits = state.state is _LOADING and RELEASE >= (1, 3)  # until 1.2 a load is no reason to wait
            if state.cancelled and not waits and state.finished is FinishReason.NOT_FINISHED:
                state.finished = FinishReason.CANCELLED

    def _finish(self) -> None:
        for state in [state for state in self.active if state.finished is not FinishReason.NOT_FINISHED]:
            self.active.remove(state)
            self._terminate(state)
            self._ended(state)

    def _terminate(self, state: State) -> None:
        if not state.added:
            return
        loading, saving = state.state is _LOADING, False
        if not loading:
            self._keep(state, min(state.position, len(state.tokens)))
        if self.manager is not None and state.given.kind != "generation_only":
            pages = self._copied(state)
            saving = self.manager.request_finished(state, pages, by_group=len(self.memories) > 1)
        if saving:
            self.held[state.request_id] = state.pages
            state.pages = []
        else:
            self._drop_pages(state)

    def _ended(self, state: State) -> None:
        made = state.tokens[len(state.given.tokens) :]
        self.done[state.request_id] = Done(made, state.finished, state.error)
        if state.state is not LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS:
            state.state = LlmRequestState.GENERATION_COMPLETE
        self.on_done(state)

    def _reset(self, state: State) -> None:
        """Its pages are gone; it is admitted again with all that it has made as its prompt."""
        assert self.manager is None or state.request_id not in self.manager.new_loading
        self._drop_pages(state)
        self.active.remove(state)
        state.state, state.position, state.prepopulated, state.added = _WAITING, 0, 0, False
        state.prompt_len, state.reported, state.told, state.chunk = len(state.tokens), [], 0, 0
        state.resets += 1
        self.stats["resets"] = self.stats.get("resets", 0) + 1
        self.waiting.insert(0, state)
        if self.manager is not None:
            self.manager.reset(state)

    def _get_finished(self) -> None:
        assert self.manager is not None
        saved, loaded = self.manager.get_finished()
        for state in saved:
            self._give_back(self.held.pop(state.request_id))
        for state in loaded:
            if state in self.active and state.state is _LOADING:
                state.state = _WAITING

    def _take_over(self, state: State) -> None:
        """A generation_only request: its KV was computed elsewhere and is written to its pages."""
        total = self._blocks(state.prompt_len)
        state.pages = [
            [self._taken(pages, memory) for _ in range(total)]
            for memory, pages in zip(self.memories, self.pages, strict=True)
        ]
        state.added, state.position, state.state = True, state.prompt_len, _RUNNING
        state.made = len(state.given.first_tokens)
        raw, pages = state.given.handed, self._copied(state)
        self._poison()
        self.stream.enqueue(lambda: self._put(pages, raw or b""))
        for token in state.given.first_tokens:
            self.on_token(state, token)
        if not self._wants(state):
            state.finished = FinishReason.LENGTH

    def _put(self, pages: list[list[int]], raw: bytes) -> None:
        import numpy as np

        at = 0
        for memory, held in zip(self.memories, pages, strict=True):
            for page in held:
                for layer in memory.group.layers:
                    words = memory.words(layer)[page]
                    words[...] = np.frombuffer(raw, np.uint64, words.size, at).reshape(words.shape)
                    at += words.nbytes

    def packed(self, state: State) -> bytes:
        """The KV of a context_only request's prompt, for `handed`; call before its pages go back."""
        self.stream.synchronize()
        total = self._blocks(state.prompt_len)
        return b"".join(
            memory.words(layer)[page].tobytes()
            for memory, held in zip(self.memories, state.pages, strict=True)
            for page in held[:total]
            for layer in memory.group.layers
        )

    def _audit(self) -> None:
        for at, (memory, pages) in enumerate(zip(self.memories, self.pages, strict=True)):
            rule(not pages.refs, f"layer group {at}: pages {sorted(pages.refs)} are held by nobody")
            rule(memory.guarded(), f"layer group {at}: bytes between the regions were written to")
            for page in sorted(pages.clean - set(pages.dirty)):
                if page in pages.free:
                    self._still_poisoned(memory, page)

    def close(self) -> None:
        """End connector, stream and memory."""
        for one in (self.manager and self.manager.worker, self.manager and self.manager.scheduler):
            for name in ("shutdown", "close"):
                if (end := getattr(one, name, None)) is not None:
                    with contextlib.suppress(ContractBroken):
                        end()
                    break
        self.stream.close()
        for memory in self.memories:
            memory.close()
