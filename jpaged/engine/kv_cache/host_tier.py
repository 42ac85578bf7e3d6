"""The host tier of the prefix cache: which named blocks and snapshots are in host memory, and in which slot.

A named block is copied to the host just before its device block is reused, and leaves when it is fetched. Snapshots of
recurrent layers come and go in the same way. Blocks and snapshots have slots of their own, and share one number of
bytes. Names are compared as a whole: no digest is trusted alone.

Without room, the entry of the least worth is dropped (GreedyDual-Size, Cao and Irani 1997). An entry is worth the
tokens that it saves for each of its bytes, plus the worth of the entry that was dropped last before it was stored. So
entries grow old. A snapshot is not stored in the place of entries that are worth more. A block always is: otherwise a
tier full of snapshots would never store a block, and no entry would grow old. Without snapshots all entries are alike:
the least recently stored block is dropped.
"""

import heapq
import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from jpaged.engine.step_plan import BlockMove
from jpaged.errors import EngineError

NameT = TypeVar("NameT", bound=Hashable)


class HostSizes(NamedTuple):
    """Bytes of the entries of a host tier, and the tokens that a block saves."""

    block_bytes: int = 1
    block_tokens: int = 1
    snapshot_bytes: int = 0  # 0: the tier stores no snapshots


BLOCKS_ALONE = HostSizes()


class StoredSnapshot(NamedTuple):
    """A snapshot in the host tier."""

    slot: int
    tokens: int   # tokens that it saves
    worth: float


