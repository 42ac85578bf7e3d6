"""The host tier of the prefix cache: which named blocks are in host memory, and in which slot.

A named block is copied to the host just before its device block is reused, and leaves when it is fetched. If all slots
are full, the least recently stored block is overwritten. Names are compared as a whole: no digest is trusted alone.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from jpaged.errors import EngineError

NameT = TypeVar("NameT", bound=Hashable)


class HostTier(Generic[NameT]):
    """Slots 0 .. num_slots - 1 of host memory. Each slot stores one block."""

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise EngineError(f"a host tier needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self._slots: OrderedDict[NameT, int] = OrderedDict()  # least recently stored first
        self._free = list(reversed(range(num_slots)))

    @property
    def num_used(self) -> int:
        """Slots that store a block."""
        return len(self._slots)

    def has(self, name: NameT) -> bool:
        """Whether the block with this name is stored."""
        return name in self._slots

    def put(self, name: NameT) -> int | None:
        """Assign a slot to a block's name. Returns None if `take` has reserved every slot."""
        slot = self._slots.pop(name, None)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            elif self._slots:
                _, slot = self._slots.popitem(last=False)
            else:
                return None
        self._slots[name] = slot
        return slot

    def take(self, name: NameT) -> int:
        """Remove the name of a block to fetch. Returns its slot, which stays reserved until `free`."""
        return self._slots.pop(name)

    def free(self, slot: int) -> None:
        """Make a slot that was taken available again."""
        self._free.append(slot)

    def forget_all(self) -> None:
        """Empty all slots."""
        self._slots.clear()
        self._free = list(reversed(range(self.num_slots)))

    def check(self) -> None:
        """Raise EngineError unless every slot is either free or stores one block."""
        if sorted([*self._slots.values(), *self._free]) != list(range(self.num_slots)):
            raise EngineError(f"host tier: {len(self._slots)} slots used, {len(self._free)} free of {self.num_slots}")
