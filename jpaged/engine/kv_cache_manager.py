"""Block tables of requests: find a shared prefix, fork, grow with the tokens, name what is full, give back.

A request has one block table for each group of layers (`jpaged.kv_groups`), all over one pool. They grow together, one
block in every group at a time. In a group with a sliding window a request holds only the blocks that its window still
reaches: the others are given back as it advances, and keep their names like any free block.

A fork has all blocks of the request it came from, the last one included, which may be full in part. Whoever writes to
that one first gets a copy of its own (copy-on-write); the last to hold it writes to it as it is.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jpaged.engine.block_pool import BlockName, BlockPool, block_digest, token_bytes
from jpaged.engine.host_tier import HostTier
from jpaged.engine.request import GIVEN_BACK, NEVER, BlockTable, Request
from jpaged.engine.step_plan import TransferCosts
from jpaged.errors import EngineError
from jpaged.kv_groups import most_blocks

ON_HOST = -2  # in the place of a block that the host tier has


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that hold the beginning of a request's tokens already, to be shared."""

    num_blocks: int                # so many blocks of tokens long
    tails: tuple[list[int], ...]   # a group: the last of its blocks, as many as its window reaches (or all)
    num_on_host: int = 0           # so many of these are ON_HOST

    @property
    def num_on_device(self) -> int:
        """Blocks of all groups that need not be moved."""
        return sum(map(len, self.tails)) - self.num_on_host


