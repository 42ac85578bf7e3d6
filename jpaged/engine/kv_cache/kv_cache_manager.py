"""Block tables of requests: find a prefix, fork, grow with the tokens, free.

Called by: the scheduler and its parts; `Engine` for reset, new weights and KV handover; the simulator. Other threads
only read counts.
Owns: the block tables in `Request.kv`; `BlockNamer` has the names.
Never: copies KV. It records moves, which the next plan or a handover takes to the device.

A request has one block table per kv_group (`jpaged.kv_groups`). All block tables draw from one pool. They grow
together, by one block in every kv_group at a time. In a kv_group with a sliding window a request holds only the blocks
that its window still reaches. The other blocks are freed as it advances, and keep their names like any free block.

A fork shares all blocks of its parent, including the last one, which may be partly full. The first of the two to write
to that block gets a copy of its own (copy on write). The last request that holds the block writes to it directly.

The scheduler writes `Request.schedule.num_computed`, which this class reads.
"""

import sys
from collections.abc import Sequence

from jpaged.engine.kv_cache.block_namer import BlockNamer
from jpaged.engine.kv_cache.block_pool import BlockPool
from jpaged.engine.kv_cache.block_table import FREED, NEVER, BlockTable
from jpaged.engine.kv_cache.host_tier import HostTier
from jpaged.engine.kv_cache.kv_integrity import check_block_tables
from jpaged.engine.kv_cache.prefix_finder import ON_HOST, Prefix, PrefixFinder
from jpaged.engine.kv_cache.sliding_windows import SlidingWindows
from jpaged.engine.kv_cache.state_slots import StateSlots, host_sizes
from jpaged.engine.request import Request
from jpaged.engine.step_plan import RecurrentSizes, TransferCosts
from jpaged.errors import EngineError
from jpaged.kv_groups import max_blocks


