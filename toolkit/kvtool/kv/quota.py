"""Quotas: how much of one rank a tenant may have, what it has, and which of its own blocks go first.

Every slot that a tenant's block, reservation or quarantine keeps from others is charged to it, in memory and in files.
A tenant at its quota makes room among its own blocks (the one used longest ago, leaf-first, lowest level first) or is
refused with the reason; it never costs anybody else a block. Below its quota it competes like all others.

Blocks that were found in files at a start belong to whoever asks for them first: nobody else can know their keys.

Pure rules: no time, no I/O. The pool's own operator is the tenant "", without quota and without an account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtool.kv.block import BlockKey
from kvtool.kv.evict import LeafLRU
from kvtool.kv.record import Entry

OPERATOR = ""


@dataclass(frozen=True)
class Quota:
    """Of one tenant on one rank, in slots; None: no bound of its own. `blocks`: in either tier, each counted once."""

    dram: int | None = None
    files: int | None = None
    blocks: int | None = None


@dataclass
class Account:
    """What one tenant has. `aside`: quarantined slots, which nobody may have while it may still use them."""

    name: str
    quota: Quota
    may_leave: LeafLRU
    may_go: LeafLRU
    dram: int = 0
    files: int = 0
    aside: int = 0
    leaving: set[BlockKey] = field(default_factory=set)
    """Of those in memory: on the way to files."""
    hits: int = 0
    evicted: int = 0
    """For its own new blocks."""
    refused: int = 0
    entries: dict[BlockKey, tuple[Entry, bool, bool]] = field(default_factory=dict)
    """Charged, with the tiers that they are charged for."""

    @property
    def blocks(self) -> int:
        return len(self.entries)

    @property
    def taken(self) -> int:
        """Slots of memory that others cannot have."""
        return self.dram + self.aside

    def short_of(self, wanted: int) -> bool:
        """Whether memory for `wanted` more must still come free, what is leaving aside."""
        most = self.quota.dram
        return most is not None and self.taken - len(self.leaving) + min(wanted, most) > most

    def too_many_for(self, wanted: int) -> bool:
        """Whether a block must be forgotten before `wanted` others may come."""
        most = self.quota.blocks
        return most is not None and self.blocks + min(wanted, most) > most

    def room(self, new: int) -> int:
        """How many of `new` blocks may come into memory now."""
        if self.quota.blocks is not None:
            new = min(new, self.quota.blocks - self.blocks)
        return max(0, self.brings(new))

    def brings(self, filed: int) -> int:
        """How many of `filed` own blocks in files may come into memory now."""
        return max(0, filed if self.quota.dram is None else min(filed, self.quota.dram - self.taken))

    @property
    def files_full(self) -> bool:
        return self.quota.files is not None and self.files >= self.quota.files

    def why(self) -> str:
        held = (
            f"{self.dram} blocks of {_of(self.quota.dram)} in memory, {self.files} of {_of(self.quota.files)} in files"
        )
        aside = f", {self.aside} slots quarantined" if self.aside else ""
        return (
            f"tenant {self.name} is at its quota on this rank ({held}, {self.blocks} of {_of(self.quota.blocks)} in "
            f"all{aside}) and none of its own blocks can go now"
        )


class Quotas:
    """The accounts of one rank. `may_leave`, `may_go`: in which order a block may leave memory, and may be forgotten;
    None when it may not."""

    def __init__(self, may_leave: Callable[[BlockKey], int | None], may_go: Callable[[BlockKey], int | None]) -> None:
        self._may_leave, self._may_go = may_leave, may_go
        self.accounts: dict[str, Account] = {}

    def set(self, quotas: dict[str, Quota]) -> None:
        """Who has which quota; once, before anything is stored."""
        for name, quota in quotas.items():
            self.accounts[name] = Account(name, quota, LeafLRU(self._may_leave), LeafLRU(self._may_go))

    def of(self, tenant: str) -> Account | None:
        return self.accounts.get(tenant) if tenant else None

    def moved(self, entry: Entry) -> None:
        """`entry` came to or left a tier. As often as one likes."""
        account = self.of(entry.tenant)
        if account is None:
            return
        known = account.entries.get(entry.key)
        was = known[1:] if known is not None and known[0] is entry else (False, False)
        now = entry.slot >= 0, entry.file_slot >= 0
        account.dram += now[0] - was[0]
        account.files += now[1] - was[1]
        if any(now) and (known is None or known[0] is entry or not entry.doomed):
            account.entries[entry.key] = (entry, *now)
        elif known is not None and known[0] is entry:
            del account.entries[entry.key]

    def gone(self, entry: Entry) -> None:
        """A reservation ended without a block; its slot may be set aside."""
        account = self.of(entry.tenant)
        known = account.entries.pop(entry.key, None) if account is not None else None
        if account is not None and known is not None:
            account.dram -= known[1]
            account.files -= known[2]

    def aside(self, tenant: str, count: int) -> None:
        account = self.of(tenant)
        if account is not None:
            account.aside += count

    def leaving(self, entry: Entry, begins: bool) -> None:
        """`entry` is on the way from memory to a file, or is not any more."""
        account = self.of(entry.tenant)
        if account is not None:
            (account.leaving.add if begins else account.leaving.discard)(entry.key)

    def offer(self, entry: Entry) -> None:
        """`entry` may leave, perhaps."""
        account = self.of(entry.tenant)
        if account is not None:
            account.may_leave.offer(entry.key)
            account.may_go.offer(entry.key)

    def adopt(self, entries: Iterable[Entry], tenant: str) -> None:
        """`tenant` asked for these and they are there: they are its own."""
        account = self.of(tenant)
        if account is None:
            return
        for entry in entries:
            account.hits += 1
            if entry.tenant != tenant:
                entry.tenant = tenant
                self.moved(entry)
                self.offer(entry)

    def compact(self) -> None:
        for account in self.accounts.values():
            account.may_leave.rebuild(account.entries, account.blocks)
            account.may_go.rebuild(account.entries, account.blocks)

    def usage(self) -> dict[str, dict[str, int | None]]:
        """For status, by tenant; in slots."""
        return {
            name: {
                "dram": a.dram, "files": a.files, "blocks": a.blocks, "aside": a.aside, "hits": a.hits,
                "evicted": a.evicted, "refused": a.refused, "quota_dram": a.quota.dram, "quota_files": a.quota.files,
                "quota_blocks": a.quota.blocks,
            }
            for name, a in self.accounts.items()
        }  # fmt: skip


def _of(bound: int | None) -> str:
    return "any number" if bound is None else str(bound)
