"""Slots for the state of recurrent layers: one for each row, and snapshots that later requests continue from.

Called by: the scheduler, when rows start, fork, pass a block boundary, or leave; `PrefixFinder`.
Owns: the names of snapshots, and the copies between slots that the device runs before the next step.
Never: copies a state itself.

The state of a sequence cannot be cut: it belongs to one number of tokens. So a request can use the KV of a prefix only
if there is a snapshot at its end. A snapshot is a copy of a row's state when a number of whole blocks is computed. Its
name is that of the last of these blocks, which depends on all tokens before. Snapshots are taken

1. at the last whole block of a prompt, and every `interval` blocks of a prompt. A chunk ends there (`chunk_size`),
2. where a request leaves a prefix whose KV was found, but no state: the next request with this prefix finds both,
3. at every block boundary of an answer. Only the last one stays, and those at a multiple of `interval`.

Without a free slot, the least recently used snapshot is overwritten. A snapshot of tokens in flight is *pending*: it
gets its name when they are known, at the latest when the request leaves its row.

While drafts of a row are in flight, only the device knows the length of the row, and its state. So a row of a verify
step gets a *reserved* slot, if it may reach a block boundary. The device writes the state there at the boundary. When
the step arrives, the slot becomes the pending snapshot, or is free again. Rejected drafts change no state.
"""

from collections import OrderedDict
from collections.abc import Iterable

from jpaged.engine.kv_cache.block_pool import BlockName
from jpaged.engine.kv_cache.block_table import NEVER
from jpaged.engine.request import Request
from jpaged.engine.step_plan import BlockMove, RecurrentSizes
from jpaged.errors import EngineError


