"""Block pool and KV cache manager, against a model of them that knows nothing of free lists and digests."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from jpaged.engine.block_pool import BlockName, BlockPool, block_digest, prefix_root
from jpaged.engine.kv_cache_manager import KVCacheManager
from jpaged.engine.request import Request
from jpaged.errors import EngineError
from jpaged.outputs import RequestMetrics
from jpaged.sampling_params import SamplingParams

ROOT = prefix_root()


def make_request(token_ids: list[int], root: bytes = ROOT) -> Request:
    return Request(
        request_id="r",
        prompt=None,
        prompt_token_ids=token_ids,
        params=SamplingParams(),
        max_total_tokens=1000,
        eos_token_ids=frozenset(),
        eos_token_id=None,
        prefix_root=root,
        metrics=RequestMetrics(arrival_time=0.0),
    )


def name_of(tokens: tuple[int, ...], parent: bytes = ROOT) -> BlockName:
    return BlockName(block_digest(parent, tokens), parent, tokens)


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

    def test_a_table_is_freed_from_its_end(self):
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
        assert pool.find(BlockName(name.digest, ROOT, (1, 3))) is None
        assert pool.find(BlockName(name.digest, prefix_root(salt="x"), (1, 2))) is None

    def test_of_two_blocks_with_equal_content_the_first_keeps_the_name(self):
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
        with pytest.raises(EngineError, match="nobody holds"):
            pool.free([0])
        with pytest.raises(EngineError, match="at least one"):
            BlockPool(0)

    def test_check_sees_damage(self):
        pool = BlockPool(3)
        pool.allocate(1)
        pool.check()
        pool._ref_counts[0] = 0
        with pytest.raises(EngineError):
            pool.check()


def test_roots_differ_in_every_part_and_do_not_run_together():
    roots = [
        prefix_root(),
        prefix_root(adapter="a"),
        prefix_root(weight_version=1),
        prefix_root(salt="a"),
        prefix_root(adapter="ab", salt="c"),
        prefix_root(adapter="a", salt="bc"),
    ]
    assert all(one != other for one, other in itertools.combinations(roots, 2))


def test_integrity_check_sees_a_lost_and_a_doubled_block():
    manager = KVCacheManager(8, 4)
    request = make_request(list(range(9)))
    manager.start(request, [])
    manager.grow(request, 9)
    manager.check_integrity([request])
    lost = request.block_table.pop()
    with pytest.raises(EngineError, match=f"block {lost}"):
        manager.check_integrity([request])
    request.block_table += [request.block_table[0]]
    with pytest.raises(EngineError, match="twice"):
        manager.check_integrity([request])


NUM_BLOCKS, BLOCK_SIZE = 12, 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)  # two tokens only, so that beginnings are often equal


class ManagerMachine(RuleBasedStateMachine):
    """Requests start, compute, get tokens and end in any order. The model: what each block holds, and who holds it."""

    requests = Bundle("requests")

    @initialize()
    def setup(self) -> None:
        self.manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        self.content: dict[int, tuple] = {}       # block -> (root, all tokens up to its end) when last filled
        self.tables: dict[Request, list[int]] = {}

    @rule(target=requests, token_ids=TOKENS, salt=st.sampled_from(["", "x"]))
    def start(self, token_ids: list[int], salt: str) -> Request:
        request = make_request(token_ids, prefix_root(salt=salt))
        prefix = self.manager.find_prefix(request)
        assert len(prefix) * BLOCK_SIZE < len(token_ids)
        for index, block in enumerate(prefix):
            assert self.content[block] == (request.prefix_root, tuple(token_ids[: (index + 1) * BLOCK_SIZE]))
        needed = self.manager.blocks_for(len(token_ids))
        free = NUM_BLOCKS - len(self.held())
        newly_held = needed - len(self.held() & set(prefix))
        assert self.manager.can_start(prefix, needed) == (newly_held <= free)
        self.manager.start(request, prefix)
        assert request.num_computed == len(prefix) * BLOCK_SIZE
        self.tables[request] = list(prefix)
        return request

    @precondition(lambda self: self.tables)
    @rule(request=requests, count=st.integers(1, 10))
    def compute(self, request: Request, count: int) -> None:
        if request not in self.tables:
            return
        count = min(count, len(request.token_ids) - request.num_computed)
        count = min(count, self.manager.slots_within_reach(request) - request.num_computed)
        before = set(request.block_table)
        new = self.manager.grow(request, request.num_computed + count)
        assert not set(new) & (self.held() | before), "a block that somebody holds was handed out"
        self.tables[request] += new
        assert request.block_table == self.tables[request]
        request.num_computed += count
        for index in range(request.num_computed // BLOCK_SIZE):
            end = (index + 1) * BLOCK_SIZE
            if end > request.num_computed - count:
                self.content[request.block_table[index]] = (request.prefix_root, tuple(request.token_ids[:end]))
        self.manager.index_computed(request)

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
        for block in range(NUM_BLOCKS):
            assert pool.ref_count(block) == sum(block in table for table in self.tables.values())

    def held(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=60, stateful_step_count=40)
