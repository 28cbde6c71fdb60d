"""Between executor and connector: the calls in their order, on their ranks, and every rule that the contract has.

A rule that a connector breaks raises `ContractBroken` with the rule, and the executor stops.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import ranks
from .request import Bound, LlmRequest, LlmRequestState, State
from .schema import RELEASE

CALL_S = 15.0
META_SIZE = 1 << 20
T = TypeVar("T")


class ContractBroken(AssertionError):
    """A connector did what the contract forbids."""


def rule(holds: bool, what: str) -> None:
    if not holds:
        raise ContractBroken(what)


def build(rank: ranks.Rank, worker: Any, scheduler: Any, llm_args: Any) -> tuple[Any, Any]:
    """Worker, and on rank 0 the scheduler, at the same time in two threads."""
    made: dict[str, Any] = {}

    def make(name: str, kind: Any) -> None:
        ranks.enter(rank)
        try:
            made[name] = kind(llm_args)
        except BaseException as error:
            made[name] = error

    kinds = {"worker": worker, **({"scheduler": scheduler} if rank.rank == 0 else {})}
    threads = [threading.Thread(target=make, args=item, daemon=True) for item in kinds.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        rule(not thread.is_alive(), "building the connector took more than 60 s")
    for one in made.values():
        if isinstance(one, BaseException):
            raise one
    return made["worker"], made.get("scheduler")


class KvCacheConnectorManager:
    """One rank's. `checked=False`: calls are made and nothing is enforced."""

    def __init__(self, rank: ranks.Rank, worker: Any, scheduler: Any) -> None:
        assert (scheduler is not None) == (rank.rank == 0)
        self.rank, self.worker, self.scheduler = rank, worker, scheduler
        self.new_loading: dict[int, State] = {}
        self.new_saving: dict[int, State] = {}
        self._here: dict[str, dict[int, State]] = {"saving": {}, "loading": {}}
        self._pending: dict[str, dict[int, State]] = {"saving": {}, "loading": {}}
        self.loaded: set[int] = set()
        self.matched: dict[int, int] = {}
        self.iteration = 0
        self.slowest_s = 0.0

    def call(self, what: str, function: Callable[[], T]) -> T:
        began_s = time.monotonic()
        value = function()
        took_s = time.monotonic() - began_s
        self.slowest_s = max(self.slowest_s, took_s)
        rule(took_s < CALL_S, f"{what} took {took_s:.1f} s; the engine stands still meanwhile")
        return value

    def _on_leader(self, what: str, function: Callable[[], T]) -> T:
        """On rank 0, its value on every rank; what it raises is raised everywhere, so that no rank waits for it."""
        value: Any = None
        if self.scheduler is not None:
            try:
                value = (self.call(what, function), None)
            except BaseException as error:
                value = (None, error)
        out, error = self.rank.host.bcast(value)
        if error is not None:
            raise error
        return out  # type: ignore[no-any-return]

    def get_num_new_matched_tokens(self, state: State, computed: int, *, v2: bool) -> int:
        if state.given.kind == "generation_only":
            raise RuntimeError("Connector API is not supported for generation-only requests!")
        request = LlmRequest(state) if v2 else Bound(state)

        def ask() -> tuple[int, bool]:
            answer = self.scheduler.get_num_new_matched_tokens(request, computed)
            rule(isinstance(answer, tuple) and len(answer) == 2, f"get_num_new_matched_tokens returned {answer!r}")
            count, later = answer
            rule(type(count) is int and type(later) is bool, f"get_num_new_matched_tokens returned {answer!r}")
            rule(count >= 0, f"{count} matched tokens")
            if count == 0 and later:
                raise ContractBroken("load_kv_async must be False when num_tokens is 0!")
            rule(
                computed + count < state.prompt_len,
                f"{computed} computed and {count} matched of {state.prompt_len} prompt tokens: one must be left",
            )
            return count, later

        count, later = self._on_leader("get_num_new_matched_tokens", ask)
        if later:
            self.new_loading[state.request_id] = state
        self.matched[state.request_id] = count
        return count

    def update_state_after_alloc(self, state: State, pages: list[list[int]], *, by_group: bool) -> None:
        if self.scheduler is None:
            return
        request, scheduler = LlmRequest(state), self.scheduler
        if by_group:
            copied = [list(group) for group in pages]
            self.call(
                "update_state_after_alloc", lambda: scheduler.update_state_after_alloc_by_layer_group(request, copied)
            )
        else:
            self.call("update_state_after_alloc", lambda: scheduler.update_state_after_alloc(request, list(pages[0])))

    def park(self, batch: list[State]) -> list[State]:
        """`batch` without the requests whose load has just begun."""
        for state in batch:
            if state.request_id in self.new_loading:
                state.state = LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        return [state for state in batch if state.request_id not in self.new_loading]

    def bind(self, output: Any) -> None:
        """build_connector_meta on rank 0, its pickle to every rank, bound there."""
        self.matched = {}

        def build_meta() -> bytes:
            meta = self.scheduler.build_connector_meta(output)
            try:
                raw = pickle.dumps(meta)
            except Exception as error:
                raise ContractBroken(f"the metadata does not pickle: {error!r}") from error
            rule(len(raw) < META_SIZE, f"{len(raw)} bytes of metadata; the broadcast is on the path of every token")
            rule(b"torch" not in raw, "the metadata holds a tensor; it must be free of handles")
            return raw

        raw = self._on_leader("build_connector_meta", build_meta)
        self.call("bind_connector_meta", lambda: self.worker.bind_connector_meta(pickle.loads(raw)))
        self.iteration += 1

    def request_finished(self, state: State, pages: list[list[int]], *, by_group: bool) -> bool:
        self.loaded.discard(state.request_id)
        request = LlmRequest(state)

        def tell() -> bool:
            if by_group:
                kept = self.scheduler.request_finished_by_layer_group(request, [list(group) for group in pages])
            else:
                kept = self.scheduler.request_finished(request, list(pages[0]))
            rule(type(kept) is bool, f"request_finished returned {kept!r}")
            return bool(kept)

        saving = self._on_leader("request_finished", tell)
        if saving:
            self.new_saving[state.request_id] = state
            state.state = LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return saving

    def reset(self, state: State) -> None:
        """The request's pages are gone and it will be admitted again."""
        self.matched.pop(state.request_id, None)
        self.loaded.discard(state.request_id)
        tell = getattr(self.scheduler, "request_reset", None)
        if tell is not None and RELEASE >= (1, 4):
            self.call("request_reset", lambda: tell(LlmRequest(state)))

    def get_finished(self) -> tuple[list[State], list[State]]:
        """Requests that every rank has saved, and those that every rank has loaded."""
        fresh = {"saving": dict(self.new_saving), "loading": dict(self.new_loading)}
        self.new_saving, self.new_loading = {}, {}
        for kind, states in fresh.items():
            self._pending[kind].update(states)
        given = list(fresh["saving"]), list(fresh["loading"])
        answer = self.call("get_finished", lambda: self.worker.get_finished(*given))
        rule(
            isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(ids, list) for ids in answer),
            f"get_finished returned {answer!r}, not two lists",
        )
        for kind, ids in zip(("saving", "loading"), answer, strict=True):
            rule(len(set(ids)) == len(ids), f"get_finished names an id twice in {ids}")
            for one in ids:
                rule(
                    one in self._pending[kind], f"get_finished: {kind} id {one!r} was not given, or was returned before"
                )
                self._here[kind][one] = self._pending[kind].pop(one)
        every = self.rank.host.allgather((list(self._here["saving"]), list(self._here["loading"])))
        out: list[list[State]] = []
        for at, kind in enumerate(("saving", "loading")):
            both = set.intersection(*(set(ids[at]) for ids in every))
            out.append([self._here[kind].pop(one) for one in sorted(both)])
        for state in out[1]:
            self.loaded.add(state.request_id)
        return out[0], out[1]

    def outstanding(self) -> list[int]:
        return [one for books in (self._pending, self._here) for kind in books.values() for one in kind]