class StateSlots:
    """Slots 0 .. num_rows - 1 are of the rows. The others are for snapshots."""

    def __init__(self, sizes: RecurrentSizes, block_size: int):
        self._size = block_size
        self._interval = sizes.interval
        self._slots = range(sizes.num_rows, sizes.num_rows + sizes.num_snapshots)
        self._named: OrderedDict[BlockName, int] = OrderedDict()  # least recently used first
        self._free = list(reversed(self._slots))
        self._due: list[tuple[BlockMove, int, int]] = []   # copies before the next step, in order
        self._late: list[tuple[BlockMove, int, int]] = []  # copies after it
        self._reserved: set[int] = set()  # of verify steps in flight

    @property
    def num_snapshots(self) -> int:
        """Snapshots that requests can find."""
        return len(self._named)

    # -- rows ---------------------------------------------------------------------------------------------------

    def fork(self, parent: Request, fork: Request, *, after_step: bool) -> None:
        """Copy a row's state into another row. after_step: the step that is being planned computes it."""
        move = (BlockMove.STATE, parent.schedule.row, fork.schedule.row)
        (self._late if after_step else self._due).append(move)

    def restore(self, request: Request) -> None:
        """Copy the snapshot at the end of a started request's prefix into its row."""
        blocks = request.schedule.num_computed // self._size
        if blocks:
            name = self._name(request, blocks)
            self._due.append((BlockMove.STATE, self._named[name], request.schedule.row))
            self._named.move_to_end(name)

    def take_moves(self) -> list[tuple[BlockMove, int, int]]:
        """Copies before the step that is being planned, in order: (kind, from slot, to slot)."""
        moves, self._due, self._late = self._due, self._late, []
        return moves

    # -- snapshots ----------------------------------------------------------------------------------------------

    def longest(self, request: Request, blocks: int) -> int:
        """Largest number of blocks, at most `blocks`, with a snapshot at their end."""
        if blocks and self._named:
            names = request.kv.names(request.token_ids, blocks, self._size)
            return next((count for count in range(blocks, 0, -1) if names[count - 1] in self._named), 0)
        return 0

    def chunk_size(self, request: Request, done: int, count: int) -> int:
        """Tokens of a chunk of up to `count` tokens after the first `done`: it ends where a snapshot is wanted.

        0 if this step has a chunk already that ends there.
        """
        if not self._slots:
            return count
        if done > request.schedule.num_computed and self._wants(request, done):
            return 0
        first, end = done // self._size + 1, (done + count) // self._size
        ends = (blocks * self._size for blocks in range(first, end + 1))
        return next((tokens - done for tokens in ends if self._wants(request, tokens)), count)

    def note_chunk(self, request: Request) -> None:
        """Take a snapshot before the next chunk of a request, if one is wanted there."""
        if self._wants(request, request.schedule.num_computed) and not request.schedule.row_is_new:
            self._save(request)

    def note_decode(self, request: Request) -> None:
        """Take a snapshot before a decode at a block boundary, in place of the one at the boundary before."""
        kv, blocks = request.kv, request.schedule.num_computed // self._size
        if kv.num_indexed_blocks == NEVER:  # computed with old weights in part
            return
        if request.schedule.num_drafts_in_flight:  # the row may be before the boundary
            return
        if kv.snapshot_blocks % self._interval == 0:
            self._settle(request)
        slot = self._take() if kv.snapshot_slot is None else kv.snapshot_slot
        if slot is not None:
            kv.snapshot_slot, kv.snapshot_blocks = slot, blocks
            self._due.append((BlockMove.STATE, request.schedule.row, slot))

    def reserve(self, request: Request) -> int | None:
        """Slot for the state at the last block boundary that a row of the planned verify step reaches.

        None: it reaches none, or there is no slot. `note_verified` or `forget_reserved` frees the slot.
        """
        schedule = request.schedule
        certain = schedule.num_computed - schedule.num_drafts_in_flight  # after the step, without any draft
        if (certain - 1) // self._size == schedule.num_computed // self._size or request.kv.num_indexed_blocks == NEVER:
            return None
        slot = self._take()
        if slot is not None:
            self._reserved.add(slot)
        return slot

    def note_verified(self, request: Request, slot: int, accepted: int | None) -> None:
        """Note that a verify step with a reserved slot has arrived. The request has none of its tokens yet.

        accepted: drafts of the row. None: the request does not run, or its results are dropped.
        """
        self._reserved.remove(slot)
        kv, known = request.kv, len(request.token_ids)
        if accepted is None or (known + accepted) // self._size == (known - 1) // self._size:
            self._free.append(slot)
            return
        if kv.snapshot_slot is not None and kv.snapshot_blocks % self._interval:
            self._free.append(kv.snapshot_slot)
            kv.snapshot_slot = None
        self._settle(request)
        kv.snapshot_slot, kv.snapshot_blocks = slot, (known + accepted) // self._size

    def forget_reserved(self) -> None:
        """Free the slots of verify steps that will not arrive."""
        self._free += self._reserved
        self._reserved.clear()

    def leave(self, request: Request) -> None:
        """Take a snapshot of a request that leaves its row at a block boundary, and name its pending one."""
        computed = request.schedule.num_computed
        if computed and computed % self._size == 0 and computed <= len(request.token_ids):  # no drafts are in flight
            self._save(request)
        self._settle(request)

    def forget_all(self) -> None:
        """Forget all snapshots. Pending ones are dropped when their requests leave."""
        self._free += self._named.values()
        self._named.clear()

    def check(self, running: Iterable[Request]) -> None:
        """Raise EngineError unless every slot is free, or has one snapshot."""
        pending = [r.kv.snapshot_slot for r in running if r.kv.snapshot_slot is not None]
        if sorted([*self._free, *self._named.values(), *pending, *self._reserved]) != list(self._slots):
            raise EngineError(
                f"state slots {self._slots}: free {self._free}, named {list(self._named.values())}, pending {pending}, "
                f"reserved {sorted(self._reserved)}"
            )

    def _wants(self, request: Request, tokens: int) -> bool:
        """Whether a prompt's state is kept when `tokens` tokens are computed."""
        blocks = tokens // self._size
        if not self._slots or not blocks or tokens % self._size:
            return False
        last = (len(request.token_ids) - 1) // self._size
        return blocks in (last, request.kv.branch_blocks) or (blocks < last and blocks % self._interval == 0)

    def _save(self, request: Request) -> None:
        """Snapshot of a row's state, whose tokens are all known."""
        if request.kv.num_indexed_blocks == NEVER or not self._slots:
            return
        name = self._name(request, request.schedule.num_computed // self._size)
        if name in self._named:
            self._named.move_to_end(name)
        elif (slot := self._take()) is not None:
            self._named[name] = slot
            self._due.append((BlockMove.STATE, request.schedule.row, slot))

    def _settle(self, request: Request) -> None:
        """Name a request's pending snapshot. Drop it if its tokens are not known, or its name exists."""
        kv = request.kv
        if kv.snapshot_slot is None:
            return
        known = kv.snapshot_blocks * self._size <= len(request.token_ids) and kv.num_indexed_blocks != NEVER
        name = self._name(request, kv.snapshot_blocks) if known else None
        if name is None or name in self._named:
            self._free.append(kv.snapshot_slot)
        else:
            self._named[name] = kv.snapshot_slot
        kv.snapshot_slot = None

    def _take(self) -> int | None:
        """A slot to write to; None if all have pending snapshots."""
        if self._free:
            return self._free.pop()
        return self._named.popitem(last=False)[1] if self._named else None

    def _name(self, request: Request, blocks: int) -> BlockName:
        return request.kv.name(request.token_ids, blocks - 1, 0, self._size)