class KVCacheManager:
    """Keeps every running request's block tables, over one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        max_chunk: int = 1,
        host_slots: int = 0,
        transfer_costs: TransferCosts | None = None,
    ):
        """windows: one a group of layers, None where it keeps everything. max_chunk: most tokens of a step.

        host_slots: blocks that host memory has room for. transfer_costs: what moving them takes; None: nothing.
        """
        pays = transfer_costs is None or transfer_costs.keeping_pays(block_size)
        tier = HostTier(host_slots) if host_slots and pays else None
        self.pool = BlockPool(num_blocks, len(windows), tier)
        self.num_held = 0    # blocks in all tables: a shared one counts as often as it is held
        self.num_empty = 0   # tokens that the tables have room for and that are not computed
        self._costs = transfer_costs
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
        sampled from it. Blocks of the host tier count where fetching them takes less time than computing them.
        """
        if request.computes_all:
            return self.no_prefix
        if self.pool.host_tier is None:
            return self._find(request, self.pool.find)
        both = self._find(request, self._find_in_both_tiers)
        if not both.num_on_host:
            return both
        device = self._find(request, self.pool.find)
        gained = (both.num_blocks - device.num_blocks) * self.block_size
        pays = self._costs is None or self._costs.moves_pay(both.num_on_host, gained)
        return both if pays else device

    def _find_in_both_tiers(self, name: BlockName) -> int | None:
        block = self.pool.find(name)
        return ON_HOST if block is None and self.pool.find_on_host(name) else block

    def _find(self, request: Request, find: Callable[[BlockName], int | None]) -> Prefix:
        length = (len(request.token_ids) - 1) // self.block_size
        tails: list[list[int]] = [[] for _ in self.windows]
        for group, window in enumerate(self.windows):
            if window is None:
                for index in range(length):
                    block = find(self._name(request, index, group))
                    if block is None:
                        break
                    tails[group].append(block)
                length = len(tails[group])
        if self._windowed:
            length = self._find_windows(request, length, tails, find)
        for group, window in enumerate(self.windows):
            if window is None:
                del tails[group][length:]
        on_host = 0 if self.pool.host_tier is None else sum(tail.count(ON_HOST) for tail in tails)
        return Prefix(length, tuple(tails), on_host)

    def _find_windows(
        self, request: Request, length: int, tails: list[list[int]], find: Callable[[BlockName], int | None]
    ) -> int:
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
            block = find(self._name(request, index, group))
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
        taken = sum(self.pool.num_free_among(block for block in tail if block >= 0) for tail in prefix.tails)
        return self.most_blocks(num_tokens) - prefix.num_on_device + taken + headroom <= self.pool.num_free

    def start(self, request: Request, prefix: Prefix) -> None:
        """Begin a request's tables with shared blocks, whose tokens then count as computed."""
        if request.block_tables:
            raise EngineError(f"request {request.request_id} starts, but holds {request.num_held} blocks")
        for tail in prefix.tails:
            self.pool.share(block for block in tail if block >= 0)
        if prefix.num_on_host:
            self._fetch(request, prefix)
        for tail in prefix.tails:
            missing = prefix.num_blocks - len(tail)
            request.block_tables.append(BlockTable([GIVEN_BACK] * missing + tail, missing))
        request.num_held = sum(len(tail) for tail in prefix.tails)
        request.num_slots = request.num_computed = prefix.num_blocks * self.block_size
        request.num_indexed_blocks = prefix.num_blocks
        self.num_held += request.num_held
        self._set_release(request)

    def _fetch(self, request: Request, prefix: Prefix) -> None:
        """Have the blocks of a prefix that are on the host moved to the device; their places are filled in."""
        places = [
            (group, place)
            for group, tail in enumerate(prefix.tails)
            for place, block in enumerate(tail)
            if block == ON_HOST
        ]
        names = [
            self._name(request, prefix.num_blocks - len(prefix.tails[group]) + place, group) for group, place in places
        ]
        for (group, place), block in zip(places, self.pool.fetch(names), strict=True):
            prefix.tails[group][place] = block

    def fork(self, request: Request, other: Request) -> None:
        """Give another request of the same tokens all blocks of one, to hold with it."""
        if other.block_tables:
            raise EngineError(f"request {other.request_id} becomes a fork, but holds {other.num_held} blocks")
        for table in request.block_tables:
            self.pool.share(table.held)
            other.block_tables.append(BlockTable(list(table.blocks), table.first_held))
        other.num_held, other.num_slots = request.num_held, request.num_slots
        other.num_computed, other.num_indexed_blocks = request.num_computed, request.num_indexed_blocks
        other.release_at = request.release_at
        self.num_held += other.num_held
        self.num_empty += other.num_slots - other.num_computed
        request.tail_shared = other.tail_shared = other.num_slots > other.num_computed

    def slots_within_reach(self, request: Request) -> int:
        """Tokens the request's tables could hold if they took every free block."""
        free = self.pool.num_free
        if request.tail_shared:
            free -= len(self._shared_tails(request))
            if free < 0:
                return request.num_computed
        return request.num_slots + free // len(self.windows) * self.block_size

    def unshare_tail(self, request: Request) -> list[tuple[int, int, int]]:
        """Copy-on-write: make the block that the next token goes to the request's own.

        Returns what changes in its tables: (group, index, block).
        """
        changes = []
        for group in self._shared_tails(request):
            table, index = request.block_tables[group], request.num_computed // self.block_size
            table.blocks[index] = self.pool.private_copy(table.blocks[index])
            changes.append((group, index, table.blocks[index]))
        request.tail_shared = False
        return changes

    def _shared_tails(self, request: Request) -> list[int]:
        """Groups in which somebody else holds the block that the next token goes to."""
        index = request.num_computed // self.block_size
        count = self.pool.ref_count
        return [g for g, table in enumerate(request.block_tables) if count(table.blocks[index]) > 1]

    def next_blocks(self, requests: Sequence[Request]) -> list[tuple[int, int, int, int]]:
        """Give requests whose tables are full one more block in each group; nothing where too few blocks are free.

        As `grow` for one token each, which every request comes to after block_size steps. Returns what changes in the
        tables: (row, group, index, block).
        """
        groups, size = len(self.windows), self.block_size
        if not requests or self.pool.num_free < groups * len(requests):
            return []
        blocks = iter(self.pool.allocate(groups * len(requests)))
        updates = []
        for request in requests:
            row, index = request.row, request.num_slots // size
            for group, table in enumerate(request.block_tables):
                block = next(blocks)
                table.blocks.append(block)
                updates.append((row, group, index, block))
            request.num_slots += size
            request.num_held += groups
        self.num_held += len(updates)
        self.num_empty += len(requests) * size
        return updates

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
        self.num_held += len(blocks)
        self.num_empty += missing * self.block_size
        return blocks

    def advance(self, request: Request, count: int) -> None:
        """Count so many more tokens as computed: they will be by the end of the step that is being planned."""
        request.num_computed += count
        self.num_empty -= count

    def index_computed(self, request: Request, num_computed: int | None = None) -> None:
        """Enter blocks into the prefix index that have become full of tokens both computed and known.

        num_computed: with what the step computes that is being planned. All rows of a step write their keys and values
        before any attends, in every layer, so that another request can share them in that very step.
        """
        computed = request.num_computed if num_computed is None else num_computed
        full = min(computed, len(request.token_ids)) // self.block_size
        first = request.num_indexed_blocks
        if full <= first:
            return
        names = self._names(request, full)
        for group, table in enumerate(request.block_tables):
            begin = max(first, table.first_held)  # those before were given back before their tokens were known
            new = names[begin:full] if group == 0 else [name._replace(group=group) for name in names[begin:full]]
            self.pool.put_names(table.blocks[begin:full], new, group)
        request.num_indexed_blocks = full

    def release_behind_windows(self, request: Request) -> None:
        """Give back the blocks that no token after the computed ones sees. To be called when `release_at` is reached.

        At once, though the step that computes the last of these tokens is only planned, and reads the blocks: whoever
        gets one gets it in a later plan, and the device runs steps in order. That includes a request that finds one by
        its name: the step that fills it comes first.
        """
        self.index_computed(request)
        behind = []
        for group, window in self._windowed.items():
            table = request.block_tables[group]
            first, end = table.first_held, self._first_seen(window, request.num_computed)
            behind.append(table.blocks[first:end])
            table.blocks[first:end] = [GIVEN_BACK] * (end - first)
            table.first_held = end
        num_behind = sum(map(len, behind))
        request.num_held -= num_behind
        self.num_held -= num_behind
        self.pool.free(_in_turns(behind))
        self._set_release(request)

    def release(self, request: Request) -> None:
        """Give back all blocks of a request."""
        self.pool.free(_in_turns([table.held for table in request.block_tables]))
        self.num_held -= request.num_held
        self.num_empty -= request.num_slots - request.num_computed
        request.block_tables, request.tail_shared = [], False
        request.num_slots = request.num_held = request.num_computed = request.num_indexed_blocks = 0
        request.release_at = NEVER

    def check_integrity(self, running: Sequence[Request]) -> None:
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
        empty = sum(request.num_slots - request.num_computed for request in running)
        if (self.num_held, self.num_empty) != (sum(holds), empty):
            raise EngineError(f"{self.num_held} holds and {self.num_empty} empty slots counted, {sum(holds)}, {empty}")

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
            writes_to = request.num_computed // self.block_size
            shared = request.num_computed < request.num_slots and self.pool.ref_count(table.blocks[writes_to]) > 1
            if shared and not request.tail_shared:
                raise EngineError(f"{name} is about to write to block {table.blocks[writes_to]}, which others hold")
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
        name = self._names(request, index + 1)[index]
        return name if group == 0 else name._replace(group=group)

    def _names(self, request: Request, count: int) -> list[BlockName]:
        """Names of at least so many of a request's full blocks, in group 0; made once and kept over a preemption."""
        names, size = request.block_names, self.block_size
        first = len(names)
        if first < count:
            parent = names[-1].digest if names else request.prefix_root
            tokens = token_bytes(request.token_ids[first * size : count * size])
            width = len(tokens) // (count - first)
            for start in range(0, len(tokens), width):
                own = tokens[start : start + width]
                digest = block_digest(parent, own)
                names.append(BlockName(digest, parent, own))
                parent = digest
        return names


def _in_turns(runs: list[list[int]]) -> list[int]:
    """Blocks of several groups as one list for `BlockPool.free`, which reuses the last ones first.

    By distance from the runs' ends, which are at the same token: of a beginning that is reused in part, the same part
    is left in every group.
    """
    if len(runs) == 1:
        return runs[0]
    ordered = sorted((index - len(run), block) for run in runs for index, block in enumerate(run))
    return [block for _, block in ordered]
