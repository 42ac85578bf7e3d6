"""Checks that block tables and pool agree. For tests, and for an idle engine: it walks the whole pool."""

from collections.abc import Sequence

from jpaged.engine.kv_cache.block_pool import BlockPool
from jpaged.engine.kv_cache.sliding_windows import SlidingWindows
from jpaged.engine.request import Request
from jpaged.errors import EngineError


def check_block_tables(pool: BlockPool, windows: SlidingWindows, running: Sequence[Request]) -> None:
    """Raise EngineError unless the pool's reference counts match the running requests' block tables."""
    holds = [0] * pool.num_blocks
    for request in running:
        held = [block for table in request.kv.block_tables for block in table.held]
        if len(set(held)) != len(held):
            raise EngineError(f"request {request.request_id} holds a block twice: {request.kv.block_tables}")
        for block in held:
            holds[block] += 1
    for block, count in enumerate(holds):
        if pool.ref_count(block) != count:
            raise EngineError(f"block {block}: {count} tables hold it, {pool.ref_count(block)} are counted")
    for request in running:
        _check_request(pool, windows, request)


def _check_request(pool: BlockPool, windows: SlidingWindows, request: Request) -> None:
    kv, num_computed, name = request.kv, request.schedule.num_computed, f"request {request.request_id}"
    if num_computed > kv.num_slots:
        raise EngineError(f"{name} has computed {num_computed} tokens and has slots for {kv.num_slots}")
    if len(kv.block_tables) != len(windows.windows):
        raise EngineError(f"{name} has {len(kv.block_tables)} block tables for {len(windows.windows)} kv_groups")
    num_held = sum(len(table.held) for table in kv.block_tables)
    if kv.num_held != num_held:
        raise EngineError(f"{name} counts {kv.num_held} blocks, its block tables hold {num_held}")
    for window, table in zip(windows.windows, kv.block_tables, strict=True):
        if len(table.blocks) * windows.block_size != kv.num_slots:
            raise EngineError(f"{name} has {len(table.blocks)} blocks for {kv.num_slots} slots")
        next_block = num_computed // windows.block_size
        shared = num_computed < kv.num_slots and pool.ref_count(table.blocks[next_block]) > 1
        if shared and not kv.tail_shared:
            raise EngineError(f"{name} is about to write to block {table.blocks[next_block]}, which others hold")
        certain = num_computed - request.schedule.num_drafts_in_flight
        if table.first_held != windows.first_seen(window, certain):
            raise EngineError(
                f"{name} has computed {num_computed} tokens and holds blocks from index {table.first_held} on, with a "
                f"window of {window}"
            )
