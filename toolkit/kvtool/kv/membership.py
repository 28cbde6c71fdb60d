"""Membership: what one rank believes of the others, and what it does about it. Facts in, actions out.

**Death.** A lost link alone is none. Dead is a rank whose process has ended (on this host pid and start time say so),
whose host refuses connections where it listened, whose failure MPI reported, or, on another host, that could not be
reached for `lost_s`: the keys of a host that is cut off shall have owners on this side. A **hung** rank is no dead one:
it may go on. Who does not answer for `hung_s` is known here as hung, clients skip it by their circuit breakers, and
placement stays as it is.

**Growing old.** Every change goes to all linked ranks at once, and to those who missed it when their epoch, which every
frame carries, turns out to differ: the lower of the two sends what it knows, the other answers with what it knows
beyond that. So all who can reach each other come to the same view, after a cut as well.

**A rank that finds itself declared dead** under its own incarnation was wronged: by a cut, or by an early verdict. It
goes on, and says so under the next incarnation. Its blocks are still good (content is checked whoever holds it), so
leaving would cost a restart and everything in its DRAM. If its identity has a later incarnation, or another process
claims the same one, somebody has taken its place: then it retires.

**A newcomer** with an empty store starts with an eighth of a rank's share of keys and gets another eighth every
`ramp_s` / 7, or sooner as it fills. Whoever held its keys meanwhile keeps most of them for a while, so the misses that
its return costs, one for each moved key, come spread over `ramp_s` and not at once. One that found its blocks again
in its file takes its whole share at once, and so do the ranks of a fresh pool, which are all empty.

Pure: time is an argument, nothing is sent or read here. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvtool.kv.steps import Action, Changed, Hung, Ping, Publish, Retire, Seek, SendView
from kvtool.kv.view import RAMP_STEPS, Entry, Standing, Status, View


@dataclass(frozen=True)
class Timing:
    ping_s: float = 1.0
    hung_s: float = 3.0
    """Pings are due every `ping_s`: a hung rank is known after `hung_s` + `ping_s` at most."""
    seek_s: float = 0.01
    seek_s_max: float = 1.0
    """How soon a rank without a link is looked for, and how seldom at last."""
    revive_s: float = 5.0
    """How often a rank on another host that was declared dead is looked for: a cut may heal."""
    lost_s: float = 10.0
    rejoin_s: float = 1.0
    """Between two incarnations of one process, so that a false alarm that recurs cannot make ranks shout."""
    sync_s: float = 0.3
    """A view may be on its way for so long before its receiver counts as one who missed it."""
    ramp_s: float = 14.0


@dataclass
class _Peer:
    linked: bool
    heard_s: float
    """Or, before anything was heard, since when it should have been."""
    seek_at_s: float
    seek_s: float
    synced_s: float = -1e9
    hung: bool = False


@dataclass
class Members:
    """`identity` is this rank's; `entries` what is known at the start, its own entry among them."""

    identity: str
    entries: Sequence[Entry]
    base: int
    now_s: float
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.view = View(self.entries, self.base)
        self._mine = self.view[self.identity]
        self._peers: dict[str, _Peer] = {}
        self._actions: list[Action] = []
        self._changed_s = -1e9
        self._began_s = self._rejoined_s = self.now_s
        self._pinged_s = -1e9
        self._wronged, self._retired = not self._mine.standing.serves, False
        self._meet(self.now_s)

    @property
    def epoch(self) -> int:
        return self.view.epoch

    @property
    def mine(self) -> Entry:
        """This rank's own entry."""
        return self._mine

    @property
    def linked_peers(self) -> list[str]:
        return [entry.identity for entry in self._others() if self._peers[entry.identity].linked]

    def hung(self, now_s: float) -> list[str]:
        """Serving ranks that have not been heard of for too long."""
        return [e.identity for e in self._others() if e.standing.serves and self._silent(e.identity, now_s)]

    @property
    def publishes(self) -> bool:
        """Whether the state file of this host is ours to write: the lowest rank of it that serves and is not hung."""
        for entry in self.view.entries:
            if entry.place == self._mine.place and entry.standing.serves:
                if entry.identity == self.identity:
                    return True
                if not self._peers[entry.identity].hung:
                    return False
        return False

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # Facts

    def linked(self, identity: str, now_s: float) -> None:
        """A link to that rank was made, by whichever side."""
        peer = self._peers[identity]
        peer.linked, peer.heard_s, peer.seek_s = True, now_s, self.timing.seek_s
        self._actions.append(Ping(identity))  # its epoch tells the other whether it missed anything
        self._note_hung(identity, now_s)

    def link_lost(self, identity: str, now_s: float) -> None:
        peer = self._peers[identity]
        peer.linked, peer.seek_at_s = False, now_s

    def heard(self, identity: str, epoch: int, now_s: float) -> None:
        """Anything at all came from that rank, by a link."""
        peer = self._peers[identity]
        peer.heard_s = now_s
        if peer.hung:
            self._note_hung(identity, now_s)
        due = now_s - max(self._changed_s, peer.synced_s) >= self.timing.sync_s
        if epoch != self.epoch and due and self._mine.number < self.view[identity].number:
            peer.synced_s = now_s
            self._actions.append(SendView(identity, tuple(self.view.entries), whole=True))

    def received(self, entries: Sequence[Entry], now_s: float, sender: str = "", whole: bool = False) -> None:
        """A view, or a part of one, from another rank or the state file. A `whole` one is answered with what is known
        beyond it."""
        beyond = self.view.beyond(entries) if whole else []
        if beyond:
            self._actions.append(SendView(sender, tuple(beyond)))
        self._learn(entries, "told by another rank", now_s)

    def asked_to_join(self, entry: Entry, now_s: float) -> str:
        """A replacement or a new rank asks to be admitted; "" when it is, else why not."""
        known = self.view.get(entry.identity)
        if known is not None and known.standing.serves:
            return f"{entry.identity} serves as incarnation {known.standing.incarnation} as far as is known here"
        if known is not None and entry.standing.incarnation <= known.standing.incarnation:
            return f"{entry.identity} was incarnation {known.standing.incarnation} already, wanted a later one"
        self._learn([entry], "joined", now_s, spread=True)
        return ""

    def ended(self, identity: str, incarnation: int, how: str, now_s: float) -> None:
        """That incarnation is over."""
        self._declare(identity, incarnation, Status.DEAD, how, now_s)

    def unreachable(self, identity: str, now_s: float) -> None:
        """Dialling found no way to its host. Long enough, and it counts as dead here."""
        entry, peer = self.view[identity], self._peers[identity]
        if not peer.linked and entry.place != self._mine.place and now_s - peer.heard_s >= self.timing.lost_s:
            how = f"its host could not be reached for {now_s - peer.heard_s:.0f} s"
            self._declare(identity, entry.standing.incarnation, Status.DEAD, how, now_s)

    def drain(self, now_s: float) -> None:
        """This rank shall take nothing new."""
        if self._mine.standing.status < Status.DRAINING:
            self._stand(Status.DRAINING, "asked to drain", now_s)

    def leave(self, now_s: float) -> None:
        """This rank goes for good."""
        if self._mine.standing.status < Status.LEFT:
            self._stand(Status.LEFT, "leaves for good", now_s)
            self._retire("it was told to leave")

    def dismiss(self, identity: str, now_s: float) -> None:
        """A dead rank is not coming back."""
        entry = self.view.get(identity)
        if entry is not None and not entry.standing.serves:
            self._declare(identity, entry.standing.incarnation, Status.LEFT, "nobody shall replace it", now_s)

    def filled(self, share: float, now_s: float) -> None:
        """How much of its DRAM a newcomer has filled, from 0 to 1: half of it is as good as the whole ramp."""
        if self._mine.standing.status is Status.JOINING:
            self._ramp(int(2 * share * RAMP_STEPS), now_s)

    def tick(self, now_s: float) -> float:
        """Do what is due; when to come again."""
        timing = self.timing
        if self._retired:
            return now_s + timing.ping_s
        if self._wronged and now_s >= self._rejoined_s + timing.rejoin_s:
            self._rejoin(now_s)
        due_s = self._ramp_on(now_s)
        if self._wronged:
            due_s = min(due_s, self._rejoined_s + timing.rejoin_s)
        if now_s >= self._pinged_s + timing.ping_s:
            self._pinged_s = now_s
            self._actions += [Ping(identity) for identity in self.linked_peers]
        due_s = min(due_s, self._pinged_s + timing.ping_s)
        for entry in self._others():
            due_s = min(due_s, self._watch(entry, now_s))
        return due_s

    # How

    def _others(self) -> list[Entry]:
        return [entry for entry in self.view.entries if entry.identity != self.identity]

    def _meet(self, now_s: float) -> None:
        for entry in self._others():
            if entry.identity not in self._peers:
                self._peers[entry.identity] = _Peer(False, now_s, now_s, self.timing.seek_s)

    def _silent(self, identity: str, now_s: float) -> bool:
        return now_s - self._peers[identity].heard_s > self.timing.hung_s

    def _note_hung(self, identity: str, now_s: float) -> None:
        peer = self._peers[identity]
        hung = self.view[identity].standing.serves and self._silent(identity, now_s)
        if hung != peer.hung:
            published, peer.hung = self.publishes, hung
            self._actions.append(Hung(identity, hung))
            if self.publishes and not published:  # whose part it was does not do it
                self._actions.append(Publish())

    def _watch(self, entry: Entry, now_s: float) -> float:
        """Look after one other rank; when to look again."""
        peer, timing, identity = self._peers[entry.identity], self.timing, entry.identity
        self._note_hung(identity, now_s)
        if peer.linked and not peer.hung:
            return peer.heard_s + timing.hung_s + 0.001
        if peer.linked or entry.standing.status is Status.LEFT:
            return now_s + timing.ping_s
        if not entry.standing.serves and entry.place == self._mine.place:
            return now_s + timing.ping_s  # its replacement finds us
        if now_s >= peer.seek_at_s:
            peer.seek_at_s = now_s + (peer.seek_s if entry.standing.serves else timing.revive_s)
            peer.seek_s = min(2 * peer.seek_s, timing.seek_s_max)
            self._actions.append(Seek(entry, self._mine.number < entry.number))
        return peer.seek_at_s

    def _learn(self, entries: Iterable[Entry], how: str, now_s: float, spread: bool = False) -> None:
        news = self.view.merge(entries)
        if not news:
            return
        self._meet(now_s)
        for entry in news:
            peer = self._peers.get(entry.identity)
            if peer is not None and not peer.linked:
                peer.seek_at_s, peer.seek_s = now_s, self.timing.seek_s
                peer.heard_s = max(peer.heard_s, now_s) if entry.standing.serves else peer.heard_s
            self._actions.append(Changed(entry, how))
        if spread:
            self._spread(news)
        self._look_at_myself(now_s)
        self._settle(now_s)

    def _look_at_myself(self, now_s: float) -> None:
        """Others may know something of this rank that it does not."""
        found = self.view[self.identity]
        if found == self._mine or self._retired:
            return
        mine, standing = self._mine.standing, found.standing
        if standing.incarnation > mine.incarnation or found.record != self._mine.record:
            self._retire(f"another process serves as {self.identity}, incarnation {standing.incarnation}")
        elif standing.status is Status.LEFT:
            self._retire("it was told to leave")
        elif standing.status is Status.DEAD:
            self._wronged = True
            if now_s >= self._rejoined_s + self.timing.rejoin_s:
                self._rejoin(now_s)
        else:
            self._mine = found

    def _rejoin(self, now_s: float) -> None:
        self._wronged, self._rejoined_s = False, now_s
        was = self._mine.standing
        status = was.status if was.serves else Status.LIVE
        again = Standing(self.view[self.identity].standing.incarnation + 1, status, was.step if was.serves else 0)
        self._become(again, "was declared dead and lives: goes on under the next incarnation", now_s)

    def _stand(self, status: Status, how: str, now_s: float) -> None:
        self._become(Standing(self._mine.standing.incarnation, status), how, now_s)

    def _become(self, standing: Standing, how: str, now_s: float) -> None:
        self._mine = replace(self._mine, standing=standing)
        for entry in self.view.merge([self._mine]):
            self._actions.append(Changed(entry, how))
        self._spread([self._mine])
        self._settle(now_s)

    def _declare(self, identity: str, incarnation: int, status: Status, how: str, now_s: float) -> None:
        entry = self.view.get(identity)
        if entry is None or identity == self.identity or self._retired:
            return
        if entry.standing.incarnation != incarnation or entry.standing.status >= status:
            return
        over = replace(entry, standing=Standing(incarnation, status))
        self.view.merge([over])
        self._actions.append(Changed(over, how))
        self._note_hung(identity, now_s)
        self._spread([over])
        self._settle(now_s)

    def _spread(self, entries: Sequence[Entry]) -> None:
        self._actions += [SendView(identity, tuple(entries)) for identity in self.linked_peers]

    def _settle(self, now_s: float) -> None:
        self._changed_s = now_s
        if self.publishes:
            self._actions.append(Publish())

    def _retire(self, why: str) -> None:
        self._retired = True
        self._actions.append(Retire(why))

    def _ramp_on(self, now_s: float) -> float:
        if self._mine.standing.status is not Status.JOINING or self._wronged:
            return now_s + self.timing.ping_s
        step_s = self.timing.ramp_s / RAMP_STEPS
        self._ramp(int((now_s - self._began_s) / step_s), now_s)
        return self._began_s + (self._mine.standing.step + 1) * step_s

    def _ramp(self, step: int, now_s: float) -> None:
        incarnation, _, was = self._mine.standing
        if step >= RAMP_STEPS:
            self._become(Standing(incarnation, Status.LIVE), "has its whole share of the keys", now_s)
        elif step > was:
            self._become(Standing(incarnation, Status.JOINING, step), "takes more keys", now_s)
