"""Tile sizes of the NVIDIA kernels: measured ones from tuning.json, else a rule.

`benchmarks/tune_kernels.py` measures on a GPU and writes the file. Entries are found by the GPU's name and by `key`.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.platforms import default_device, has_small_blocks, is_a100

# Widest heads: Hopper's shared memory has room for 128 queries, and for two tiles of keys and values
MOST_IN_SHARED = 640
FILE = pathlib.Path(__file__).with_name("tuning.json")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes that change the speed, not the result. Only the sizes of splits change the order of sums.

    Decodes: a row is cut into splits (flash decoding). A task is one split and one KV head.
    """

    decode_keys: int           # keys per iteration of a decode program
    prefill_rows: int          # query rows of a prefill tile: tokens times q_per_kv
    prefill_keys: int          # keys per iteration of a prefill program
    min_split_keys: int = 512  # keys of a split; doubled while a row has too many splits
    row_tasks: int = 256       # tasks of a long row, from which `max_splits` follows
    decode_programs: int = 3   # decode programs per multiprocessor
    decode_warps: int = 4
    decode_stages: int = 5
    prefill_warps: int = 4
    prefill_stages: int = 5
    decode_v_parts: int = 1   # programs that share the values of a head, each with all of its keys
    prefill_v_parts: int = 1
    prefill_kernel: str = "triton"  # or "mosaic_gpu", which has its own sizes; see `usable_implementations`

    def max_splits(self, kv_heads: int) -> int:
        """Largest number of splits of a row. They fill a GPU with one row, and are few enough to merge fast."""
        return min(max(self.row_tasks // kv_heads, 8), 128)

    def longer_splits(self, table_keys: int, kv_heads: int) -> list[int]:
        """Sizes of splits for rows too long for `min_split_keys`: 1,024, 2,048 and so on. table_keys: longest row."""
        sizes = []
        keys = self.min_split_keys
        while keys * self.max_splits(kv_heads) < table_keys:
            keys *= 2
            sizes.append(keys)
        return sizes

    def splits(self, table_keys: int, window: int | None, kv_heads: int) -> int:
        """Largest number of splits of any row of a call. window: keys that a query sees."""
        most = min(self.max_splits(kv_heads), -(-table_keys // self.min_split_keys))
        return most if window is None else min(most, -(-(window - 1) // self.min_split_keys) + 1)

    @classmethod
    def by_rule(
        cls, head_dim: int, itemsize: int, *, q_per_kv: int = 1, small_blocks: bool = False, a100: bool = False
    ) -> "Tiling":
        """The rule for shapes that were not tuned. itemsize: bytes of a number in the matmuls.

        small_blocks: of `platforms.has_small_blocks`. A prefill then has no second tile in flight.
        a100:         of `platforms.is_a100`. A prefill's warp then has 32 query rows instead of 16, because each warp
                      reads all keys and values from shared memory, which limits an A100. Heads of 128 have tiles of 32
                      keys: with 64, registers are spilled.

        A split's result (float32) is under 2% of the 512 keys and values that it read. One row of 4,096 keys and 8 KV
        heads has 64 tasks. In a decode, two tiles of 32 KiB are in flight while a third is used. That takes five
        stages: two are for the page indices, which arrive one tile before the pages. Three programs fit into a
        multiprocessor's shared memory (228 KiB on Hopper). float32 matmuls run without tensor cores: their tiles are
        small enough to spill no registers.
        """
        if head_dim > 256:
            return cls._wide(head_dim, itemsize, q_per_kv=q_per_kv, less_memory=small_blocks or a100)
        if itemsize == 4:
            return cls(16, 32, 16, prefill_warps=8, prefill_stages=2)
        stages = 2 if small_blocks else 5
        if head_dim > 128:
            return cls(32, 64, 32, prefill_stages=stages)
        if a100:
            return cls(64, 128, 64 if head_dim <= 64 else 32, prefill_warps=4, prefill_stages=stages)
        return cls(64, 128, 64, prefill_warps=8, prefill_stages=stages)

    @classmethod
    def _wide(cls, head_dim: int, itemsize: int, *, q_per_kv: int, less_memory: bool) -> "Tiling":
        """The rule for heads of more than 256 numbers: Gemma 4's 512, and latent vectors of 576 with values of 512.

        The output of 128 query rows and 512 columns would fill a multiprocessor's registers. So two programs share the
        columns of the values, and both compute all scores. Tiles of fewer query rows would read keys and values more
        often than the L2 cache of an H200 delivers them. A decode of up to 32 query heads has all columns in one task.

        Results of splits have q_per_kv * v_dim float32 numbers a row: 256 KiB for the 128 heads of a DeepSeek-V3. So
        more query heads have fewer and longer splits.
        """
        if itemsize == 4:
            return cls(
                16, 16, 16, decode_programs=1, decode_stages=2, decode_v_parts=2, prefill_warps=8, prefill_stages=1,
                prefill_v_parts=2,
            )  # fmt: skip
        rows = max(16, 1 << (q_per_kv - 1).bit_length())
        tiling = cls(16, 128, 16, decode_programs=2, prefill_warps=8, prefill_stages=3, prefill_v_parts=2)
        if rows > 32:
            tiling = dataclasses.replace(
                tiling, decode_programs=1, decode_warps=8 if rows > 64 else 4, decode_stages=3, decode_v_parts=2,
                min_split_keys=1024, row_tasks=2048 // rows,
            )  # fmt: skip
        elif rows > 16:
            tiling = dataclasses.replace(tiling, decode_stages=3)
        if less_memory or head_dim > MOST_IN_SHARED:
            return dataclasses.replace(
                tiling, prefill_rows=32, prefill_warps=4, prefill_stages=2, prefill_v_parts=1, decode_stages=1
            )
        if head_dim <= 512:
            return dataclasses.replace(tiling, prefill_keys=32, prefill_stages=2)
        return tiling

    @classmethod
    def small(cls) -> "Tiling":
        """Sizes that need the least of a device: the smallest matmuls, one split for each row, no copies in flight."""
        return cls(16, 16, 16, min_split_keys=2**30, decode_stages=1, prefill_stages=1)

    @classmethod
    def choose(cls, q: Any, pages: KVPages, key_dim: int | None = None) -> "Tiling":
        """The measured tiling for JAX's default device, or the rule.

        q, pages: arrays or ShapeDtypeStructs. key_dim: of `paged_attention`.
        """
        measured = cls.measured(default_device().device_kind, q, pages)
        return measured or cls.by_rule(
            key_dim or pages.head_dim, q.dtype.itemsize, q_per_kv=q.shape[1] // pages.num_kv_heads,
            small_blocks=has_small_blocks(), a100=is_a100(),
        )  # fmt: skip

    @classmethod
    def measured(cls, device_kind: str, q: Any, pages: KVPages) -> "Tiling | None":
        """The measured tiling for a kind of device; None if there is none."""
        entry = _measured(FILE).get(device_kind, {}).get(key(q, pages))
        return None if entry is None else cls(**entry["tiling"])


def key(q: Any, pages: KVPages) -> str:
    """Key of a measurement: all that the best tile sizes depend on."""
    q_per_kv = q.shape[1] // pages.num_kv_heads
    return f"q {q.dtype}, pages {pages.dtype}, head_dim {pages.head_dim}, q_per_kv {q_per_kv}, block {pages.block_size}"


@functools.cache
def _measured(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """device kind -> key -> {"tiling": fields of Tiling, and how it was measured}."""
    return json.loads(file.read_text("utf-8"))
