"""Names of blocks: which requests may share KV, and which blocks are in the prefix index.

Called by: `Engine` for new requests, new weights and handover; the scheduler when blocks are full.
Owns: the version of the weights, and the block names in `Request.kv`.
Never: changes a block table.
"""

from collections.abc import Iterable, Sequence

from jpaged.engine.kv_cache.block_pool import BlockName, BlockPool, prefix_root
from jpaged.engine.kv_cache.block_table import NEVER
from jpaged.engine.request import Request


class BlockNamer:
    """Names the blocks of all requests, and adds the names to the prefix index of their pool."""

    def __init__(self, pool: BlockPool, block_size: int, weight_version: int):
        """weight_version: number of weight updates before."""
        self._pool, self._block_size, self._weight_version = pool, block_size, weight_version

    def admit(self, request: Request, *, salt: str = "", shares: bool = True) -> None:
        """Set the root of a new request's block names. shares: other requests may use its blocks."""
        adapter = "" if request.adapter is None else request.adapter.key
        request.kv.prefix_root = prefix_root(adapter=adapter, weight_version=self._weight_version, salt=salt)
        if not shares:
            request.kv.make_private(request.arrival.to_bytes(8, "little"))

    def switch_to_long_rope(self, request: Request) -> None:
        """Make a request that holds no blocks recompute all its KV with the rope of long sequences."""
        request.kv.switch_to_long_rope(len(request.token_ids))

    def inherit(self, request: Request, parent: Request) -> None:
        """Let a request find the blocks that its parent computed for their common prompt."""
        request.kv.inherit_names(parent.kv)

    def note_new_weights(self, requests: Iterable[Request], weight_version: int) -> None:
        """Forget all cached KV. Blocks of `requests`, which may continue with their old KV, are never shared.

        weight_version: number of weight updates so far.
        """
        self._weight_version = weight_version
        self._pool.forget_all()
        for request in requests:
            request.kv.make_private(f"{request.arrival} {self._weight_version}".encode())
            if request.kv.block_tables:
                # All KV that the request computes from now on depends on the old weights, until its blocks are freed.
                # Without this line, a request with windows would find its own last blocks, without the first ones.
                request.kv.num_indexed_blocks = NEVER

    def index_computed(self, request: Request, num_computed: int | None = None) -> None:
        """Add the request's new full blocks of computed, known tokens to the prefix index.

        num_computed: tokens computed after the planned step; None: `request.schedule.num_computed`. Counting a planned
        step is safe, because in every layer all rows write their keys and values before any row attends. Another
        request can share such a block in the step that computes it.
        """
        kv = request.kv
        if not kv.block_tables:  # of an encoder
            return
        computed = request.schedule.num_computed if num_computed is None else num_computed
        full = min(computed, len(request.token_ids)) // self._block_size
        first = kv.num_indexed_blocks
        if full <= first:
            return
        names = kv.names(request.token_ids, full, self._block_size)
        for kv_group, table in enumerate(kv.block_tables):
            begin = max(first, table.first_held)  # blocks before this were freed before their tokens were known
            new = names[begin:full]
            if kv_group > 0:
                new = [name._replace(kv_group=kv_group) for name in new]
            self._pool.put_names(table.blocks[begin:full], new, kv_group)
        kv.num_indexed_blocks = full

    def adopt(self, names: Sequence[BlockName]) -> tuple[list[BlockName], list[int]]:
        """Allocate free blocks for content from another engine, and add them to the prefix index as free blocks.

        The caller writes the content before the next step. Returns the first new names that fit, and their blocks.
        """
        pool = self._pool
        known = {name: block for name in names if (block := pool.find(name)) is not None}
        pool.share(known.values())  # so that they are not allocated
        new = [name for name in names if name not in known][: pool.num_free]
        blocks = pool.allocate(len(new))
        for name, block in zip(new, blocks, strict=True):
            pool.put_name(block, name)
        pool.free([*known.values(), *blocks])
        return new, blocks

    def may_share(self, request: Request, other: Request, num_tokens: int) -> bool:
        """Whether `request` and `other` may share the KV of their first `num_tokens` tokens, which are whole blocks."""
        if request.skips_prefix_cache or num_tokens > min(request.max_cached_tokens + 1, len(other.token_ids)):
            return False
        index = num_tokens // self._block_size - 1
        return len({each.kv.name(each.token_ids, index, 0, self._block_size) for each in (request, other)}) == 1
