"""Slots: a tier's room, counted out one block at a time, with a hard cap.

The number of slots is the cap; there is no way to make one more. Every slot in use has an owner's word attached, so a
leak has a name, and giving back what is free already is our own bug and asserts. Each time a slot is given out its
generation grows, before the new writer hears of it: whoever still looks at the slot under the old generation can tell
that the bytes are no longer his.
"""

from __future__ import annotations


class SlotAllocator:
    """`count` slots of one tier, the most recently freed first (they are warm in the cache)."""

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"a tier cannot have {count} slots")
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._use: list[str | None] = [None] * count
        self._generation = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def take(self, use: str) -> int | None:
        """A free slot under its next generation, or None when the tier is full."""
        if not self._free:
            return None
        slot = self._free.pop()
        assert self._use[slot] is None, f"slot {slot} was free and in use ({self._use[slot]})"
        self._use[slot] = use
        self._generation[slot] += 1
        return slot

    def claim(self, slots: set[int], use: str) -> None:
        """Take these free slots: what was in them before a restart is still there."""
        for slot in slots:
            assert self._use[slot] is None, f"slot {slot} is in use ({self._use[slot]})"
            self._use[slot] = use
        self._free = [slot for slot in self._free if slot not in slots]

    def give(self, slot: int) -> None:
        assert self._use[slot] is not None, f"slot {slot} is free already"
        self._use[slot] = None
        self._free.append(slot)

    def generation(self, slot: int) -> int:
        return self._generation[slot]

    def use(self, slot: int) -> str | None:
        """What the slot is used for, or None while it is free."""
        return self._use[slot]

    def retag(self, slot: int, use: str) -> None:
        assert self._use[slot] is not None, f"slot {slot} is free"
        self._use[slot] = use
