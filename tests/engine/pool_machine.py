"""A hypothesis state machine that compares the block pool with a model of it in plain Python."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.engine.kv_cache.block_pool import BlockName, BlockPool, block_digest, prefix_root, token_bytes
from jpaged.engine.kv_cache.host_tier import HostTier
from jpaged.engine.step_plan import BlockMove
from jpaged.errors import EngineError

ROOT = prefix_root()


def name_of(tokens: tuple[int, ...], parent: bytes = ROOT) -> BlockName:
    return BlockName(block_digest(parent, token_bytes(tokens)), parent, token_bytes(tokens))


class PoolMachine(RuleBasedStateMachine):
    """The order of reuse, in both tiers, compared with plain lists."""

    @initialize(num_blocks=st.integers(1, 8), slots=st.sampled_from([0, 1, 3, 20]))
    def setup(self, num_blocks: int, slots: int) -> None:
        self.pool = BlockPool(num_blocks, host_tier=HostTier(slots) if slots else None)
        self.slots = slots
        self.holds = dict.fromkeys(range(num_blocks), 0)
        self.order = list(range(num_blocks))         # free blocks, first to be reused first
        self.names: dict[int, int] = {}              # block -> the number that its name is made of
        self.content = dict.fromkeys(range(num_blocks), 0)  # block -> its content on the device
        self.host: list[int] = []                    # numbers in the host tier, least recently stored first
        self.host_content: dict[int, int] = {}       # slot -> its content
        self.fresh = 0

    def name(self, number: int) -> BlockName:
        return name_of((number,))

    def reuse(self) -> int:
        """The block that the model allocates next."""
        block = self.order.pop(0)
        number = self.names.pop(block, None)
        if number is not None and self.slots:
            if number in self.host:
                self.host.remove(number)
            elif len(self.host) == self.slots - self.taken:
                if not self.host:
                    return block  # every slot is being fetched
                self.host.pop(0)
            self.host.append(number)
        return block

    taken = 0

    def run_moves(self) -> None:
        for kind, source, target in self.pool.take_moves():
            if kind == BlockMove.COPY:
                self.content[target] = self.content[source]
            elif kind == BlockMove.TO_HOST:
                self.host_content[target] = self.content[source]
            else:
                self.content[target] = self.host_content[source]

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.order):
            with pytest.raises(EngineError, match="blocks wanted"):
                self.pool.allocate(count)
            return
        wanted = [self.reuse() for _ in range(count)]
        assert self.pool.allocate(count) == wanted
        self.run_moves()
        for block in wanted:
            self.holds[block] = 1
            self.fresh -= 1
            self.content[block] = self.fresh

    @rule(data=st.data(), number=st.integers(0, 12))
    @precondition(lambda self: any(self.holds.values()))
    def fill(self, data, number: int) -> None:
        """Fill a held block."""
        unnamed = [block for block, count in self.holds.items() if count and block not in self.names]
        if unnamed:
            self.put_name(data.draw(st.sampled_from(unnamed)), number)

    def put_name(self, block: int, number: int) -> None:
        """Name a block. Another block may have the name already."""
        self.content[block] = number
        self.pool.put_name(block, self.name(number))
        if number not in self.names.values():
            self.names[block] = number

    @rule(numbers=st.lists(st.integers(0, 12), min_size=1, max_size=8))
    def run_a_request(self, numbers: list[int]) -> None:
        """Allocate, fill and free blocks."""
        numbers = numbers[: len(self.order)]
        if numbers:
            self.allocate(len(numbers))
            blocks = sorted(self.content, key=self.content.__getitem__)[: len(numbers)]  # the newest
            for block, number in zip(blocks, numbers, strict=True):
                self.put_name(block, number)
            self.pool.free(blocks)
            for block in reversed(blocks):
                self.model_free(block)

    @rule(data=st.data())
    @precondition(lambda self: any(self.holds.values()))
    def free(self, data) -> None:
        held = [block for block, count in self.holds.items() if count]
        blocks = data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1))
        self.pool.free(blocks)
        for block in reversed(blocks):
            self.model_free(block)

    def model_free(self, block: int) -> None:
        self.holds[block] -= 1
        if not self.holds[block]:
            self.order.insert(len(self.order) if block in self.names else 0, block)

    @rule(number=st.integers(0, 12))
    def look_up(self, number: int) -> None:
        """Look up a number that may be in the index, on the host, or nowhere."""
        self.hit(number)

    @rule(data=st.data(), times=st.integers(1, 3))
    @precondition(lambda self: self.names)
    def share(self, data, times: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.names.values())))
        for _ in range(times):
            self.hit(number)

    def hit(self, number: int) -> None:
        block = next((block for block, other in self.names.items() if other == number), None)
        assert self.pool.find(self.name(number)) == block
        assert self.pool.find_on_host(self.name(number)) == (number in self.host)
        if block is not None:
            assert self.content[block] == number
            self.pool.share([block])
            if not self.holds[block]:
                self.order.remove(block)
            self.holds[block] += 1

    @rule(data=st.data())
    @precondition(lambda self: any(count > 1 for count in self.holds.values()) and self.order)
    def private_copy(self, data) -> None:
        block = data.draw(st.sampled_from([b for b, count in self.holds.items() if count > 1]))
        copy = self.reuse()
        assert self.pool.private_copy(block) == copy
        self.run_moves()
        assert self.content[copy] == self.content[block]
        self.holds[copy] = 1
        self.model_free(block)

    @rule(data=st.data())
    def fetch(self, data) -> None:
        there = [number for number in self.host if number not in self.names.values()]
        if not there or not self.order:
            return
        numbers = data.draw(st.lists(st.sampled_from(there), unique=True, min_size=1, max_size=len(self.order)))
        self.host = [number for number in self.host if number not in numbers]
        self.taken = len(numbers)
        wanted = [self.reuse() for _ in numbers]
        self.taken = 0
        assert self.pool.fetch([self.name(number) for number in numbers]) == wanted
        self.run_moves()
        for number, block in zip(numbers, wanted, strict=True):
            assert self.content[block] == number
            self.holds[block] = 1
            self.names[block] = number

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.names.clear()
        self.host.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        free, block = [], self.pool._next[self.pool.num_blocks]
        while block != self.pool.num_blocks:
            free.append(block)
            block = self.pool._next[block]
        assert free == self.order
        assert {b: n.tokens[0] for b, n in enumerate(self.pool.states().names) if n is not None} == self.names
        assert [self.pool.ref_count(block) for block in self.holds] == list(self.holds.values())
        if self.slots:
            tier = self.pool.host_tier
            assert [name.tokens[0] for name in tier._slots] == self.host
            assert all(self.host_content[slot] == name.tokens[0] for name, slot in tier._slots.items())
