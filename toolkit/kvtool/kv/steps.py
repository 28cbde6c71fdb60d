"""What the rules of membership want done, and what those who keep links or tell operators should know."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.kv.view import Entry


@dataclass(frozen=True)
class SendView:
    """Tell the rank `to`, if it is linked; the receiver calls `received`. `whole`: that is all we know."""

    to: str
    entries: tuple[Entry, ...]
    whole: bool = False


@dataclass(frozen=True)
class Ping:
    to: str


@dataclass(frozen=True)
class Seek:
    """Find out about a rank without a link: has its process ended, can it be dialled? `dial`: the link is ours to make,
    else the other makes it. Call `linked`, `ended` or `unreachable` with what came of it."""

    entry: Entry
    dial: bool


@dataclass(frozen=True)
class Publish:
    """Write the state file."""


@dataclass(frozen=True)
class Changed:
    """For whoever keeps links or tells operators: this is how a rank stands now."""

    entry: Entry
    how: str


@dataclass(frozen=True)
class Hung:
    identity: str
    hung: bool


@dataclass(frozen=True)
class Retire:
    """End this process: its place is taken, or it was told to leave."""

    why: str


Action = SendView | Ping | Seek | Publish | Changed | Hung | Retire
