"""What must hold in every run, at every step of it or once all is quiet. Each says what it saw in one sentence."""

from __future__ import annotations

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
        lost = store.lost_slots()
        if lost:
            raise Broken(f"lost slots: {rank.name} has {lost} slots in use that nothing accounts for")
        holders: dict[int, object] = {}
        for key, entry in store._index.items():
            if entry.slot >= 0:
                self._one_holder(rank, holders, entry.slot, key)
        for slot in store._quarantine:
            self._one_holder(rank, holders, slot, "the quarantine")
        for entry in store._moves.values():
            if entry.doomed and entry.slot >= 0:
                self._one_holder(rank, holders, entry.slot, f"doomed {short(entry.key)}")
        if store.dram.used > store.dram.count or store.files.used > store.files.count:
            raise Broken(f"cap broken: {rank.name} uses {store.dram.used} of {store.dram.count} slots")

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
        if rank.rank is None or not self.shape.file_slots:
            return
        index = rank.rank.tiers.store._index
        filed = {key for key, entry in index.items() if entry.file_slot >= 0 and entry.state is not State.DEMOTING}
        rank.acked &= filed
        rank.kept = set(rank.acked) if rank.power_cut else filed

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
