"""One request inside the executor, and the two faces that a connector sees of it.

`get_num_new_matched_tokens` is called from C++ under the V1 cache manager, with the base class, so only what the
bindings bind is there (`Bound`); the other callbacks get the Python subclass, with its `py_` attributes. An attribute
that neither has raises AttributeError, as it would.
"""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from .schema import RELEASE


class LlmRequestState(enum.IntEnum):
    UNKNOWN = 0
    ENCODER_INIT = 1
    DISAGG_GENERATION_INIT = 8
    DISAGG_GENERATION_TRANS_IN_PROGRESS = 9
    CONTEXT_INIT = 10
    DISAGG_GENERATION_TRANS_COMPLETE = 12
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = 21
    DISAGG_CONTEXT_COMPLETE = 22


class FinishReason(enum.IntEnum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


WORDS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.TIMED_OUT: "timeout",
}


class KvCacheRetentionConfig:
    """Native in the real package; positional or keyword, checked as there."""

    class TokenRangeRetentionConfig:
        def __init__(
            self,
            token_start: int,
            token_end: int | None,
            priority: int,
            duration_ms: datetime.timedelta | None = None,
        ) -> None:
            if not 0 <= priority <= 100:
                raise ValueError(f"retention priority must be in [0, 100], got {priority}")
            self.token_start, self.token_end = token_start, token_end
            self.priority, self.duration_ms = priority, duration_ms

    def __init__(
        self,
        token_range_retention_configs: list[KvCacheRetentionConfig.TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: datetime.timedelta | None = None,
        transfer_mode: Any = None,
        directory: str | None = None,
    ) -> None:
        if not 0 <= decode_retention_priority <= 100:
            raise ValueError(f"retention priority must be in [0, 100], got {decode_retention_priority}")
        self.token_range_retention_configs = list(token_range_retention_configs)
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms, self.transfer_mode, self.directory = decode_duration_ms, transfer_mode, directory

    def priority_of(self, token: int) -> int:
        for one in self.token_range_retention_configs:
            if one.token_start <= token and (one.token_end is None or token < one.token_end):
                return one.priority
        return 35


def salt_id(salt: str | None) -> int | None:
    """What the bindings carry of a salt."""
    return None if salt is None else int.from_bytes(blake3(salt.encode()).digest(8), "little")


@dataclass(eq=False)
class Given:
    """What a caller asked for: the same on every rank."""

    request_id: int
    tokens: list[int]
    max_tokens: int = 16
    end_id: int | None = None
    salt: str | None = None
    lora: int | None = None
    multimodal: list[list[int]] | None = None
    retention: KvCacheRetentionConfig | None = None
    kind: str = "context_and_generation"
    first_tokens: tuple[int, ...] = ()
    """Of a generation_only request: what the context phase sampled."""
    more: bool = False
    """A context_only request that another server goes on with."""
    handed: bytes | None = None
    """Of a generation_only request: its KV, whole pages in order, already fetched."""


@dataclass(eq=False)
class State:
    """The executor's own books about a request."""

    given: Given
    tokens: list[int]
    prompt_len: int
    state: LlmRequestState = LlmRequestState.CONTEXT_INIT
    position: int = 0
    """Tokens whose KV is there: context_current_position."""
    prepopulated: int = 0
    chunk: int = 0
    added: bool = False
    pages: list[list[int]] = field(default_factory=list)
    """By layer group, an entry a block, -1 where none is held."""
    reported: list[list[int]] = field(default_factory=list)
    told: int = 0
    """Tokens that the connector was told."""
    cached_blocks: int = 0
    finished: FinishReason = FinishReason.NOT_FINISHED
    made: int = 0
    """Tokens generated so far."""
    pending: int = 0
    """Forward passes of it whose token the host has not seen: 0 or 1."""
    first_step: bool = True
    error: str | None = None
    cancelled: bool = False
    resets: int = 0
    device: list[int] = field(default_factory=list)
    """Tokens as the device knows them; only the stream touches it."""

    @property
    def request_id(self) -> int:
        return self.given.request_id

    @property
    def remaining(self) -> int:
        return self.prompt_len - self.position


class Bound:
    """A read-only face of a request: what the bindings bind."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_state":
            raise AttributeError(f"a connector sets {name!r} on a request: it does not own requests")
        object.__setattr__(self, name, value)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0, "beam 0 is the only one"
        return list(self._state.tokens)

    def get_num_tokens(self, beam: int) -> int:
        return len(self.get_tokens(beam))

    request_id = property(lambda self: self._state.request_id)
    prompt_len = property(lambda self: self._state.prompt_len)
    orig_prompt_len = property(lambda self: len(self._state.given.tokens))
    max_new_tokens = property(lambda self: self._state.given.max_tokens)
    end_id = property(lambda self: self._state.given.end_id)
    lora_task_id = property(lambda self: self._state.given.lora)
    cache_salt_id = property(lambda self: salt_id(self._state.given.salt))
    multimodal_hashes = property(lambda self: self._state.given.multimodal)
    multimodal_positions = property(lambda self: None)
    multimodal_lengths = property(lambda self: None)
    context_current_position = property(lambda self: self._state.position)
    context_remaining_length = property(lambda self: self._state.remaining)
    context_chunk_size = property(lambda self: self._state.chunk)
    prepopulated_prompt_len = property(lambda self: self._state.prepopulated)
    is_first_context_chunk = property(lambda self: self._state.position == self._state.prepopulated)
    is_finished = property(lambda self: self._state.finished is not FinishReason.NOT_FINISHED)
    is_generation_only_request = property(lambda self: self._state.given.kind == "generation_only")
    is_context_only_request = property(lambda self: self._state.given.kind == "context_only")
    is_dummy_request = property(lambda self: False)
    state = property(lambda self: self._state.state)
    beam_width = property(lambda self: 1)


class LlmRequest(Bound):
    """The Python subclass."""

    py_request_id = property(lambda self: self._state.request_id)
    py_prompt_len = property(lambda self: self._state.prompt_len)
    py_orig_prompt_len = property(lambda self: len(self._state.given.tokens))
    py_max_new_tokens = property(lambda self: self._state.given.max_tokens)
    py_lora_task_id = property(lambda self: self._state.given.lora)
    py_client_id = property(lambda self: self._state.request_id)
    py_end_id = property(lambda self: self._state.given.end_id)
    kv_cache_retention_config = property(lambda self: self._state.given.retention)
    if RELEASE >= (1, 3):
        cache_salt = property(lambda self: self._state.given.salt)
