"""A request's block tables, and the names of its full blocks. `KVCacheManager` and `BlockNamer` write them."""

import dataclasses
import hashlib
import sys

from jpaged.engine.kv_cache.block_pool import BlockName, block_digest, token_bytes
from jpaged.engine.kv_cache.host_tier import StoredSnapshot

NEVER = sys.maxsize
FREED = -1


@dataclasses.dataclass(slots=True)
class BlockTable:
    """A request's blocks in one kv_group. Block i stores KV of the tokens from position i * block_size on."""

    blocks: list[int]    # entries before first_held are FREED: the kv_group's window does not reach them
    first_held: int = 0  # index of the first block that the request holds

    @property
    def held(self) -> list[int]:
        """The blocks that the request holds, as a copy."""
        return self.blocks[self.first_held :]


@dataclasses.dataclass(slots=True, eq=False)
class KVState:
    """Blocks and block names of one request."""

    prefix_root: bytes = b""      # parent digest of the first block's name
    rope_len: int = 0             # shortest sequence length that a length-dependent rope assumes for this request
    block_tables: list[BlockTable] = dataclasses.field(default_factory=list)  # one per kv_group, all equally long
    block_names: list[BlockName] = dataclasses.field(default_factory=list)    # of full blocks of known tokens
    num_indexed_blocks: int = 0   # blocks of each table that were offered to the prefix index
    num_slots: int = 0            # tokens that the block tables have room for
    num_held: int = 0             # blocks held in all kv_groups
    release_at: int = NEVER       # number of computed tokens at which a block leaves its window
    tail_shared: bool = False     # the block that the next token is written to may be shared with a fork
    # with recurrent layers; see `StateSlots`
    branch_blocks: int = 0            # blocks of the prefix whose KV was found, also without a state at its end
    snapshot_slot: int | None = None  # of the pending snapshot
    snapshot_blocks: int = 0          # computed blocks at the pending snapshot
    saved_blocks: int = 0             # computed blocks at the last snapshot that later requests can find
    fetched: StoredSnapshot | None = None  # of the host tier, which the request starts from

    def make_private(self, secret: bytes) -> None:
        """Hide the request's blocks from all other requests except its forks, by names that only they know."""
        self.prefix_root = hashlib.sha256(b"private" + secret + self.prefix_root).digest()
        self.block_names = []

    def switch_to_long_rope(self, num_tokens: int) -> None:
        """Recompute all KV with the rope of long sequences, and share it only with other long sequences."""
        self.rope_len = num_tokens
        self.prefix_root = hashlib.sha256(b"long rope" + self.prefix_root).digest()
        self.block_names = []

    def inherit_names(self, parent: "KVState") -> None:
        """Copy everything that decides block names from another request with the same tokens."""
        self.prefix_root, self.rope_len = parent.prefix_root, parent.rope_len
        self.block_names = list(parent.block_names)

    def name(self, token_ids: list[int], index: int, kv_group: int, block_size: int) -> BlockName:
        """Name of block `index` of the block table of one kv_group."""
        name = self.names(token_ids, index + 1, block_size)[index]
        return name if kv_group == 0 else name._replace(kv_group=kv_group)

    def names(self, token_ids: list[int], count: int, block_size: int) -> list[BlockName]:
        """At least `count` block names, in kv_group 0. Each is computed once, and kept across preemptions.

        token_ids: the request's known tokens, at least count * block_size.
        """
        names = self.block_names
        first = len(names)
        if first < count:
            parent = names[-1].digest if names else self.prefix_root
            tokens = token_bytes(token_ids[first * block_size : count * block_size])
            width = len(tokens) // (count - first)
            for start in range(0, len(tokens), width):
                own = tokens[start : start + width]
                digest = block_digest(parent, own)
                names.append(BlockName(digest, parent, own))
                parent = digest
        return names
