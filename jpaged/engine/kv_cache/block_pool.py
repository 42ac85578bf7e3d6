"""Physical blocks of the KV pool: reference counts, the prefix index, and the free list.

1. A block is *held* by one or more requests (`ref_count > 0`), or it is in the free list.
2. A full block whose tokens are known gets a name: SHA-256 over the name of the block before it and its own tokens.
   The first name of a chain, the root, is a digest of all else that decides the KV: adapter, weight version, salt.
3. A free block keeps its name and its content until it is allocated again. The free list is in the order of reuse:
   first blocks without a name, then named blocks, least recently freed first.
4. With a host tier, a named block moves there, content and name, before it is allocated again. `StateSlots` moves
   snapshots there in the same way.

Every operation takes constant time per block. The free list is doubly linked through two arrays, the index is a dict.
`moves` records, in order, the block copies and the moves to the host and back that the device has to run.
"""

import array
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jpaged.engine.kv_cache.host_tier import HostTier
from jpaged.engine.step_plan import EVERYTHING, BlockMove
from jpaged.errors import EngineError
from jpaged.metrics import SharingMetrics

if TYPE_CHECKING:
    from jpaged.engine.kv_cache.state_slots import StateSlots


def prefix_root(*, adapter: str = "", weight_version: int = 0, salt: str = "") -> bytes:
    """Root of a chain of block names. Requests share blocks only if all arguments are equal."""
    parts = (adapter.encode(), str(weight_version).encode(), salt.encode())
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 in the machine's byte order: faster to hash and compare than tuples."""
    return array.array("i", token_ids).tobytes()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a full block. parent: digest of the block before it, or the root. tokens: see `token_bytes`."""
    return hashlib.sha256(parent + tokens).digest()


class BlockName(NamedTuple):
    """Identity of a full block's content. Every hit compares parent and tokens too: no digest is trusted alone."""

    digest: bytes
    parent: bytes
    tokens: bytes      # see `token_bytes`
    kv_group: int = 0  # the same tokens have one block in each kv_group


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStates:
    """State of all blocks at one moment. Each list has one entry per block."""

    ref_counts: list[int]
    names: list[BlockName | None]
    last_used: list[int | None]  # step in which the block was last freed; None: never


