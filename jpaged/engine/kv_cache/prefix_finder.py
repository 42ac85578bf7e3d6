"""Finds the longest prefix of a request whose KV is in the prefix index already."""

import dataclasses
from collections.abc import Callable

from jpaged.engine.kv_cache.block_pool import BlockName, BlockPool
from jpaged.engine.kv_cache.sliding_windows import SlidingWindows
from jpaged.engine.request import Request
from jpaged.engine.step_plan import TransferCosts

ON_HOST = -2  # stands for a block that the host tier stores

FindBlock = Callable[[BlockName], int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that store KV of a request's first tokens."""

    num_blocks: int               # length of the prefix, in blocks of tokens
    tails: tuple[list[int], ...]  # per kv_group: the last blocks of the prefix, up to its window
    num_on_host: int = 0          # entries of `tails` that are ON_HOST
    branch_blocks: int = 0        # as num_blocks, if recurrent layers did not need a state at its end
    state_on_host: bool = False   # the host tier stores the snapshot at its end, and the device does not

    @property
    def num_on_device(self) -> int:
        """Blocks of all kv_groups that are on the device."""
        return sum(map(len, self.tails)) - self.num_on_host


class PrefixFinder:
    """Looks up block names in the prefix index of both tiers."""

    def __init__(self, pool: BlockPool, windows: SlidingWindows, costs: TransferCosts | None):
        """costs: cost of moving blocks from the host. None: moving costs nothing."""
        self._pool = pool
        self._windows = windows
        self._costs = costs
        self.no_prefix = Prefix(0, tuple([] for _ in windows.windows))

    def find(self, request: Request) -> Prefix:
        """The longest prefix of the request's known tokens whose KV is cached in all kv_groups.

        A kv_group without a window needs all blocks of the prefix. A kv_group with a window needs the blocks that the
        first token after the prefix sees. The prefix has at most `Request.max_cached_tokens` tokens. Blocks of the host
        tier count if fetching them is faster than recomputing them. With recurrent layers, the prefix ends at a
        snapshot of their state, on the device or on the host.
        """
        if request.skips_prefix_cache or not self._windows.windows:
            return self.no_prefix
        pool = self._pool
        if pool.host_tier is None:
            return self._find(request, on_host=False)
        both = self._find(request, on_host=True)
        if not both.num_on_host and not both.state_on_host:
            return both
        device = self._find(request, on_host=False)
        gained = (both.num_blocks - device.num_blocks) * self._windows.block_size
        costs = self._costs
        pays = costs is None or costs.moves_pay(both.num_on_host, gained, with_state=both.state_on_host)
        return both if pays else device

    def find_on_device(self, request: Request) -> Prefix:
        """The longest prefix of the request's known tokens whose KV is on the device, as `find`."""
        return self._find(request, on_host=False)

    def named(self, request: Request) -> list[tuple[BlockName, int]]:
        """Names and blocks of the request's longest prefix on the device, one kv_group after another."""
        prefix = self.find_on_device(request)
        return [
            (self.tail_name(request, prefix, kv_group, index), block)
            for kv_group, tail in enumerate(prefix.tails)
            for index, block in enumerate(tail)
        ]

    def tail_name(self, request: Request, prefix: Prefix, kv_group: int, index: int) -> BlockName:
        """Name of the block `prefix.tails[kv_group][index]`."""
        first = prefix.num_blocks - len(prefix.tails[kv_group])
        return self._name(request, first + index, kv_group)

    def _find_in_both_tiers(self, name: BlockName) -> int | None:
        block = self._pool.find(name)
        return ON_HOST if block is None and self._pool.find_on_host(name) else block

    def _find(self, request: Request, *, on_host: bool) -> Prefix:
        """The longest prefix in KV and in state. on_host: blocks and snapshots of the host tier count."""
        find = self._find_in_both_tiers if on_host else self._pool.find
        longest = prefix = self._find_blocks(request, request.max_cached_tokens // self._windows.block_size, find)
        states = self._pool.state_slots
        if states is None:
            return prefix
        while (length := states.longest(request, prefix.num_blocks, on_host=on_host)) < prefix.num_blocks:
            prefix = self._find_blocks(request, length, find)
        state_on_host = not states.has(request, prefix.num_blocks)
        return dataclasses.replace(prefix, branch_blocks=longest.num_blocks, state_on_host=state_on_host)

    def _find_blocks(self, request: Request, length: int, find: FindBlock) -> Prefix:
        """The longest prefix of at most `length` blocks whose KV `find` finds."""
        windows = self._windows
        tails: list[list[int]] = [[] for _ in windows.windows]
        for kv_group, window in enumerate(windows.windows):
            if window is None:
                for index in range(length):
                    block = find(self._name(request, index, kv_group))
                    if block is None:
                        break
                    tails[kv_group].append(block)
                length = len(tails[kv_group])
        if windows.windowed:
            length = self._find_windows(request, length, tails, find)
        for kv_group, window in enumerate(windows.windows):
            if window is None:
                del tails[kv_group][length:]
        on_host = 0 if self._pool.host_tier is None else sum(tail.count(ON_HOST) for tail in tails)
        return Prefix(length, tuple(tails), on_host)

    def _find_windows(self, request: Request, length: int, tails: list[list[int]], find: FindBlock) -> int:
        """Length of the longest prefix, at most `length`, whose last window of blocks is cached; fills `tails`.

        Searches backwards and looks each block up once. A missing block rules out every prefix whose window needs it.
        These are all prefixes that end after the block and are still possible.
        """
        windows = self._windows
        found: dict[tuple[int, int], int] = {}
        lows = dict.fromkeys(windows.windowed, length)  # blocks lows[kv_group] .. length - 1 were found
        while True:
            tokens = length * windows.block_size
            kv_group = next((g for g, w in windows.windowed.items() if lows[g] > windows.first_seen(w, tokens)), None)
            if kv_group is None:
                break
            index = lows[kv_group] - 1
            block = find(self._name(request, index, kv_group))
            if block is None:
                length = index
                lows = {g: min(low, length) for g, low in lows.items()}
            else:
                found[kv_group, index] = block
                lows[kv_group] = index
        for kv_group in windows.windowed:
            tails[kv_group] += (found[kv_group, index] for index in range(lows[kv_group], length))
        return length

    def _name(self, request: Request, index: int, kv_group: int) -> BlockName:
        return request.kv.name(request.token_ids, index, kv_group, self._windows.block_size)
