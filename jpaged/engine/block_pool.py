"""Physical blocks of the KV pool: reference counts, the prefix index, and the free list.

1. A block is *held* by one or more requests (`ref_count > 0`) or lies in the free list.
2. A full block whose tokens are known gets a name: SHA-256 over the name of the block before it and its own tokens.
   The first name of a chain, the root, is made from what else the KV depends on: adapter, weight version, salt.
3. A free block keeps its name and its content until it is allocated again. The free list is in the order of reuse:
   blocks without a name first, then named ones, least recently freed first.
4. With a host tier, a named block that is allocated again leaves its content and its name there first.

Every operation takes constant time a block: the free list is doubly linked through two arrays, the index is a dict.
What the device must do for it, copying blocks and moving them to the host and back, is noted in order in `moves`.
"""

import array
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jpaged.engine.host_tier import HostTier
from jpaged.engine.step_plan import BlockMove
from jpaged.errors import EngineError


def prefix_root(*, adapter: str = "", weight_version: int = 0, salt: str = "") -> bytes:
    """Name that a chain of blocks starts from: requests share blocks only where all of these are equal."""
    parts = (adapter.encode(), str(weight_version).encode(), salt.encode())
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Tokens as names hold them: int32, in the machine's byte order. Hashed and compared faster than a tuple."""
    return array.array("i", token_ids).tobytes()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a full block that holds these tokens (`token_bytes`) and follows the block (or root) `parent`."""
    return hashlib.sha256(parent + tokens).digest()


class BlockName(NamedTuple):
    """What a full block holds. Parent and tokens are compared on every hit, so no digest is trusted alone."""

    digest: bytes
    parent: bytes
    tokens: bytes   # `token_bytes`
    group: int = 0  # of layers: equal tokens have a block in each


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStates:
    """All blocks at one moment, an entry a block."""

    ref_counts: list[int]
    names: list[BlockName | None]
    last_used: list[int | None]  # the step in which it was last given back; None = never


class BlockPool:
    """Hands out blocks 0 .. num_blocks - 1. host_tier: where named blocks go that are allocated again, or None."""

    def __init__(self, num_blocks: int, num_groups: int = 1, host_tier: HostTier[BlockName] | None = None):
        if num_blocks < 1:
            raise EngineError(f"the KV pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.peak_used = 0
        self.host_tier = host_tier
        self.moves: list[tuple[BlockMove, int, int]] = []  # for the device, in order; whoever plans a step takes them
        self.step = 0  # the scheduler's clock, for `states`
        self._ref_counts = [0] * num_blocks
        self._names: list[BlockName | None] = [None] * num_blocks
        self._last_used: list[int | None] = [None] * num_blocks  # the step in which its last owner gave it back
        self._indices: list[dict[bytes, int]] = [{} for _ in range(num_groups)]  # one a group: digest -> block
        # The free list as a ring through one sentinel, whose index is num_blocks. A held block links to itself.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """How many hold a block."""
        return self._ref_counts[block]

    def name(self, block: int) -> BlockName | None:
        """What a block is found by; None if it is not in the index."""
        return self._names[block]

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, in the order of reuse; they lose their names. Raises EngineError if there are too few."""
        if count > self.num_free:
            raise EngineError(f"{count} blocks wanted, {self.num_free} free")
        # Many times a step: the first `count` of the ring are cut out at once, without a call a block.
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
        """Copy-on-write: a block of one's own with the content of a shared one, of which one hold is given back."""
        (copy,) = self.allocate(1)
        self.moves.append((BlockMove.COPY, block, copy))
        self.free([block])
        return copy

    def fetch(self, names: Sequence[BlockName]) -> list[int]:
        """Take free blocks and have the named ones, which the host tier has, moved into them."""
        tier = self.host_tier
        if tier is None:
            raise EngineError("blocks are fetched from a host tier that is not there")
        slots = [tier.take(name) for name in names]
        blocks = self.allocate(len(names))  # may send others to the host: not into these slots, which are taken
        for name, slot, block in zip(names, slots, blocks, strict=True):
            self.moves.append((BlockMove.TO_DEVICE, slot, block))
            self.put_name(block, name)
            tier.give_back(slot)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold named blocks once more; free ones leave the free list."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._unlink(block)
            self._ref_counts[block] += 1
        self._note_peak()

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one hold of each block. The last are reused first: a beginning is shared more often."""
        counts, following, previous, sentinel = self._ref_counts, self._next, self._previous, self.num_blocks
        for block in reversed(blocks):
            count = counts[block] - 1
            if count < 0:
                raise EngineError(f"block {block} is freed but nobody holds it")
            counts[block] = count
            if count == 0:
                self._last_used[block] = self.step
                before = sentinel if self._names[block] is None else previous[sentinel]
                after = following[before]
                following[before] = previous[after] = block
                previous[block], following[block] = before, after
                self.num_free += 1

    def put_name(self, block: int, name: BlockName) -> None:
        """As `put_names` for one."""
        self.put_names([block], [name], name.group)

    def put_names(self, blocks: Sequence[int], names: Sequence[BlockName], group: int) -> None:
        """Enter held, full blocks of one group into its index, except those whose content another block there has."""
        index, known = self._indices[group], self._names
        for block, name in zip(blocks, names, strict=True):
            digest = name.digest
            if known[block] is None and digest not in index:
                known[block] = name
                index[digest] = block

    def find(self, name: BlockName) -> int | None:
        """The block, held or free, that holds what `name` says; None if there is none."""
        block = self._indices[name.group].get(name.digest)
        return block if block is not None and self._names[block] == name else None

    def find_on_host(self, name: BlockName) -> bool:
        """Whether the host tier has it."""
        return self.host_tier is not None and self.host_tier.has(name)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks lie in the free list."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def states(self) -> BlockStates:
        """A copy of what is known of each block."""
        return BlockStates(self._ref_counts.copy(), self._names.copy(), self._last_used.copy())

    def forget_all(self) -> None:
        """Empty the prefix index: after this nothing that was computed before is found."""
        for index in self._indices:
            index.clear()
        self._names = [None] * self.num_blocks
        if self.host_tier is not None:
            self.host_tier.forget_all()

    def take_moves(self) -> list[tuple[BlockMove, int, int]]:
        """All moves noted since the last call, in order: (kind, from, to)."""
        moves, self.moves = self.moves, []
        return moves

    def reset_peak(self) -> None:
        """Count the peak of used blocks from now on."""
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
        named = {(name.group, name.digest): block for block, name in enumerate(self._names) if name is not None}
        indexed = {(group, digest): index[digest] for group, index in enumerate(self._indices) for digest in index}
        if named != indexed:
            raise EngineError(f"{len(named)} blocks have names, the index has {len(indexed)} entries")
        if self.host_tier is not None:
            self.host_tier.check()

    def _forget(self, blocks: list[int]) -> None:
        names = self._names
        for block in blocks:
            name = names[block]
            if name is not None:
                del self._indices[name.group][name.digest]
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
