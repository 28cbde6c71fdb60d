"""What must hold in every run, at every step of it or once all is quiet. Each says what it saw in one sentence."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtool.kv.block import BlockKey
from kvtool.kv.record import Entry, Holding, State
from kvtool.kv.store import Store
from kvtool.pool.base import BlockView, Outcome, PutResult
from kvtool.pool.memory import SlotMemory
from kvtool.sim.blocks import content, short
from kvtool.sim.disk import PAGE
from kvtool.sim.sched import Broken, Process
from kvtool.sim.shape import Shape
from kvtool.sim.world import World
from kvtool.transfer.peer import address_of

if TYPE_CHECKING:
    from kvtool.sim.client import ClientProcess
    from kvtool.sim.rank import RankProcess

WAIT_S = 5.0
"""No client here lets a lookup wait for longer."""
SLACK_S = 0.5
"""What a call may take beyond its budget."""
ACCOUNTS_EVERY, DEEP_EVERY = 4, 16
"""Steps of a rank between two looks at its accounts, and at all of its memory."""


class Oracles:
    """Always on. `ranks` is filled in by the run."""

    def __init__(self, world: World, shape: Shape) -> None:
        self.world, self.shape = world, shape
        self.ranks: list[RankProcess] = []
        self._by_process: dict[int, RankProcess] = {}
        self._steps = 0
        self.slowest_over_s = 0.0
        self._damaged: set[BlockKey] = set()
        self.stored: set[BlockKey] = set()

    def stepped(self, process: Process) -> None:
        """After every step of every process."""
        rank = self._by_process.get(process.pid)
        if rank is None:
            for rank in self.ranks:
                if rank.process is not None:
                    self._by_process[rank.process.pid] = rank
            self._by_process.setdefault(process.pid, None)  # type: ignore[arg-type]
            return
        store = rank.store
        if store is None or rank.process is not process:
            return
        self._steps += 1
        if self._steps % ACCOUNTS_EVERY == 0:
            self._accounted(rank, store)
        if self._steps % DEEP_EVERY == 0:
            self.memory_true(rank, store)

    # Wrong data

    def served(self, client: ClientProcess, key: BlockKey, found: bytes, block: BlockView) -> None:
        """No block is handed out under another's key, torn or stale."""
        self.world.journal.count(f"served {block.tier.value}/{block.path.value}")
        if found != content(key, self.shape.layout.block_size):
            wanted = content(key, self.shape.layout.block_size)
            first = next(at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise Broken(
                f"wrong block served: {client.name} read {short(key)} by {block.path.value} from {block.tier.value}, "
                f"whole as it was told, and byte {first} of {len(found)} is not the block's"
            )

    def memory_true(self, rank: RankProcess, store: Store) -> None:
        """Every block that is visible in DRAM has its own bytes: nobody wrote into a slot that was not his.

        But for one-sided writes: a network that delays one connection past the end of another can deliver a write after
        its slot was given away. Checksums find that (`served`); it is counted.
        """
        assert rank.rank is not None
        memory, size = rank.rank.tiers.memory, self.shape.layout.block_size
        for key, entry in store._index.items():
            if entry.state not in (State.COMMITTED, State.DEMOTING) or key in self._damaged:
                continue
            if memory.slot(entry.slot, size) != content(key, size):
                if self._written_remotely(rank, memory, entry):
                    self._damaged.add(key)
                    self.world.journal.count("late one-sided write into another block")
                    continue
                raise Broken(
                    f"foreign bytes in a block: {rank.name} shows {short(key)} in slot {entry.slot}, generation "
                    f"{entry.generation}, and the slot does not hold its bytes"
                )

    def _written_remotely(self, rank: RankProcess, memory: SlotMemory, entry: Entry) -> bool:
        assert rank.rank is not None and rank.process is not None
        since_s = entry.since_s - rank.process.clock_offset_s
        start = address_of(memory.view) + memory.data_at + entry.slot * memory.stride
        agents = [agent for agent in self.world.agents.values() if agent.process is rank.process]
        return any(
            at_s >= since_s - SLACK_S and start <= address < start + memory.stride
            for agent in agents
            for at_s, address, _ in agent.writes
        )

    # Accounts

    def _accounted(self, rank: RankProcess, store: Store) -> None:
        """Every slot in use is accounted for, and has one holder."""
        holders: dict[int, object] = {}
        for key, entry in store._index.items():
            if entry.slot >= 0:
                self._one_holder(rank, holders, entry.slot, key)
        for slot in store._quarantine:
            self._one_holder(rank, holders, slot, "the quarantine")
        for entry in store._moves.values():
            if entry.doomed and entry.slot >= 0:
                self._one_holder(rank, holders, entry.slot, f"doomed {short(entry.key)}")
        self._capped(rank, store, holders)
        lost = store.lost_slots()
        if lost:
            raise Broken(f"lost slots: {rank.name} has {lost} slots in use that nothing accounts for")
        self._timed(rank, store)

    def _capped(self, rank: RankProcess, store: Store, holders: dict[int, object]) -> None:
        """Never more slots than there are, in either tier, nor more of what is remembered about blocks."""
        for tier, cap, used in (
            ("DRAM", store.dram.count, len(holders)),
            ("file", store.files.count, sum(entry.file_slot >= 0 for entry in store._index.values())),
        ):
            if used > cap:
                raise Broken(f"cap broken: {rank.name} has blocks in {used} {tier} slots, and the cap is {cap}")
        beyond = [slot for slot in holders if slot >= store.dram.count]
        beyond += [entry.file_slot for entry in store._index.values() if entry.file_slot >= store.files.count]
        if beyond:
            raise Broken(f"cap broken: {rank.name} gave out slot {beyond[0]}, which lies beyond its cap")
        if len(store._index) > store.dram.count + store.files.count:
            raise Broken(f"cap broken: {rank.name} knows {len(store._index)} blocks, more than it has slots for")

    def _timed(self, rank: RankProcess, store: Store) -> None:
        """Nothing is held for longer than it was granted for: nobody renews what ends by the clock."""
        for lease in store.leases:
            if lease.lapses_at_s - lease.granted_at_s > store.leases.term_s + WAIT_S:
                raise Broken(
                    f"lease renewed: {rank.name} granted read {lease.read} {store.leases.term_s} s, and it lasts "
                    f"{lease.lapses_at_s - lease.granted_at_s:.3f} s by now"
                )
        for entry in store._reserved.values():
            if entry.deadline_s - entry.since_s > store.reserve_term_s + SLACK_S:
                raise Broken(f"reservation renewed: {rank.name}'s of slot {entry.slot}")

    def _one_holder(self, rank: RankProcess, holders: dict[int, object], slot: int, who: object) -> None:
        if slot in holders:
            names = [short(one) if isinstance(one, bytes) else one for one in (holders[slot], who)]
            raise Broken(f"slot given twice: {rank.name}'s slot {slot} is held by {names[0]} and by {names[1]}")
        holders[slot] = who

    # Time

    def bounded(self, what: str, budget_s: float, took_s: float) -> None:
        """Each call of a client ends within its budget."""
        self.slowest_over_s = max(self.slowest_over_s, took_s - budget_s)
        if took_s > budget_s + SLACK_S:
            raise Broken(f"unbounded wait: {what} took {took_s:.3f} s of a budget of {budget_s} s")

    def put(self, client: ClientProcess, key: BlockKey, result: PutResult, transient_s: float | None) -> None:
        self.world.journal.count(f"put {result.outcome.value}")
        if result.outcome is Outcome.STORED and not any(key in rank.committed for rank in self.ranks):
            raise Broken(f"lost ack: {client.name} was told that {short(key)} is stored, and no rank ever stored it")
        if result.outcome is Outcome.STORED and self.shape.calm and transient_s is None:
            self.stored.add(key)
        if result.durable:
            self.world.journal.count("put durable")
            for rank in self.ranks:
                entry = rank.store._index.get(key) if rank.store is not None else None
                if entry is not None and entry.file_slot >= 0:
                    rank.acked.add(key)
        if result.outcome in (Outcome.REFUSED, Outcome.FAILED) and not result.reason:
            raise Broken(f"silent refusal: {client.name} was not told why {short(key)} was {result.outcome.value}")
        if self.shape.calm and result.outcome not in (Outcome.STORED, Outcome.DUPLICATE):
            raise Broken(f"refused without need: {client.name} put {short(key)} in a calm pool: {result.reason}")

    # Files

    def died(self, rank: RankProcess) -> None:
        """What the file of a rank that dies now must still have: all that was written, and after a power cut all that
        a client was told is durable."""
        if rank.rank is None:
            return
        self._tally(rank.rank.tiers.store)
        if not self.shape.file_slots:
            return
        index = rank.rank.tiers.store._index
        filed = {key for key, entry in index.items() if entry.file_slot >= 0 and entry.state is not State.DEMOTING}
        rank.acked &= filed
        rank.kept = set(rank.acked) if rank.power_cut else filed

    def _tally(self, store: Store) -> None:
        """Coverage: how often each rule spoke."""
        for rule, count in asdict(store.counts).items():
            if isinstance(count, int) and count:
                self.world.journal.count(f"rule: {rule}", count)

    def recovered(self, rank: RankProcess, store: Store) -> None:
        """A rank starts again, and has found what its file has."""
        if not self.shape.file_slots:
            return
        platter, kept, rank.kept = rank.platter, rank.kept, set()
        missing = sorted(kept - set(store._index))
        self.world.journal.log("recovered", rank.name, len(store._index), "blocks of", len(kept))
        self.world.journal.count("rank recovered blocks", len(store._index))
        if missing and platter.honest:
            raise Broken(
                f"durable block lost: {rank.name} died with {len(kept)} blocks in its file that had to last, and "
                f"{len(missing)} of them are not there again, such as {short(missing[0])}"
            )
        rank.acked &= set(store._index)

    def files_true(self, rank: RankProcess, store: Store) -> None:
        """On a disk that never failed, every file copy is the block's."""
        assert rank.rank is not None
        platter, size = rank.platter, self.shape.layout.block_size
        if rank.rank.files is None or not platter.honest or platter.cuts:
            return
        stride = rank.rank.files.stride
        for key, entry in store._index.items():
            if entry.file_slot >= 0 and entry.state in (State.COMMITTED, State.FILED):
                first = (entry.file_slot + 1) * stride // PAGE + 1
                raw = b"".join(
                    platter.pages.get(number, bytes(PAGE)) for number in range(first, first + -(-size // PAGE))
                )
                if raw[:size] != content(key, size):
                    raise Broken(
                        f"foreign bytes in a file: {rank.name} has {short(key)} in file slot {entry.file_slot}, and "
                        "the bytes there are not the block's"
                    )

    # Membership and copies

    def agreed(self, epoch: int) -> bool:
        return all(rank.rank.members.epoch == epoch for rank in self.ranks if rank.lives and rank.rank is not None)

    def converged(self, epoch_of_client: int) -> None:
        """All that live know the same view, and so does a client that has just asked them."""
        epochs = {rank.name: rank.rank.members.epoch for rank in self.ranks if rank.lives and rank.rank is not None}
        if len({*epochs.values(), epoch_of_client}) > 1:
            raise Broken(
                f"views differ: long after all is healed ranks know epochs {epochs}, a client {epoch_of_client}"
            )
        serving = {rank.number for rank in self.ranks if rank.lives}
        for rank in self.ranks:
            if rank.lives and rank.rank is not None:
                known = {one.rank for one in rank.rank.members.state.ranks if one.alive}
                if known != serving:
                    raise Broken(f"view is wrong: ranks {sorted(serving)} live, and {rank.name} knows {sorted(known)}")

    def copied(self) -> None:
        """In a calm pool with room for all, each block is on as many ranks as it was wanted on."""
        wanted = min(self.shape.copies, len(self.ranks))
        for key in sorted(self.stored):
            count = sum(rank.store is not None and key in rank.store._index for rank in self.ranks)
            if count < wanted:
                raise Broken(f"too few copies: {short(key)} is on {count} ranks of a calm pool, {wanted} were wanted")

    # The end

    def _held(self, rank: RankProcess, store: Store) -> list[Holding]:
        assert rank.process is not None
        return store.audit(self.world.sched.now_s + rank.process.clock_offset_s)

    @property
    def nothing_held(self) -> bool:
        stores = [(rank, rank.store) for rank in self.ranks]
        return not any(self._held(rank, store) for rank, store in stores if store is not None)

    def quiet(self) -> None:
        """Faults healed, clients gone, every term over: nobody holds anything."""
        for rank in self.ranks:
            store = rank.store
            if store is None:
                continue
            self._tally(store)
            held = self._held(rank, store)
            if held:
                lines = ", ".join(f"{line.count} {line.kind} of owner {line.owner}" for line in held)
                raise Broken(f"leak: nobody is left, and {rank.name} still holds {lines}")
            resident = sum(entry.slot >= 0 for entry in store._index.values())
            if store.dram.used != resident:
                raise Broken(f"leak: {rank.name} uses {store.dram.used} slots for {resident} blocks")
            if len(store.leases) or store.leases.held_slots:
                raise Broken(f"leak: {rank.name} counts leases on {store.leases.held_slots} slots, and none is granted")
            self.memory_true(rank, store)
            self.files_true(rank, store)
