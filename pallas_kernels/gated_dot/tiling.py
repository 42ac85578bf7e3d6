"""Tile sizes of the NVIDIA kernel, and the shapes that use it. Both are measured on a GPU, and stored in tuning.json.

`benchmarks/tune_kernels.py` writes the file. Without a measurement for the GPU and the shape, XLA is used.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from pallas_kernels.platforms import device_kind, has_small_blocks

FILE = pathlib.Path(__file__).with_name("tuning.json")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of a program's tile. It multiplies [rows, inputs] by [outputs, inputs] of gate and of up."""

    rows: int     # of x
    outputs: int  # of gate, and as many of up
    inputs: int   # of one iteration
    warps: int = 4
    stages: int = 4  # of the software pipeline: one tile less is in flight

    @classmethod
    def by_rule(cls, rows: int, *, small_blocks: bool = False) -> "Tiling":
        """The rule for shapes that were not tuned. rows: of the call. small_blocks: `platforms.has_small_blocks`.

        Tiles have at least 64 rows: fewer rows would use another matrix instruction on Hopper, with other bits. 64 rows
        take 16 KiB of weights and 8 KiB of x per iteration. 128 rows take 32 and 16 KiB, and 128 registers per thread
        for both sums.
        """
        if rows <= 64:
            return cls(64, 64, 64, warps=4, stages=3 if small_blocks else 4)
        return cls(128, 128, 64, warps=8, stages=2 if small_blocks else 4)


# The only tile of "triton_fixed". Three stages of 24 KiB fit into every GPU's shared memory.
FIXED = Tiling(64, 64, 64, warps=4, stages=3)


def measured(kind: str, x: Any, weight: Any) -> Tiling | None:
    """The fastest tiling on a kind of GPU; None: XLA is faster, or nothing was measured.

    x, weight: arrays or ShapeDtypeStructs. The measurement with the fewest rows that are at least x's decides, else the
    measurement with the most rows.
    """
    by_rows = _entries(FILE).get(kind, {}).get(key(x, weight), {})
    if not by_rows:
        return None
    sizes = sorted(map(int, by_rows))
    entry = by_rows[str(next((size for size in sizes if size >= x.shape[0]), sizes[-1]))]
    return None if entry["tiling"] is None else Tiling(**entry["tiling"])


def choose(x: Any, weight: Any) -> Tiling:
    """The measured tiling for the device that a kernel is traced for, or the rule."""
    return measured(device_kind(), x, weight) or Tiling.by_rule(x.shape[0], small_blocks=has_small_blocks())


def key(x: Any, weight: Any) -> str:
    """Key of the measurements of a matrix. Activations cost about the same."""
    return f"{x.dtype}, {weight.shape[2]} -> {weight.shape[1]}"


@functools.cache
def _entries(file: pathlib.Path) -> dict[str, dict[str, dict[str, Any]]]:
    """device kind -> key -> number of rows -> {"tiling": fields of Tiling or None, and how it was measured}."""
    return json.loads(file.read_text("utf-8"))
