"""Block tables of requests: find a shared prefix, grow with the tokens, name what is full, give back."""

from collections.abc import Iterable

from jpaged.engine.block_pool import BlockName, BlockPool, block_digest
from jpaged.engine.request import Request
from jpaged.errors import EngineError


class KVCacheManager:
    """Keeps every running request's block table, over one pool."""

    def __init__(self, num_blocks: int, block_size: int):
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks, first to last, that hold the beginning of a request's known tokens already.

        They never cover all of them: the last known token is always computed, because the next one is sampled from it.
        """
        blocks: list[int] = []
        for index in range((len(request.token_ids) - 1) // self.block_size):
            block = self.pool.find(self._name(request, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_start(self, prefix: list[int], num_blocks: int, headroom: int = 0) -> bool:
        """Whether `num_blocks` fit, of which `prefix` are shared, with `headroom` blocks left over."""
        wanted = num_blocks - len(prefix) + self.pool.num_free_among(prefix)
        return wanted + headroom <= self.pool.num_free

    def start(self, request: Request, prefix: list[int]) -> None:
        """Begin a request's table with shared blocks, whose tokens then count as computed."""
        if request.block_table:
            raise EngineError(f"request {request.request_id} starts, but holds {len(request.block_table)} blocks")
        self.pool.share(prefix)
        request.block_table = list(prefix)
        request.num_computed = len(prefix) * self.block_size
        request.num_indexed_blocks = len(prefix)

    def slots_within_reach(self, request: Request) -> int:
        """Tokens the request's table could hold if it took every free block."""
        return (len(request.block_table) + self.pool.num_free) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Make a request's table hold so many tokens; the new blocks, none if it did already."""
        missing = self.blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return []
        blocks = self.pool.allocate(missing)
        request.block_table += blocks
        return blocks

    def index_computed(self, request: Request) -> None:
        """Enter blocks into the prefix index that have become full of tokens both computed and known."""
        full = min(request.num_computed, len(request.token_ids)) // self.block_size
        for index in range(request.num_indexed_blocks, full):
            self.pool.put_name(request.block_table[index], self._name(request, index))
        request.num_indexed_blocks = max(request.num_indexed_blocks, full)

    def release(self, request: Request) -> None:
        """Give back all blocks of a request."""
        self.pool.free(request.block_table)
        request.block_table = []
        request.num_computed = request.num_indexed_blocks = 0

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise EngineError unless the pool is sound and its holds are exactly the tables of the running requests."""
        self.pool.check()
        holds = [0] * self.pool.num_blocks
        for request in running:
            if len(set(request.block_table)) != len(request.block_table):
                raise EngineError(f"request {request.request_id} holds a block twice: {request.block_table}")
            if request.num_computed > len(request.block_table) * self.block_size:
                raise EngineError(f"request {request.request_id} computed {request.num_computed} tokens without room")
            for block in request.block_table:
                holds[block] += 1
        for block, count in enumerate(holds):
            if self.pool.ref_count(block) != count:
                raise EngineError(f"block {block}: {count} tables hold it, {self.pool.ref_count(block)} are counted")

    def _name(self, request: Request, index: int) -> BlockName:
        """Name of a request's full block; digests are made once a request and kept over a preemption."""
        digests = request.block_digests
        tokens = tuple(request.token_ids[index * self.block_size : (index + 1) * self.block_size])
        parent = digests[index - 1] if index else request.prefix_root
        if index == len(digests):
            digests.append(block_digest(parent, tokens))
        return BlockName(digests[index], parent, tokens)