class BlockPool:
    """Allocates blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, num_kv_groups: int = 1, host_tier: HostTier[BlockName] | None = None):
        """host_tier: receives named blocks that are allocated again; None: there is no host tier."""
        if num_blocks < 1:
            raise EngineError(f"the KV pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.peak_used = 0
        self.host_tier = host_tier
        self.state_slots: StateSlots | None = None  # None: the model has no recurrent layers
        self.moves: list[tuple[BlockMove, int, int]] = []  # moves of blocks for the next plan, in order
        self.step = 0  # number of the step being planned; the scheduler counts it up
        self._ref_counts = [0] * num_blocks
        self._names: list[BlockName | None] = [None] * num_blocks
        self._last_used: list[int | None] = [None] * num_blocks  # step in which the last holder freed it
        self._indices: list[dict[bytes, int]] = [{} for _ in range(num_kv_groups)]  # per kv_group: digest -> block
        # The free list is a ring through one sentinel, whose index is num_blocks. A held block links to itself.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """Number of block tables that hold a block."""
        return self._ref_counts[block]

    def name(self, block: int) -> BlockName | None:
        """A block's name in the prefix index; None if it has none."""
        return self._names[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate free blocks in the order of reuse. They lose their names. Raises EngineError if too few are free."""
        if count > self.num_free:
            raise EngineError(f"{count} blocks wanted, {self.num_free} free")
        # Called many times a step: cuts the first `count` blocks out of the ring at once, without a call per block.
        following, previous, counts, sentinel = self._next, self._previous, self._ref_counts, self.num_blocks
        blocks = []
        block = following[sentinel]
        for _ in range(count):
            blocks.append(block)
            after = following[block]
            following[block] = previous[block] = block
            counts[block] = 1
            block = after
        following[sentinel], previous[block] = block, sentinel
        self._forget(blocks)
        self.num_free -= count
        self._note_peak()
        return blocks

    def private_copy(self, block: int) -> int:
        """Copy on write: allocate a block with the content of a shared one, and remove one hold from the shared one."""
        (copy,) = self.allocate(1)
        self.moves.append((BlockMove.COPY, block, copy))
        self.free([block])
        return copy

    def fetch(self, names: Sequence[BlockName]) -> list[int]:
        """Allocate blocks, and record moves of the named blocks from the host tier into them."""
        tier = self.host_tier
        if tier is None:
            raise EngineError("blocks are fetched, but there is no host tier")
        slots = [tier.take(name) for name in names]
        blocks = self.allocate(len(names))  # may move other blocks to the host, but not into the slots taken above
        for name, slot, block in zip(names, slots, blocks, strict=True):
            self.moves.append((BlockMove.TO_DEVICE, slot, block))
            self.put_name(block, name)
            tier.free(slot)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a hold to each block. Free blocks leave the free list and keep their names."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._unlink(block)
            self._ref_counts[block] += 1
        self._note_peak()

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a hold from each block. The last block is reused first: a prefix is shared more often than an end."""
        counts, following, previous, sentinel = self._ref_counts, self._next, self._previous, self.num_blocks
        for block in reversed(blocks):
            count = counts[block] - 1
            if count < 0:
                raise EngineError(f"block {block} is freed but no block table holds it")
            counts[block] = count
            if count == 0:
                self._last_used[block] = self.step
                before = sentinel if self._names[block] is None else previous[sentinel]
                after = following[before]
                following[before] = previous[after] = block
                previous[block], following[block] = before, after
                self.num_free += 1

    def put_name(self, block: int, name: BlockName) -> None:
        """Same as `put_names` for one block."""
        self.put_names([block], [name], name.kv_group)

    def put_names(self, blocks: Sequence[int], names: Sequence[BlockName], kv_group: int) -> None:
        """Add held, full blocks of one kv_group to its index, except blocks whose content is in the index already."""
        index, known = self._indices[kv_group], self._names
        for block, name in zip(blocks, names, strict=True):
            digest = name.digest
            if known[block] is None and digest not in index:
                known[block] = name
                index[digest] = block

    def find(self, name: BlockName) -> int | None:
        """The block with this name, held or free; None if there is none."""
        block = self._indices[name.kv_group].get(name.digest)
        return block if block is not None and self._names[block] == name else None

    def find_on_host(self, name: BlockName) -> bool:
        """Whether the host tier stores the block with this name."""
        return self.host_tier is not None and self.host_tier.has(name)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Number of these blocks that are free."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def sharing(self) -> SharingMetrics:
        """Blocks that several block tables hold. Any thread may call it. Takes 0.4 ms for 40,000 blocks."""
        by_count = Counter(self._ref_counts.copy())
        shared = {holds: blocks for holds, blocks in by_count.items() if holds > 1}
        saved = sum((holds - 1) * blocks for holds, blocks in shared.items())
        return SharingMetrics(sum(shared.values()), saved)

    def states(self) -> BlockStates:
        """State of all blocks, as a copy."""
        return BlockStates(self._ref_counts.copy(), self._names.copy(), self._last_used.copy())

    def forget_all(self) -> None:
        """Empty the prefix index of both tiers."""
        for index in self._indices:
            index.clear()
        self._names = [None] * self.num_blocks
        if self.host_tier is not None:
            self.host_tier.forget_all()
        if self.state_slots is not None:
            self.state_slots.forget_all()
            self.drop_host_blocks()

    def drop_host_blocks(self) -> None:
        """Record a move that frees the memory of all host slots of blocks, which snapshots may need."""
        if self.host_tier is not None:
            self.moves.append((BlockMove.DROP, EVERYTHING, EVERYTHING))

    def take_moves(self) -> list[tuple[BlockMove, int, int]]:
        """All moves since the last call, in order: (kind, from, to)."""
        moves, self.moves = self.moves, []
        if self.state_slots is None:
            return moves
        drops = [] if self.host_tier is None else self.host_tier.take_drops()
        return moves + self.state_slots.take_moves() + drops

    def reset_peak(self) -> None:
        """Set the peak of used blocks to the number used now."""
        self.peak_used = self.num_used

    def check(self) -> None:
        """Raise EngineError unless free list, reference counts, names and index agree. Walks the whole pool."""
        seen = set()
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            if block in seen or self._previous[self._next[block]] != block or self._ref_counts[block] != 0:
                raise EngineError(f"the free list is broken at block {block}")
            seen.add(block)
            block = self._next[block]
        free = {block for block, count in enumerate(self._ref_counts) if count == 0}
        if seen != free or len(free) != self.num_free or min(self._ref_counts) < 0:
            raise EngineError(f"free blocks: {len(free)} by holders, {len(seen)} linked, {self.num_free} counted")
        named = {(name.kv_group, name.digest): block for block, name in enumerate(self._names) if name is not None}
        indexed = {(kv_group, digest): i[digest] for kv_group, i in enumerate(self._indices) for digest in i}
        if named != indexed:
            raise EngineError(f"{len(named)} blocks have names, the index has {len(indexed)} entries")
        if self.host_tier is not None:
            self.host_tier.check()

    def _forget(self, blocks: list[int]) -> None:
        """Remove the names of blocks that are allocated again; with a host tier, move named blocks there."""
        names = self._names
        for block in blocks:
            name = names[block]
            if name is not None:
                del self._indices[name.kv_group][name.digest]
                names[block] = None
                slot = None if self.host_tier is None else self.host_tier.put(name)
                if slot is not None:
                    self.moves.append((BlockMove.TO_HOST, block, slot))

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._previous[block] = self._next[block] = block
        self.num_free -= 1

    def _note_peak(self) -> None:
        used = self.num_blocks - self.num_free
        if used > self.peak_used:
            self.peak_used = used
