"""Tile sizes of the NVIDIA kernels: measured ones from tuning.json, else a rule.

`benchmarks/tune_kernels.py` measures on a card and writes the file. Entries are found by the card's name and by `key`.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.platforms import default_device

FILE = pathlib.Path(__file__).with_name("tuning.json")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes that change the time, not the result. Only the sizes of splits change the order of the sums."""

    decode_keys: int           # keys per iteration of a decode program
    prefill_rows: int          # query rows of a prefill tile: tokens times q_per_kv
    prefill_keys: int          # keys per iteration of a prefill program
    min_split_keys: int = 512  # fewest keys of a decode program
    max_splits: int = 32       # most decode programs per row and KV head
    decode_warps: int = 4
    decode_stages: int = 2
    prefill_warps: int = 4
    prefill_stages: int = 2

    def split_keys(self, table_keys: int) -> int:
        """Keys per decode program. table_keys: most keys that a block table holds."""
        return max(self.min_split_keys, pl.next_power_of_2(-(-table_keys // self.max_splits)))

    @classmethod
    def by_rule(cls, head_dim: int, itemsize: int) -> "Tiling":
        """The rule for shapes that were not tuned. itemsize: bytes of a number in the products.

        There are at most 32 splits, of at least 512 keys. A split's result (float32) is then under 2% of the keys and
        values that it read, and one row of 32,768 keys still has 32 programs per KV head. Tiles are as large as shared
        memory allows: two stages of keys and values must fit (Hopper has 228 KiB per multiprocessor).
        """
        wide = head_dim * itemsize > 256
        return cls(32 if wide else 64, 64 if wide else 128, 32 if wide else 64, prefill_warps=4 if wide else 8)

    @classmethod
    def choose(cls, q: Any, pages: KVPages) -> "Tiling":
        """The measured tiling for JAX's default device, or the rule. q, pages: arrays or ShapeDtypeStructs."""
        measured = _measured(FILE).get(default_device().device_kind, {}).get(key(q, pages))
        if measured is None:
            return cls.by_rule(pages.head_dim, q.dtype.itemsize)
        return cls(**measured["tiling"])


def key(q: Any, pages: KVPages) -> str:
    """Key of a measurement: everything about a call that the best tile sizes depend on."""
    q_per_kv = q.shape[1] // pages.num_kv_heads
    return f"q {q.dtype}, pages {pages.dtype}, head_dim {pages.head_dim}, q_per_kv {q_per_kv}, block {pages.block_size}"


@functools.cache
def _measured(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """device kind -> key -> {"tiling": fields of Tiling, and how it was measured}."""
    return json.loads(file.read_text("utf-8"))
