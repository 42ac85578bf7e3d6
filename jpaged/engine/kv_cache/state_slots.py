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

Without a free slot, the least recently used snapshot is overwritten. With a host tier it is copied there first, if
moving it takes less time than computing the tokens that it saves: those since the last snapshot before it. A request
whose prefix ends at a snapshot of the host tier gets it into its row, and the snapshot has a slot on the device again.
A snapshot of tokens in flight is *pending*: it gets its name when they are known, at the latest when the request leaves
its row.

While drafts of a row are in flight, only the device knows the length of the row, and its state. So a row of a verify
step gets a *reserved* slot, if it may reach a block boundary. The device writes the state there at the boundary. When
the step arrives, the slot becomes the pending snapshot, or is free again. Rejected drafts change no state.
"""

from collections import OrderedDict
from collections.abc import Iterable

from jpaged.engine.kv_cache.block_pool import BlockName
from jpaged.engine.kv_cache.block_table import NEVER
from jpaged.engine.kv_cache.host_tier import BLOCKS_ALONE, HostSizes, HostTier
from jpaged.engine.request import Request
from jpaged.engine.step_plan import EVERYTHING, BlockMove, RecurrentSizes, TransferCosts
from jpaged.errors import EngineError

# Maximum number of snapshots that one step moves in one direction. Each takes the device memory of a state for the time
# of its move: 154 MB for Qwen3.5 27B. More snapshots are lost; more requests wait for the next step.
MAX_STATES_MOVED = 4


def host_sizes(sizes: RecurrentSizes | None, block_size: int) -> HostSizes:
    """Bytes of the entries of the host tier. sizes: None without recurrent layers."""
    return BLOCKS_ALONE if sizes is None else HostSizes(sizes.block_bytes, block_size, sizes.slot_bytes)


class StateSlots:
    """Slots 0 .. num_rows - 1 are of the rows. The others are for snapshots."""

    def __init__(
        self, sizes: RecurrentSizes, block_size: int, tier: HostTier[BlockName] | None = None,
        costs: TransferCosts | None = None,
    ):  # fmt: skip
        """tier: receives snapshots that are overwritten; None: there is none. costs: None: moving costs nothing."""
        self._size = block_size
        self._interval = sizes.interval
        self._slots = range(sizes.num_rows, sizes.num_rows + sizes.num_snapshots)
        self._tier, self._costs = tier, costs
        self._named: OrderedDict[BlockName, int] = OrderedDict()  # least recently used first
        self._saves: dict[BlockName, int] = {}  # tokens that each named snapshot saves
        self._free = list(reversed(self._slots))
        self._due: list[tuple[BlockMove, int, int]] = []   # copies before the next step, in order
        self._late: list[tuple[BlockMove, int, int]] = []  # copies after it
        self._reserved: set[int] = set()  # of verify steps in flight
        self._num_fetched = self._num_kept = 0  # snapshots in `_due` that come from the host, and that go there
        self._drop_host_snapshots()  # of the object before this one

    @property
    def num_snapshots(self) -> int:
        """Snapshots that requests can find."""
        return len(self._named)

    # -- rows ---------------------------------------------------------------------------------------------------

    def fork(self, parent: Request, fork: Request, *, after_step: bool) -> None:
        """Copy a row's state into another row. after_step: the step that is being planned computes it."""
        fork.kv.saved_blocks = parent.kv.saved_blocks
        move = (BlockMove.STATE, parent.schedule.row, fork.schedule.row)
        (self._late if after_step else self._due).append(move)

    def restore(self, request: Request) -> None:
        """Copy the snapshot at the end of a started request's prefix into its row."""
        kv, row, blocks = request.kv, request.schedule.row, request.schedule.num_computed // self._size
        kv.saved_blocks = blocks
        if not blocks:
            return
        name = self._name(request, blocks)
        if kv.fetched is None or self._tier is None:
            self._due.append((BlockMove.STATE, self._named[name], row))
            self._named.move_to_end(name)
            return
        fetched, kv.fetched = kv.fetched, None
        self._due.append((BlockMove.STATE_TO_DEVICE, fetched.slot, row))
        self._num_fetched += 1
        if not self._free and not self._named:
            self._tier.keep_snapshot(name, fetched)
            return
        self._tier.free_snapshot(fetched.slot)  # a snapshot that moves into it does so after the move above
        slot = self._take()
        if slot is not None:
            self._put_name(name, slot, fetched.tokens)
            self._due.append((BlockMove.STATE, row, slot))

    def take_moves(self) -> list[tuple[BlockMove, int, int]]:
        """Copies before the step that is being planned, in order: (kind, from slot, to slot)."""
        moves, self._due, self._late = self._due, self._late, []
        self._num_fetched = self._num_kept = 0
        return moves

    # -- snapshots ----------------------------------------------------------------------------------------------

    def longest(self, request: Request, blocks: int, *, on_host: bool) -> int:
        """Largest number of blocks, at most `blocks`, with a snapshot at their end. on_host: also of the host tier."""
        tier = self._tier if on_host else None
        if not blocks or not (self._named or (tier is not None and tier.num_snapshots)):
            return 0
        names = request.kv.names(request.token_ids, blocks, self._size)
        for count in range(blocks, 0, -1):
            name = names[count - 1]
            if name in self._named or (tier is not None and tier.has_snapshot(name)):
                return count
        return 0

    def has(self, request: Request, blocks: int) -> bool:
        """Whether the device has a request's state after a number of blocks: a snapshot, or 0 blocks."""
        return not blocks or self._name(request, blocks) in self._named

    @property
    def can_fetch(self) -> bool:
        """Whether another request may start from a snapshot of the host tier in the step that is being planned."""
        return self._num_fetched < MAX_STATES_MOVED

    def fetch(self, request: Request, blocks: int) -> None:
        """Reserve the snapshot of the host tier after `blocks` blocks of a request, until `restore`."""
        if self._tier is None:
            raise EngineError("a snapshot is fetched, but there is no host tier")
        request.kv.fetched = self._tier.take_snapshot(self._name(request, blocks))

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
        self._saves.clear()
        self._drop_host_snapshots()

    def check(self, running: Iterable[Request]) -> None:
        """Raise EngineError unless every slot is free, or has one snapshot."""
        pending = [r.kv.snapshot_slot for r in running if r.kv.snapshot_slot is not None]
        if sorted([*self._free, *self._named.values(), *pending, *self._reserved]) != list(self._slots):
            raise EngineError(
                f"state slots {self._slots}: free {self._free}, named {list(self._named.values())}, pending {pending}, "
                f"reserved {sorted(self._reserved)}"
            )
        if self._named.keys() != self._saves.keys():
            raise EngineError(f"{len(self._named)} snapshots have names, {len(self._saves)} have a worth")

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
        blocks = request.schedule.num_computed // self._size
        name = self._name(request, blocks)
        if name in self._named:
            self._named.move_to_end(name)
        elif (slot := self._take()) is not None:
            self._put_name(name, slot, self._saved(request, blocks))
            self._due.append((BlockMove.STATE, request.schedule.row, slot))
        request.kv.saved_blocks = blocks

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
            self._put_name(name, kv.snapshot_slot, self._saved(request, kv.snapshot_blocks))
            kv.saved_blocks = kv.snapshot_blocks
        kv.snapshot_slot = None

    def _take(self) -> int | None:
        """A slot to write to; None if all have pending snapshots. Its snapshot goes to the host tier, if that pays."""
        if self._free:
            return self._free.pop()
        if not self._named:
            return None
        name, slot = self._named.popitem(last=False)
        tokens = self._saves.pop(name)
        tier, costs = self._tier, self._costs
        pays = tier is not None and (costs is None or costs.keeping_state_pays(tokens))
        if tier is not None and pays and self._num_kept < MAX_STATES_MOVED:
            host_slot = tier.put_snapshot(name, tokens)
            if host_slot is not None:
                self._due.append((BlockMove.STATE_TO_HOST, slot, host_slot))
                self._num_kept += 1
        return slot

    def _drop_host_snapshots(self) -> None:
        if self._tier is not None:
            self._due.append((BlockMove.DROP_STATE, EVERYTHING, EVERYTHING))

    def _saved(self, request: Request, blocks: int) -> int:
        """Tokens that a snapshot after `blocks` blocks of a request saves: those since the snapshot before it."""
        return max(blocks - request.kv.saved_blocks, 1) * self._size

    def _put_name(self, name: BlockName, slot: int, tokens: int) -> None:
        self._named[name] = slot
        self._saves[name] = tokens

    def _name(self, request: Request, blocks: int) -> BlockName:
        return request.kv.name(request.token_ids, blocks - 1, 0, self._size)
