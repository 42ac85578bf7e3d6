"""Tile sizes of the NVIDIA kernels: measured ones from tuning.json, and the rule for what nobody has measured.

`benchmarks/tune_kernels.py` measures on a card and writes the file. An entry is found by the card's name and by `key`.
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
    """Sizes that change the time and not the result (but those of splits, which also set the order of the sums)."""

    decode_keys: int           # keys a turn of a decode program's loop
    prefill_rows: int          # query rows of a prefill tile: tokens times heads of the group
    prefill_keys: int          # keys a turn of its loop
    min_split_keys: int = 512  # keys of a decode program, at least
    max_splits: int = 32       # decode programs of a row and KV head, at most
    decode_warps: int = 4
    decode_stages: int = 2
    prefill_warps: int = 4
    prefill_stages: int = 2

    def split_keys(self, table_keys: int) -> int:
        """Keys of a decode program, where block tables have room for so many."""
        return max(self.min_split_keys, pl.next_power_of_2(-(-table_keys // self.max_splits)))

    @classmethod
    def by_rule(cls, head_dim: int, itemsize: int) -> "Tiling":
        """The rule for shapes nobody has tuned. itemsize: bytes of a number in the products.

        At most 32 splits, of at least 512 keys: a split's result (float32) is then under 2% of the keys and values it
        read, and one row of 32,768 keys still has 32 programs a KV head. Tiles are as large as a card's shared memory
        (228 KiB a multiprocessor on Hopper) holds two stages of keys and values of.
        """
        wide = head_dim * itemsize > 256
        return cls(32 if wide else 64, 64 if wide else 128, 32 if wide else 64, prefill_warps=4 if wide else 8)

    @classmethod
    def choose(cls, q: Any, pages: KVPages) -> "Tiling":
        """The measured tiling for JAX's default device, else the rule. q, pages: arrays or ShapeDtypeStructs."""
        measured = _measured(FILE).get(default_device().device_kind, {}).get(key(q, pages))
        if measured is None:
            return cls.by_rule(pages.head_dim, q.dtype.itemsize)
        return cls(**measured["tiling"])


def key(q: Any, pages: KVPages) -> str:
    """What a measurement holds for: types, width and group of heads, block size."""
    q_per_kv = q.shape[1] // pages.num_kv_heads
    return f"q {q.dtype}, pages {pages.dtype}, head_dim {pages.head_dim}, q_per_kv {q_per_kv}, block {pages.block_size}"


@functools.cache
def _measured(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """device kind -> key -> {"tiling": fields of Tiling, and how it was measured}."""
    return json.loads(file.read_text("utf-8"))
