"""Block pool and KV cache manager, compared with simple models that have no free list and no digests."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from jpaged.engine.kv_cache.block_pool import BlockName, BlockPool, prefix_root, token_bytes
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.kv_cache.prefix_finder import Prefix
from jpaged.engine.request import Request
from jpaged.engine.step_plan import BlockMove
from jpaged.errors import EngineError
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import SamplingParams
from tests.engine.pool_machine import ROOT, PoolMachine, name_of


def make_request(token_ids: list[int], root: bytes = ROOT) -> Request:
    request = Request(
        request_id="r",
        prompt_token_ids=token_ids,
        params=SamplingParams(),
        max_total_tokens=1000,
        eos_token_ids=frozenset(),
        eos_token_id=None,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    request.kv.prefix_root = root
    return request


def start(manager: KVCacheManager, request: Request, prefix: Prefix | None = None) -> None:
    """Start a request as the scheduler does."""
    request.schedule.num_computed = manager.start(request, manager.prefixes.no_prefix if prefix is None else prefix)


def advance(manager: KVCacheManager, request: Request, count: int) -> None:
    """Count tokens as computed, as the scheduler does."""
    request.schedule.num_computed += count
    manager.note_computed(count)


class TestPool:
    def test_blocks_without_a_name_are_reused_first_then_the_least_recently_freed(self):
        pool = BlockPool(6)
        blocks = pool.allocate(6)
        for block in blocks[:4]:
            pool.put_name(block, name_of((block, block)))
        pool.free([blocks[2]])
        pool.free([blocks[0]])
        pool.free([blocks[4]])
        pool.free([blocks[1]])
        assert pool.allocate(4) == [blocks[i] for i in (4, 2, 0, 1)]

    def test_the_last_block_of_a_table_is_reused_first(self):
        pool = BlockPool(3)
        blocks = pool.allocate(3)
        for block in blocks:
            pool.put_name(block, name_of((block,)))
        pool.free(blocks)
        assert pool.allocate(3) == blocks[::-1]

    def test_a_free_block_is_found_until_it_is_allocated_again(self):
        pool = BlockPool(2)
        (block,) = pool.allocate(1)
        pool.put_name(block, name_of((1, 2)))
        pool.free([block])
        assert pool.find(name_of((1, 2))) == block
        pool.share([block])
        assert pool.num_used == 1
        pool.free([block])
        pool.allocate(2)
        assert pool.find(name_of((1, 2))) is None

    def test_a_digest_is_not_trusted_without_tokens_and_parent(self):
        pool = BlockPool(1)
        (block,) = pool.allocate(1)
        name = name_of((1, 2))
        pool.put_name(block, name)
        assert pool.find(BlockName(name.digest, ROOT, token_bytes((1, 3)))) is None
        assert pool.find(BlockName(name.digest, prefix_root(salt="x"), token_bytes((1, 2)))) is None

    def test_the_first_of_two_blocks_with_equal_content_keeps_the_name(self):
        pool = BlockPool(2)
        first, second = pool.allocate(2)
        pool.put_name(first, name_of((1,)))
        pool.put_name(second, name_of((1,)))
        pool.check()
        assert pool.find(name_of((1,))) == first

    def test_misuse_is_an_error(self):
        pool = BlockPool(2)
        with pytest.raises(EngineError, match="3 blocks wanted, 2 free"):
            pool.allocate(3)
        with pytest.raises(EngineError, match="no block table holds it"):
            pool.free([0])
        with pytest.raises(EngineError, match="at least one"):
            BlockPool(0)

    def test_check_finds_damage(self):
        pool = BlockPool(3)
        pool.allocate(1)
        pool.check()
        pool._ref_counts[0] = 0
        with pytest.raises(EngineError):
            pool.check()


def test_roots_differ_if_any_part_differs():
    roots = [
        prefix_root(),
        prefix_root(adapter="a"),
        prefix_root(weight_version=1),
        prefix_root(salt="a"),
        prefix_root(adapter="ab", salt="c"),
        prefix_root(adapter="a", salt="bc"),
    ]
    assert all(one != other for one, other in itertools.combinations(roots, 2))


def test_integrity_check_finds_a_lost_and_a_doubled_block():
    manager = KVCacheManager(8, 4)
    request = make_request(list(range(9)))
    start(manager, request)
    manager.grow(request, 9)
    manager.check_integrity([request])
    blocks = request.kv.block_tables[0].blocks
    lost = blocks.pop()
    with pytest.raises(EngineError, match=f"block {lost}"):
        manager.check_integrity([request])
    blocks.append(blocks[0])
    with pytest.raises(EngineError, match="twice"):
        manager.check_integrity([request])


def test_the_kv_group_is_part_of_a_name():
    """Equal tokens have a block of its own in every kv_group."""
    manager = KVCacheManager(8, 4, (None, 8), max_chunk=16)
    first = make_request(list(range(9)))
    start(manager, first)
    manager.grow(first, 9)
    advance(manager, first, 9)
    manager.names.index_computed(first)
    prefix = manager.find_prefix(make_request(list(range(12))))
    assert prefix.tails == tuple(table.blocks[:2] for table in first.kv.block_tables)
    assert not set(prefix.tails[0]) & set(prefix.tails[1])
    manager.pool.check()


def test_blocks_before_a_window_are_freed_at_once_and_the_last_tokens_stay():
    manager = KVCacheManager(40, 4, (None, 6), max_chunk=8)
    request = make_request(list(range(60)))
    start(manager, request)
    for computed in range(1, 61):
        manager.grow(request, computed)
        advance(manager, request, computed - request.schedule.num_computed)
        if computed >= request.kv.release_at:
            manager.release_before_windows(request)
        whole, window = request.kv.block_tables
        assert whole.first_held == 0
        # the next token, at position `computed`, sees 6 keys: its own and those of 5 positions before it
        assert window.first_held == max(computed - 5, 0) // 4
        assert len(window.held) <= 3
        manager.check_integrity([request])
    assert manager.pool.peak_used <= 15 + 3 == manager.max_blocks(60) - 1  # max_blocks allows for chunks of 8
    assert manager.pool.num_used == request.kv.num_held
    manager.release(request)
    assert manager.pool.num_used == 0


def test_a_prefix_ends_where_the_blocks_of_its_window_were_reused():
    """10 blocks of 4 tokens. A window of 6 needs the last 2 blocks of a prefix. Some of them are reused."""
    manager = KVCacheManager(40, 4, (None, 6), max_chunk=40)
    first = make_request(list(range(41)))
    start(manager, first)
    manager.grow(first, 41)
    advance(manager, first, 41 - first.schedule.num_computed)
    manager.names.index_computed(first)
    again = make_request(list(range(41)))
    assert manager.find_prefix(again).num_blocks == 10
    forget = manager.pool._forget  # as if the blocks were reused
    forget([first.kv.block_tables[1].blocks[6]])
    assert manager.find_prefix(again).num_blocks == 10  # only blocks 8 and 9 are seen
    forget([first.kv.block_tables[1].blocks[8]])
    prefix = manager.find_prefix(again)  # 10 and 9 need block 8, 8 and 7 need block 6
    assert prefix.num_blocks == 6
    assert prefix.tails == (first.kv.block_tables[0].blocks[:6], first.kv.block_tables[1].blocks[4:6])
    forget([first.kv.block_tables[0].blocks[5]])
    assert manager.find_prefix(again).num_blocks == 5


BLOCKS_A_GROUP, BLOCK_SIZE = 12, 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)  # only two tokens, so that prefixes are often equal


class ManagerMachine(RuleBasedStateMachine):
    """Requests start, compute, get tokens and end in any order. The model knows each block's content and holders."""

    requests = Bundle("requests")

    @initialize(windows=st.sampled_from([(None,), (1,), (5,), (None, 5), (3, None, 9), (4, 4, None)]))
    def setup(self, windows: tuple[int | None, ...]) -> None:
        self.num_blocks = BLOCKS_A_GROUP * len(windows)
        self.manager = KVCacheManager(self.num_blocks, BLOCK_SIZE, windows, max_chunk=10)
        self.windows = windows
        # block -> (group, root, all tokens up to its end) when last filled
        self.content: dict[int, tuple] = {}
        # of each request and group: index in the table -> block
        self.tables: dict[Request, list[dict[int, int]]] = {}

    @rule(target=requests, token_ids=TOKENS, salt=st.sampled_from(["", "x"]))
    def start(self, token_ids: list[int], salt: str) -> Request:
        request = make_request(token_ids, prefix_root(salt=salt))
        prefix = self.manager.find_prefix(request)
        assert prefix.num_blocks == self.longest_prefix(request)
        tables = [dict(zip(self.seen(w, prefix.num_blocks), tail, strict=True))
                  for w, tail in zip(self.windows, prefix.tails, strict=True)]  # fmt: skip
        for group, table in enumerate(tables):
            for index, block in table.items():
                beginning = tuple(token_ids[: (index + 1) * BLOCK_SIZE])
                assert self.content[block] == (group, request.kv.prefix_root, beginning)
        shared = {block for table in tables for block in table.values()}
        needed = self.manager.max_blocks(len(token_ids))
        free = self.num_blocks - len(self.held())
        newly_held = needed - len(self.held() & shared)
        assert self.manager.can_start(prefix, len(token_ids)) == (newly_held <= free)
        start(self.manager, request, prefix)
        assert request.schedule.num_computed == prefix.num_blocks * BLOCK_SIZE
        self.tables[request] = tables
        return request

    def seen(self, window: int | None, num_blocks: int) -> range:
        """Blocks that the token after `num_blocks` blocks sees, by counting positions."""
        position = num_blocks * BLOCK_SIZE
        positions = [p for p in range(position) if window is None or position - p < window]
        return range(positions[0] // BLOCK_SIZE if positions else num_blocks, num_blocks)

    def longest_prefix(self, request: Request) -> int:
        """Number of blocks of the longest shared prefix, by trying all lengths."""
        find = self.manager.pool.find

        def name(index: int, kv_group: int) -> BlockName:
            return request.kv.name(request.token_ids, index, kv_group, BLOCK_SIZE)

        def there(num_blocks: int) -> bool:
            needed = ((index, group) for group, w in enumerate(self.windows) for index in self.seen(w, num_blocks))
            return all(find(name(index, group)) is not None for index, group in needed)

        return next(n for n in range((len(request.token_ids) - 1) // BLOCK_SIZE, -1, -1) if there(n))

    @precondition(lambda self: self.tables)
    @rule(request=requests, count=st.integers(1, 10))
    def compute(self, request: Request, count: int) -> None:
        if request not in self.tables:
            return
        count = min(count, len(request.token_ids) - request.schedule.num_computed)
        count = min(count, self.manager.slots_within_reach(request) - request.schedule.num_computed)
        if count > 0 and request.kv.tail_shared:
            self.unshare(request)
        length = len(request.kv.block_tables[0].blocks)
        new = self.manager.grow(request, request.schedule.num_computed + count)
        assert not set(new) & self.held(), "a block that somebody holds was handed out"
        for group, (table, model) in enumerate(zip(request.kv.block_tables, self.tables[request], strict=True)):
            model |= dict(enumerate(table.blocks[length:], length))
            computed = request.schedule.num_computed
            for index in range(computed // BLOCK_SIZE, (computed + count) // BLOCK_SIZE):
                beginning = tuple(request.token_ids[: (index + 1) * BLOCK_SIZE])
                self.content[model[index]] = (group, request.kv.prefix_root, beginning)
        advance(self.manager, request, count)
        self.manager.names.index_computed(request)
        if request.schedule.num_computed >= request.kv.release_at:
            self.manager.release_before_windows(request)
        for window, table, model in zip(self.windows, request.kv.block_tables, self.tables[request], strict=True):
            # first position that is still seen
            reach = 0 if window is None else request.schedule.num_computed - window + 1
            for index in [i for i in model if (i + 1) * BLOCK_SIZE <= reach]:
                del model[index]
            assert dict(enumerate(table.held, table.first_held)) == model

    def unshare(self, request: Request) -> None:
        """Copy on write: the next block of each kv_group that another request holds as well."""
        held, index = self.held(), request.schedule.num_computed // BLOCK_SIZE
        shared = {
            group: table[index]
            for group, table in enumerate(self.tables[request])
            if self.manager.pool.ref_count(table[index]) > 1
        }
        changes = self.manager.unshare_tail(request)
        assert [group for group, _, _ in changes] == list(shared)
        moves = self.manager.pool.take_moves()
        assert moves == [(BlockMove.COPY, shared[group], block) for group, _, block in changes]
        for group, place, block in changes:
            assert place == index
            assert block not in held
            self.tables[request][group][index] = block

    @precondition(lambda self: self.tables)
    @rule(target=requests, request=requests)
    def fork(self, request: Request) -> Request:
        other = make_request(list(request.token_ids), request.kv.prefix_root)
        if request in self.tables:
            self.manager.names.inherit(other, request)
            self.manager.fork(request, other)
            other.schedule.num_computed = request.schedule.num_computed
            self.tables[other] = [dict(table) for table in self.tables[request]]
        return other

    @rule(request=requests, token=st.integers(0, 1))
    def sample(self, request: Request, token: int) -> None:
        if request in self.tables:
            request.token_ids.append(token)

    @rule(request=consumes(requests))
    def release(self, request: Request) -> None:
        if request in self.tables:
            self.manager.release(request)
            del self.tables[request]

    @rule()
    def forget(self) -> None:
        if not self.tables:
            self.manager.pool.forget_all()
            self.content.clear()

    @invariant()
    def pool_agrees_with_the_model(self) -> None:
        self.manager.check_integrity(self.tables)
        pool = self.manager.pool
        assert pool.num_used == len(self.held()) <= pool.peak_used
        for block in range(self.num_blocks):
            holds = sum(block in table.values() for tables in self.tables.values() for table in tables)
            assert pool.ref_count(block) == holds

    def held(self) -> set[int]:
        return {block for tables in self.tables.values() for table in tables for block in table.values()}


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=50)

TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=60, stateful_step_count=40)
