"""Block tables of requests: find a shared prefix, grow with the tokens, name what is full, give back.

A request has one block table for each group of layers (`jpaged.kv_groups`), all over one pool. They grow together, one
block in every group at a time. In a group with a sliding window a request holds only the blocks that its window still
reaches: the others are given back as it advances, and keep their names like any free block.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jpaged.engine.block_pool import BlockName, BlockPool, block_digest
from jpaged.engine.request import GIVEN_BACK, NEVER, BlockTable, Request
from jpaged.errors import EngineError
from jpaged.kv_groups import most_blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that hold the beginning of a request's tokens already, to be shared."""

    num_blocks: int                # so many blocks of tokens long
    tails: tuple[list[int], ...]   # a group: the last of its blocks, as many as its window reaches (or all)


class KVCacheManager:
    """Keeps every running request's block tables, over one pool."""

    def __init__(
        self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,), *, max_chunk: int = 1
    ):
        """windows: one a group of layers, None where it keeps everything. max_chunk: most tokens of a step."""
        self.pool = BlockPool(num_blocks, len(windows))
        self.block_size = block_size
        self.windows = tuple(windows)
        self.no_prefix = Prefix(0, tuple([] for _ in windows))
        self._max_chunk = max_chunk
        self._windowed = {group: window for group, window in enumerate(windows) if window is not None}

    @property
    def num_groups(self) -> int:
        """Block tables a request has."""
        return len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Entries of a block table for so many tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks of all groups that a request holds at a time until it has so many tokens."""
        return most_blocks(self.windows, num_tokens, chunk=self._max_chunk, block_size=self.block_size)

    def find_prefix(self, request: Request) -> Prefix:
        """The longest beginning of a request's known tokens that can be shared in all groups.

        Of a group without a window that takes all its blocks, of one with a window those that the first token behind
        the beginning sees. It never covers all tokens: the last known one is always computed, because the next one is
        sampled from it.
        """
        length = (len(request.token_ids) - 1) // self.block_size
        tails: list[list[int]] = [[] for _ in self.windows]
        for group, window in enumerate(self.windows):
            if window is None:
                for index in range(length):
                    block = self.pool.find(self._name(request, index, group))
                    if block is None:
                        break
                    tails[group].append(block)
                length = len(tails[group])
        if self._windowed:
            length = self._find_windows(request, length, tails)
        for group, window in enumerate(self.windows):
            if window is None:
                del tails[group][length:]
        return Prefix(length, tuple(tails))

    def _find_windows(self, request: Request, length: int, tails: list[list[int]]) -> int:
        """The longest beginning, of at most `length` blocks, before which each window is there; fills in its blocks.

        From the end to the beginning, looking each block up once: one that is missing ends every beginning whose window
        reaches it, and those are all that end behind it and have not been given up yet.
        """
        found: dict[tuple[int, int], int] = {}
        lows = dict.fromkeys(self._windowed, length)  # a group has blocks lows[group] .. length - 1
        while True:
            tokens = length * self.block_size
            group = next((g for g, w in self._windowed.items() if lows[g] > self._first_seen(w, tokens)), None)
            if group is None:
                break
            index = lows[group] - 1
            block = self.pool.find(self._name(request, index, group))
            if block is None:
                length = index
                lows = {g: min(low, length) for g, low in lows.items()}
            else:
                found[group, index] = block
                lows[group] = index
        for group in self._windowed:
            tails[group] += (found[group, index] for index in range(lows[group], length))
        return length

    def can_start(self, prefix: Prefix, num_tokens: int, headroom: int = 0) -> bool:
        """Whether a request of so many tokens fits beside all that is held, with `headroom` blocks left over."""
        shared = sum(len(tail) for tail in prefix.tails)
        taken = sum(self.pool.num_free_among(tail) for tail in prefix.tails)
        return self.most_blocks(num_tokens) - shared + taken + headroom <= self.pool.num_free

    def start(self, request: Request, prefix: Prefix) -> None:
        """Begin a request's tables with shared blocks, whose tokens then count as computed."""
        if request.block_tables:
            raise EngineError(f"request {request.request_id} starts, but holds {request.num_held} blocks")
        for tail in prefix.tails:
            self.pool.share(tail)
            missing = prefix.num_blocks - len(tail)
            request.block_tables.append(BlockTable([GIVEN_BACK] * missing + tail, missing))
        request.num_held = sum(len(tail) for tail in prefix.tails)
        request.num_slots = request.num_computed = prefix.num_blocks * self.block_size
        request.num_indexed_blocks = prefix.num_blocks
        self._set_release(request)

    def slots_within_reach(self, request: Request) -> int:
        """Tokens the request's tables could hold if they took every free block."""
        return request.num_slots + self.pool.num_free // len(self.windows) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Make a request's tables hold so many tokens; the new blocks, none if they did already."""
        missing = self.blocks_for(num_tokens - request.num_slots)
        if missing <= 0:
            return []
        groups = len(self.windows)
        blocks = self.pool.allocate(missing * groups)
        for group, table in enumerate(request.block_tables):
            table.blocks += blocks[group::groups]
        request.num_slots += missing * self.block_size
        request.num_held += len(blocks)
        return blocks

    def index_computed(self, request: Request) -> None:
        """Enter blocks into the prefix index that have become full of tokens both computed and known."""
        full = min(request.num_computed, len(request.token_ids)) // self.block_size
        for index in range(request.num_indexed_blocks, full):
            for group, table in enumerate(request.block_tables):
                if index >= table.first_held:  # else it was given back before its last token was known
                    self.pool.put_name(table.blocks[index], self._name(request, index, group))
        request.num_indexed_blocks = max(request.num_indexed_blocks, full)

    def release_behind_windows(self, request: Request) -> None:
        """Give back the blocks that no token after the computed ones sees. To be called when `release_at` is reached.

        At once, though the step that computes the last of these tokens is only planned, and reads the blocks: whoever
        gets one gets it in a later plan, and the device runs steps in order. That includes a request that finds one by
        its name: the step that fills it comes first.
        """
        behind = []
        for group, window in self._windowed.items():
            table = request.block_tables[group]
            first, end = table.first_held, self._first_seen(window, request.num_computed)
            behind.append(table.blocks[first:end])
            table.blocks[first:end] = [GIVEN_BACK] * (end - first)
            table.first_held = end
        request.num_held -= sum(map(len, behind))
        self.pool.free(_in_turns(behind))
        self._set_release(request)

    def release(self, request: Request) -> None:
        """Give back all blocks of a request."""
        self.pool.free(_in_turns([table.held for table in request.block_tables]))
        request.block_tables = []
        request.num_slots = request.num_held = request.num_computed = request.num_indexed_blocks = 0
        request.release_at = NEVER

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise EngineError unless the pool is sound and its holds are exactly the tables of the running requests."""
        self.pool.check()
        holds = [0] * self.pool.num_blocks
        for request in running:
            name = f"request {request.request_id}"
            held = [block for table in request.block_tables for block in table.held]
            if len(set(held)) != len(held):
                raise EngineError(f"{name} holds a block twice: {request.block_tables}")
            for block in held:
                holds[block] += 1
        for block, count in enumerate(holds):
            if self.pool.ref_count(block) != count:
                raise EngineError(f"block {block}: {count} tables hold it, {self.pool.ref_count(block)} are counted")
        for request in running:
            self._check_tables(request)

    def _check_tables(self, request: Request) -> None:
        name = f"request {request.request_id}"
        if request.num_computed > request.num_slots:
            raise EngineError(f"{name} computed {request.num_computed} tokens without room")
        if len(request.block_tables) != len(self.windows):
            raise EngineError(f"{name} has {len(request.block_tables)} block tables for {len(self.windows)} groups")
        if request.num_held != sum(len(table.held) for table in request.block_tables):
            raise EngineError(f"{name} counts {request.num_held} blocks, its tables hold others")
        for window, table in zip(self.windows, request.block_tables, strict=True):
            if len(table.blocks) * self.block_size != request.num_slots:
                raise EngineError(f"{name} has {len(table.blocks)} blocks for {request.num_slots} tokens")
            if table.first_held != self._first_seen(window, request.num_computed):
                raise EngineError(
                    f"{name} has computed {request.num_computed} tokens and holds blocks from {table.first_held} on "
                    f"for a window of {window}"
                )

    def _first_seen(self, window: int | None, num_computed: int) -> int:
        """Index of the first block that the next token sees."""
        return 0 if window is None else max(num_computed - window + 1, 0) // self.block_size

    def _set_release(self, request: Request) -> None:
        """Note when the next block falls behind a window."""
        tables, size = request.block_tables, self.block_size
        ends = ((tables[group].first_held + 1) * size + window - 1 for group, window in self._windowed.items())
        request.release_at = min(ends, default=NEVER)

    def _name(self, request: Request, index: int, group: int) -> BlockName:
        """Name of a request's full block; digests are made once a request and kept over a preemption."""
        digests = request.block_digests
        while len(digests) < index:
            parent = digests[-1] if digests else request.prefix_root
            digests.append(block_digest(parent, self._tokens(request, len(digests))))
        parent = digests[index - 1] if index else request.prefix_root
        tokens = self._tokens(request, index)
        if index == len(digests):
            digests.append(block_digest(parent, tokens))
        return BlockName(digests[index], parent, tokens, group)

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.token_ids[index * self.block_size : (index + 1) * self.block_size])


def _in_turns(runs: list[list[int]]) -> list[int]:
    """Blocks of several groups as one list for `BlockPool.free`, which reuses the last ones first.

    By distance from the runs' ends, which are at the same token: of a beginning that is reused in part, the same part
    is left in every group.
    """
    if len(runs) == 1:
        return runs[0]
    ordered = sorted((index - len(run), block) for run in runs for index, block in enumerate(run))
    return [block for _, block in ordered]