class HostTier(Generic[NameT]):
    """Slots 0 .. num_slots - 1 of host memory. Each slot stores one block. Snapshots take the bytes of free slots."""

    def __init__(self, num_slots: int, sizes: HostSizes = BLOCKS_ALONE):
        if num_slots < 1:
            raise EngineError(f"a host tier needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self.sizes = sizes
        self._slots: OrderedDict[NameT, int] = OrderedDict()  # least recently stored first, which are worth least
        self._free = list(reversed(range(num_slots)))
        self._worths: dict[NameT, float] = {}  # of the blocks in `_slots`
        self._snapshots: dict[NameT, StoredSnapshot] = {}
        self._by_worth: list[tuple[float, int, NameT]] = []  # heap of (worth, count, name), also of dropped snapshots
        self._num_pushed = 0
        self._num_snapshot_slots = 0
        self._free_snapshots: list[int] = []
        self._worth = 0.0  # of the entry that was dropped last
        # slots that were in use at the last `take_drops`, or after it, and are free now
        self._released: set[tuple[BlockMove, int]] = set()

    @property
    def num_used(self) -> int:
        """Slots that store a block."""
        return len(self._slots)

    @property
    def num_snapshots(self) -> int:
        """Snapshots that are stored."""
        return len(self._snapshots)

    @property
    def num_free(self) -> int:
        """Blocks that fit into the free bytes."""
        return (self.num_slots * self.sizes.block_bytes - self._used_bytes) // self.sizes.block_bytes

    # -- blocks -------------------------------------------------------------------------------------------------

    def has(self, name: NameT) -> bool:
        """Whether the block with this name is stored."""
        return name in self._slots

    def put(self, name: NameT) -> int | None:
        """Assign a slot to a block's name. Returns None if `take` and `take_snapshot` have reserved every slot."""
        slot = self._slots.pop(name, None)
        if slot is None:
            if not self._make_room(self.sizes.block_bytes):
                return None
            slot = self._free.pop()
            self._released.discard((BlockMove.DROP, slot))
        self._slots[name] = slot
        self._worths[name] = self._worth + self.sizes.block_tokens / self.sizes.block_bytes
        return slot

    def take(self, name: NameT) -> int:
        """Remove the name of a block to fetch. Returns its slot, which stays reserved until `free`."""
        self._worths.pop(name, None)
        return self._slots.pop(name)

    def free(self, slot: int) -> None:
        """Make a slot that was taken available again."""
        self._free.append(slot)
        self._released.add((BlockMove.DROP, slot))

    # -- snapshots ----------------------------------------------------------------------------------------------

    def has_snapshot(self, name: NameT) -> bool:
        """Whether the snapshot with this name is stored."""
        return name in self._snapshots

    def put_snapshot(self, name: NameT, tokens: int) -> int | None:
        """Assign a slot to a snapshot's name. Returns None if nothing is to be copied: it is stored, or not worth it.

        tokens: that the snapshot saves.
        """
        stored = self._snapshots.get(name)
        if stored is not None:
            self._store(name, stored.slot, tokens)
            return None
        fits = self.sizes.snapshot_bytes <= self.num_slots * self.sizes.block_bytes
        if not fits or not self._make_room(self.sizes.snapshot_bytes, self._worth_of_snapshot(tokens)):
            return None
        if self._free_snapshots:
            slot = self._free_snapshots.pop()
            self._released.discard((BlockMove.DROP_STATE, slot))
        else:
            slot = self._num_snapshot_slots
            self._num_snapshot_slots += 1
        self._store(name, slot, tokens)
        return slot

    def take_snapshot(self, name: NameT) -> StoredSnapshot:
        """Remove the name of a snapshot to fetch. Its slot stays reserved until `free_snapshot`."""
        return self._snapshots.pop(name)

    def keep_snapshot(self, name: NameT, taken: StoredSnapshot) -> None:
        """Store a snapshot that was taken again, in its slot."""
        self._store(name, taken.slot, taken.tokens)

    def free_snapshot(self, slot: int) -> None:
        """Make a snapshot's slot that was taken available again."""
        self._free_snapshots.append(slot)
        self._released.add((BlockMove.DROP_STATE, slot))

    # -- both ---------------------------------------------------------------------------------------------------

    def take_drops(self) -> list[tuple[BlockMove, int, int]]:
        """Moves that free the memory of slots that were in use at the last call, or after it, and are free now."""
        released, self._released = self._released, set()
        return [(kind, slot, slot) for kind, slot in sorted(released)]

    def forget_all(self) -> None:
        """Empty all slots."""
        for name in list(self._slots):
            self.free(self.take(name))
        for name in list(self._snapshots):
            self.free_snapshot(self.take_snapshot(name).slot)
        self._free.sort(reverse=True)
        self._by_worth.clear()
        self._worth = 0.0

    def check(self) -> None:
        """Raise EngineError unless every slot is either free or stores one entry, and all fit into the bytes."""
        if sorted([*self._slots.values(), *self._free]) != list(range(self.num_slots)):
            raise EngineError(f"host tier: {len(self._slots)} slots used, {len(self._free)} free of {self.num_slots}")
        used = [stored.slot for stored in self._snapshots.values()]
        if sorted([*used, *self._free_snapshots]) != list(range(self._num_snapshot_slots)):
            raise EngineError(f"host tier: snapshots in slots {used}, free are {self._free_snapshots}")
        if self._used_bytes > self.num_slots * self.sizes.block_bytes:
            raise EngineError(f"host tier: {self._used_bytes} bytes used of {self.num_slots * self.sizes.block_bytes}")

    @property
    def _used_bytes(self) -> int:
        """Bytes of all slots that are not free."""
        blocks = self.num_slots - len(self._free)
        snapshots = self._num_snapshot_slots - len(self._free_snapshots)
        return blocks * self.sizes.block_bytes + snapshots * self.sizes.snapshot_bytes

    def _worth_of_snapshot(self, tokens: int) -> float:
        """Worth of a snapshot that saves `tokens` tokens, if it is stored now."""
        return self._worth + tokens / self.sizes.snapshot_bytes

    def _store(self, name: NameT, slot: int, tokens: int) -> None:
        worth = self._worth_of_snapshot(tokens)
        self._snapshots[name] = StoredSnapshot(slot, tokens, worth)
        self._num_pushed += 1
        heapq.heappush(self._by_worth, (worth, self._num_pushed, name))
        if len(self._by_worth) > 64 + 2 * len(self._snapshots):
            self._by_worth = [(each.worth, -i, name) for i, (name, each) in enumerate(self._snapshots.items())]
            heapq.heapify(self._by_worth)

    def _make_room(self, num_bytes: int, worth: float = sys.float_info.max) -> bool:
        """Drop entries until `num_bytes` are free. Returns False if no entry is left that is worth at most `worth`.

        Entries that were dropped by then stay dropped.
        """
        capacity = self.num_slots * self.sizes.block_bytes
        while capacity - self._used_bytes < num_bytes:
            block, snapshot = next(iter(self._slots), None), self._least_worthy()
            of_block = float("inf") if block is None else self._worths.get(block, 0.0)
            of_snapshot = float("inf") if snapshot is None else self._snapshots[snapshot].worth
            if min(of_block, of_snapshot) > worth:
                return False
            self._worth = max(self._worth, min(of_block, of_snapshot))
            if snapshot is not None and of_snapshot < of_block:
                self.free_snapshot(self.take_snapshot(snapshot).slot)
            elif block is not None:
                self.free(self.take(block))
        return True

    def _least_worthy(self) -> NameT | None:
        """The snapshot that is worth least; None: there is none."""
        heap = self._by_worth
        while heap:
            worth, _, name = heap[0]
            stored = self._snapshots.get(name)
            if stored is not None and stored.worth == worth:
                return name
            heapq.heappop(heap)
        return None
