"""The scheduler's books: what each request has, what was claimed for it, which of its blocks are saved. Pure rules.

A request appears whole once and by deltas from then on, so its tokens and pages are kept here by its id. A preempted
one comes again under the same id, as if new: its books are opened anew. Blocks are counted from the prompt's start.

`computed_position` leaves the matched tokens out in a request's first pass where its load joins that pass, and has them
everywhere else. An engine may take less than was claimed, or nothing, so what is computed is never taken from the claim
alone: a block that is saved before it is computed would be served to others with a checksum that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtool.kv.block import BlockKey, block_keys
from kvtool_trtllm.meta import Pages, Save


@dataclass
class Claim:
    """Blocks [first, first + count) are staged on every rank under `load_id`. `layerwise`: read by the next pass."""

    load_id: int
    first: int
    count: int
    layerwise: bool
    at_s: float
    keys: tuple[BlockKey, ...] = ()
    expired: bool = False
    """Given back since nobody allocated for it; must be staged again before it is used."""
    pages: Pages | None = None
    """Where they go; set by the allocation."""
    skip: int = 0
    """Leading blocks that the engine has by itself now: staged, and written nowhere."""


@dataclass
class Known:
    """One request. `seed` None: neither matched nor saved. `saved`: leading blocks that need no (more) saving."""

    seed: bytes | None
    prompt_tokens: int
    saved: int = 0
    reused: int = 0
    """Tokens that the engine had before the first pass."""
    matched: int = 0
    """Tokens claimed behind those, less what the engine said it will not take."""
    joins: bool = False
    """The load joins the first pass, whose position leaves `matched` out. Until that pass."""
    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    claim: Claim | None = None
    loading: bool = False
    """A load of its was handed to the workers."""
    heard_s: float = 0.0
    """When the engine last said anything of it."""


@dataclass(frozen=True)
class Step:
    """What the engine says of one request in one iteration. `scheduled` None: this version does not say."""

    request_id: int
    tokens: Sequence[int]
    pages: Sequence[Sequence[int]]
    position: int
    scheduled: int | None


class Requests:
    """`save`: "all", "prompt" or "none", as in ConnectorSettings."""

    def __init__(self, block_tokens: int, save: str = "all") -> None:
        self.block_tokens, self._save = block_tokens, save
        self._known: dict[int, Known] = {}
        self.lacking = 0
        """Blocks that had no page when they were whole; not saved."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._known

    def claimable(self, prompt_tokens: int, computed: int) -> range:
        """Blocks that may be claimed: whole ones behind what is computed, and one token is left to compute. None where
        the engine reused a part of a block: its page is being filled already."""
        if computed % self.block_tokens:
            return range(0)
        return range(computed // self.block_tokens, max(0, prompt_tokens - 1) // self.block_tokens)

    def admitted(
        self,
        request_id: int,
        seed: bytes | None,
        prompt_tokens: int,
        computed: int,
        claim: Claim | None,
        now_s: float = 0.0,
    ) -> None:
        """Open its books; those of an earlier life are closed (see `ended` for its claim)."""
        claimed = claim.count if claim else 0
        self._known[request_id] = Known(
            seed,
            prompt_tokens,
            saved=-(-computed // self.block_tokens) + claimed,
            reused=computed,
            matched=claimed * self.block_tokens,
            joins=claim is not None and claim.layerwise,
            claim=claim,
            heard_s=now_s,
        )

    def unknowable(self, request_id: int) -> None:
        """Its tokens do not tell its KV after all: nothing of it is saved."""
        known = self._known.get(request_id)
        if known is not None:
            known.seed = None

    def untaken(self, request_id: int, start: int, end: int | None) -> tuple[Claim, int] | None:
        """The engine will not take prompt tokens [start, end) of what was claimed, `end` None: nor any behind.

        The claim and how many of its blocks are still wanted, where some are not. A range inside the claim leaves it
        whole: what lies behind is taken, and loads fill a claim from its start.
        """
        known = self._known.get(request_id)
        if known is None:
            return None
        begin, stop, claim = known.reused, known.reused + known.matched, known.claim
        if start < stop and (end is None or end >= stop):
            known.matched = max(0, start - begin)
        elif start <= begin and end is not None and end > begin:
            known.reused, known.matched = end, stop - end
        else:
            return None
        if claim is None:
            return None
        taken = -(-(known.reused + known.matched) // self.block_tokens) - claim.first
        claim.skip = max(claim.skip, known.reused // self.block_tokens - claim.first)
        if not known.matched:
            known.claim = None
            return claim, 0
        if taken == claim.count:
            return None
        claim.count, claim.keys = taken, claim.keys[:taken]
        claim.pages = claim.pages and tuple(group[:taken] for group in claim.pages)
        return claim, taken

    def allocated(self, request_id: int, pages: Sequence[Sequence[int]]) -> Claim | None:
        """Bind a claim to its pages; the claim, if there was one. Its `pages` stay None where too few were given."""
        known = self._known.get(request_id)
        if known is None or known.claim is None:
            return None
        claim = known.claim
        span = slice(claim.first, claim.first + claim.count)
        mine = tuple(tuple(group[span]) for group in pages)
        claim.pages = mine if mine and all(len(group) == claim.count for group in mine) else None
        return claim

    def loads(self) -> list[tuple[int, Claim]]:
        """Claims that have pages and were not handed on yet; they are handed on now."""
        found = []
        for request_id, known in self._known.items():
            claim = known.claim
            if claim is not None and claim.pages is not None:
                known.claim, known.loading = None, True
                claim.pages = tuple((-1,) * claim.skip + group[claim.skip :] for group in claim.pages)
                found.append((request_id, claim))
        return found

    def step(self, step: Step, *, new: bool, now_s: float = 0.0) -> Save | None:
        """Take in one iteration's news of a request; what its pass completes, to be saved."""
        known = self._known.get(step.request_id)
        if known is None:  # admitted before we were asked, or not ours: what it hashes from is not known
            known = self._known[step.request_id] = Known(None, len(step.tokens))
        if new:
            known.tokens, known.pages, known.keys = [], [], []
        elif not known.tokens:  # deltas to what an earlier life was told: from which token on is not known
            known.seed = None
        known.loading, known.heard_s = False, now_s
        known.tokens.extend(step.tokens)
        if not known.pages:
            known.pages = [[] for _ in step.pages]
        for pages, more in zip(known.pages, step.pages, strict=True):
            pages.extend(more)
        position = step.position + (known.matched if known.joins else 0)
        known.joins = False
        return self._whole(step.request_id, known, position + (step.scheduled or 0))

    def _whole(self, request_id: int, known: Known, computed: int) -> Save | None:
        """Blocks whose tokens are all known and whose KV is there once this pass is done."""
        most = min(computed, len(known.tokens), known.prompt_tokens if self._save == "prompt" else computed)
        end, first = most // self.block_tokens, known.saved
        if known.seed is None or self._save == "none" or end <= first:
            return None
        known.saved = end
        keys = self._keys(known, end)
        held = [all(block < len(pages) for pages in known.pages) for block in range(first, end)]
        blocks = [block for block, there in zip(range(first, end), held, strict=True) if there]
        self.lacking += held.count(False)
        if not blocks:
            return None
        return Save(
            request_id,
            tuple(keys[block] for block in blocks),
            tuple(keys[block - 1] if block else None for block in blocks),
            tuple(tuple(pages[block] for block in blocks) for pages in known.pages),
        )

    def _keys(self, known: Known, blocks: int) -> list[BlockKey]:
        """Of the first `blocks`; only those that are new are hashed."""
        assert known.seed is not None
        have, size = len(known.keys), self.block_tokens
        if blocks > have:
            parent = known.keys[-1] if have else known.seed
            known.keys.extend(block_keys(parent, known.tokens[have * size : blocks * size], size))
        return known.keys

    def ended(self, request_id: int) -> Known | None:
        """Forget it; its books, so that what it held can be given back."""
        return self._known.pop(request_id, None)

    def silent(self, before_s: float) -> list[int]:
        """Requests without a claim or a load that nothing was heard of since then: before 1.4 the engine does not say
        when one ends that was reset and then cancelled."""
        return [
            request_id
            for request_id, known in self._known.items()
            if known.claim is None and not known.loading and known.heard_s < before_s
        ]

    def due(self, before_s: float) -> list[tuple[int, Claim]]:
        """Claims made before then that nobody allocated for; they are marked as expired."""
        found = []
        for request_id, known in self._known.items():
            claim = known.claim
            if claim is not None and claim.pages is None and not claim.expired and claim.at_s <= before_s:
                claim.expired = True
                found.append((request_id, claim))
        return found

    def claims(self) -> list[tuple[int, Claim]]:
        return [(request_id, known.claim) for request_id, known in self._known.items() if known.claim is not None]
