"""Finds the blocks of a kv_group that the next token still sees. Earlier blocks are freed."""

import dataclasses
from collections.abc import Sequence

from jpaged.engine.kv_cache.block_table import NEVER, BlockTable


@dataclasses.dataclass(frozen=True)
class SlidingWindows:
    """The windows of all kv_groups. A window is the number of keys that a query sees, itself included."""

    windows: tuple[int | None, ...]  # one per kv_group; None: a query sees all keys before it
    block_size: int
    windowed: dict[int, int] = dataclasses.field(init=False)  # kv_group -> window, where there is one

    def __post_init__(self) -> None:
        windowed = {kv_group: window for kv_group, window in enumerate(self.windows) if window is not None}
        object.__setattr__(self, "windowed", windowed)

    def first_seen(self, window: int | None, num_computed: int) -> int:
        """Index of the first block that the next token sees."""
        return 0 if window is None else max(num_computed - window + 1, 0) // self.block_size

    def release_at(self, block_tables: Sequence[BlockTable]) -> int:
        """Number of computed tokens at which the next block leaves a window."""
        size = self.block_size
        ends = ((block_tables[i].first_held + 1) * size + window - 1 for i, window in self.windowed.items())
        return min(ends, default=NEVER)