class KVCacheManager:
    """Keeps the block tables of all running requests, over one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        max_chunk: int = 1,
        host_slots: int = 0,
        transfer_costs: TransferCosts | None = None,
        weight_version: int = 0,
        recurrent_sizes: RecurrentSizes | None = None,
    ):
        """Create an empty pool.

        windows:        sliding window per kv_group; None: the kv_group keeps the KV of all tokens.
        max_chunk:      maximum number of tokens of one request in a step.
        host_slots:     blocks that fit into the host tier; 0: there is none.
        transfer_costs: measured cost of moving blocks to the host and back; None: moving costs nothing.
        weight_version: number of weight updates before. It is part of every block's name.
        recurrent_sizes:    slots for the state of recurrent layers; None: the model has no such layers.
        """
        pays = transfer_costs is None or transfer_costs.keeping_pays(block_size)
        tier = None
        if host_slots and pays:
            tier = HostTier(host_slots, host_sizes(recurrent_sizes, block_size))
        self.pool = BlockPool(num_blocks, len(windows), tier)
        self.states = None
        if recurrent_sizes is not None:
            self.states = StateSlots(recurrent_sizes, block_size, tier, transfer_costs)
            self.pool.state_slots = self.states
            self.pool.drop_host_blocks()  # of the manager before this one; `StateSlots` drops its snapshots
        self.block_size = block_size
        self.windows = tuple(windows)
        self.num_held = 0    # blocks in all block tables; a shared block counts once per table
        self.num_empty = 0   # slots of all block tables without a computed token
        self._sliding = SlidingWindows(self.windows, block_size)
        self.names = BlockNamer(self.pool, block_size, weight_version)
        self.prefixes = PrefixFinder(self.pool, self._sliding, transfer_costs)
        self._max_chunk = max_chunk

    @property
    def num_kv_groups(self) -> int:
        """Block tables per request."""
        return len(self.windows)

    def max_blocks(self, num_tokens: int) -> int:
        """Largest number of blocks, in all kv_groups, that a request holds while it grows to `num_tokens` tokens."""
        return max_blocks(self.windows, num_tokens, chunk=self._max_chunk, block_size=self.block_size)

    @property
    def waste(self) -> float:
        """Share of the slots of all block tables without a computed token."""
        held = self.num_held  # once: other threads read metrics
        return self.num_empty * len(self.windows) / (held * self.block_size) if held else 0.0

    # -- start and end ------------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> Prefix:
        """The longest cached prefix of the request's known tokens; see `PrefixFinder.find`."""
        return self.prefixes.find(request)

    def can_start(self, prefix: Prefix, num_tokens: int, headroom: int = 0) -> bool:
        """Whether a request of `num_tokens` tokens fits into the free blocks, and leaves `headroom` of them free."""
        free_in_prefix = sum(self.pool.num_free_among(block for block in tail if block >= 0) for tail in prefix.tails)
        return self.max_blocks(num_tokens) - prefix.num_on_device + free_in_prefix + headroom <= self.pool.num_free

    def start(self, request: Request, prefix: Prefix) -> int:
        """Create a request's block tables from a prefix. Returns the number of tokens that need no computation."""
        kv = request.kv
        if kv.block_tables:
            raise EngineError(f"request {request.request_id} starts, but holds {kv.num_held} blocks")
        for tail in prefix.tails:
            self.pool.share(block for block in tail if block >= 0)
        if self.states is not None and prefix.state_on_host:
            self.states.fetch(request, prefix.num_blocks)  # first: blocks that move to the host may take its place
        if prefix.num_on_host:
            self._fetch(request, prefix)
        for tail in prefix.tails:
            missing = prefix.num_blocks - len(tail)
            kv.block_tables.append(BlockTable([FREED] * missing + tail, missing))
        kv.num_held = sum(len(tail) for tail in prefix.tails)
        kv.num_slots = prefix.num_blocks * self.block_size
        kv.num_indexed_blocks = prefix.num_blocks
        kv.branch_blocks = prefix.branch_blocks
        kv.release_at = self._sliding.release_at(kv.block_tables)
        self.num_held += kv.num_held
        return kv.num_slots

    def _fetch(self, request: Request, prefix: Prefix) -> None:
        """Plan moves of a prefix's host blocks to the device, and replace ON_HOST by the new blocks."""
        missing = [
            (kv_group, index)
            for kv_group, tail in enumerate(prefix.tails)
            for index, block in enumerate(tail)
            if block == ON_HOST
        ]
        names = [self.prefixes.tail_name(request, prefix, *each) for each in missing]
        for (kv_group, index), block in zip(missing, self.pool.fetch(names), strict=True):
            prefix.tails[kv_group][index] = block

    def fork(self, request: Request, other: Request) -> None:
        """Share all blocks of a request with another one that has the same tokens."""
        kv, fork = request.kv, other.kv
        if fork.block_tables:
            raise EngineError(f"request {other.request_id} becomes a fork, but holds {fork.num_held} blocks")
        for table in kv.block_tables:
            self.pool.share(table.held)
            fork.block_tables.append(BlockTable(list(table.blocks), table.first_held))
        fork.num_held, fork.num_slots = kv.num_held, kv.num_slots
        fork.num_indexed_blocks, fork.release_at = kv.num_indexed_blocks, kv.release_at
        num_computed = request.schedule.num_computed
        self.num_held += fork.num_held
        self.num_empty += fork.num_slots - num_computed
        kv.tail_shared = fork.tail_shared = fork.num_slots > num_computed

    def release(self, request: Request) -> None:
        """Free all blocks of a request. The caller resets `num_computed` afterwards."""
        kv = request.kv
        if self.states is not None:
            self.states.leave(request)
        self.pool.free(_interleaved([table.held for table in kv.block_tables]))
        self.num_held -= kv.num_held
        self.num_empty -= kv.num_slots - request.schedule.num_computed
        kv.block_tables, kv.tail_shared = [], False
        kv.num_slots = kv.num_held = kv.num_indexed_blocks = 0
        kv.release_at = NEVER

    # -- growth -------------------------------------------------------------------------------------------------

    def slots_within_reach(self, request: Request) -> int:
        """Tokens that the request's block tables could hold if they took every free block."""
        kv, free = request.kv, self.pool.num_free
        if kv.tail_shared:
            free -= len(self._shared_tails(request))
            if free < 0:
                return request.schedule.num_computed
        if not self.windows:  # an encoder has no KV
            return sys.maxsize
        return kv.num_slots + free // len(self.windows) * self.block_size

    def unshare_tail(self, request: Request) -> list[tuple[int, int, int]]:
        """Copy on write: replace the block of the next token by a copy, in each kv_group that shares it.

        Returns the changes of the block tables: (kv_group, index, block).
        """
        kv, changes = request.kv, []
        index = request.schedule.num_computed // self.block_size
        for kv_group in self._shared_tails(request):
            blocks = kv.block_tables[kv_group].blocks
            blocks[index] = self.pool.private_copy(blocks[index])
            changes.append((kv_group, index, blocks[index]))
        kv.tail_shared = False
        return changes

    def _shared_tails(self, request: Request) -> list[int]:
        """kv_groups in which another request holds the block of the next token."""
        index = request.schedule.num_computed // self.block_size
        count = self.pool.ref_count
        return [g for g, table in enumerate(request.kv.block_tables) if count(table.blocks[index]) > 1]

    def next_blocks(self, requests: Sequence[Request]) -> list[tuple[int, int, int, int]]:
        """Append one block in each kv_group to block tables that are full. Does nothing if too few blocks are free.

        Same as `grow` by one token for each request, in bulk, because every request needs a block per block_size steps.
        Returns the changes of the block tables: (row, kv_group, index, block).
        """
        kv_groups, size = len(self.windows), self.block_size
        if not requests or self.pool.num_free < kv_groups * len(requests):
            return []
        blocks = iter(self.pool.allocate(kv_groups * len(requests)))
        updates = []
        for request in requests:
            kv, row = request.kv, request.schedule.row
            index = kv.num_slots // size
            for kv_group, table in enumerate(kv.block_tables):
                block = next(blocks)
                table.blocks.append(block)
                updates.append((row, kv_group, index, block))
            kv.num_slots += size
            kv.num_held += kv_groups
        self.num_held += len(updates)
        self.num_empty += len(requests) * size
        return updates

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Grow a request's block tables to `num_tokens` tokens. Returns the new blocks, if any."""
        kv = request.kv
        missing = -(-(num_tokens - kv.num_slots) // self.block_size)
        if missing <= 0:
            return []
        kv_groups = len(self.windows)
        blocks = self.pool.allocate(missing * kv_groups)
        for kv_group, table in enumerate(kv.block_tables):
            table.blocks += blocks[kv_group::kv_groups]
        kv.num_slots += missing * self.block_size
        kv.num_held += len(blocks)
        self.num_held += len(blocks)
        self.num_empty += missing * self.block_size
        return blocks

    def note_computed(self, num_tokens: int) -> None:
        """Count tokens as computed. The scheduler adds them to `num_computed` of their requests."""
        self.num_empty -= num_tokens

    def note_rejected(self, request: Request, num_tokens: int) -> None:
        """Count tokens as not computed after all, and free the blocks past the end.

        The scheduler has subtracted them from `num_computed`, which still counts all tokens of planned steps. So no
        step writes to a freed block before its next owner does.
        """
        kv = request.kv
        self.num_empty += num_tokens
        needed = -(-request.schedule.num_computed // self.block_size)
        excess = kv.num_slots // self.block_size - needed
        if excess <= 0:
            return
        runs = []
        for table in kv.block_tables:
            runs.append(table.blocks[needed:])
            del table.blocks[needed:]
        num_freed = excess * len(self.windows)
        kv.num_slots -= excess * self.block_size
        kv.num_held -= num_freed
        self.num_held -= num_freed
        self.num_empty -= excess * self.block_size
        self.pool.free(_interleaved(runs))

    def release_before_windows(self, request: Request) -> None:
        """Free the blocks that no later token sees. The caller does this once `release_at` tokens are computed.

        The planned step still reads these blocks. Freeing them now is safe, because the device runs steps in order. A
        new owner writes in a later step. A request that finds such a block by name runs after the step that fills it.
        """
        self.names.index_computed(request)
        kv, runs = request.kv, []
        certain = request.schedule.num_computed - request.schedule.num_drafts_in_flight  # the others may be rejected
        for kv_group, window in self._sliding.windowed.items():
            table = kv.block_tables[kv_group]
            first, end = table.first_held, self._sliding.first_seen(window, certain)
            runs.append(table.blocks[first:end])
            table.blocks[first:end] = [FREED] * (end - first)
            table.first_held = end
        num_freed = sum(map(len, runs))
        kv.num_held -= num_freed
        self.num_held -= num_freed
        self.pool.free(_interleaved(runs))
        kv.release_at = self._sliding.release_at(kv.block_tables)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Raise EngineError unless pool, block tables of the running requests, and counts agree."""
        self.pool.check()
        check_block_tables(self.pool, self._sliding, running)
        if self.states is not None:
            self.states.check(running)
        held = sum(request.kv.num_held for request in running)
        empty = sum(request.kv.num_slots - request.schedule.num_computed for request in running)
        if (self.num_held, self.num_empty) != (held, empty):
            raise EngineError(
                f"the manager counts {self.num_held} held blocks and {self.num_empty} empty slots, the running "
                f"requests have {held} and {empty}"
            )


def _interleaved(runs: list[list[int]]) -> list[int]:
    """Blocks of several kv_groups as one list for `BlockPool.free`, which reuses the last ones first.

    Sorted by distance from their common last token. A partly evicted prefix then keeps the same part in every kv_group.
    """
    if len(runs) == 1:
        return runs[0]
    ordered = sorted((index - len(run), block) for run in runs for index, block in enumerate(run))
    return [block for _, block in ordered]
