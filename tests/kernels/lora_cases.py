"""Batches of rows with adapters and their results in float64, and calls with the shapes of Llama 3.1 8B."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_lora
from tests.support.device_arrays import device_array


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call of grouped_lora."""

    inputs: int
    pattern: tuple[tuple[int, int], ...]
    repeats: int = 1               # of the pattern
    rows: int = 12
    rank: int = 8                  # R of the pools
    ranks: tuple[int, ...] = ()    # true ranks that slots have; (): 0 to R
    slots: int = 5
    num_rows: int | None = None    # None: all

    @property
    def outputs(self) -> int:
        return self.repeats * sum(width for _, width in self.pattern)


LAYERS, LAYER = 2, 1
QKV = ((0, 32), (1, 16), (2, 16))
CASES = {
    "lanes": Case(128, ((0, 256), (1, 128), (2, 128)), rows=70, rank=5, slots=4, num_rows=66),
    "qkv": Case(64, QKV, repeats=2, rows=21, num_rows=19),
    "gate_up": Case(96, ((0, 80), (1, 80)), rows=16, rank=12),
    "down": Case(160, ((0, 64),), rows=9, rank=16, ranks=(16, 1, 8, 3)),
    "one part": Case(128, ((0, 128),), rows=9, rank=16),
    "odd": Case(33, ((0, 5), (1, 1)), repeats=7, rows=5, rank=3),
}


def make(case: Case, dtype: Any = "float32", pool: Any = "float32", base: Any = None, seed: int = 0) -> list[Any]:
    """Arrays of a call, up to num_rows. Adapters are NaN beyond their true ranks, and rows that are not needed too.

    Slots of rows repeat in runs, change in the middle of tiles, and are -1 for some.
    """
    rng = np.random.default_rng(seed)
    parts = 1 + max(part for part, _ in case.pattern)
    part = part_of(case)
    shape = (LAYERS, case.slots, parts)
    a = rng.standard_normal((*shape, case.rank, case.inputs)) * case.inputs**-0.5
    b = rng.standard_normal((LAYERS, case.slots, case.rank, case.outputs))
    ranks = rng.choice(case.ranks or np.arange(case.rank + 1), shape).astype(np.int32)
    beyond = np.arange(case.rank) >= ranks[..., None]
    a[beyond] = np.nan
    b[np.swapaxes(beyond[:, :, part], 2, 3)] = np.nan
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    slots = np.repeat(rng.integers(-1, case.slots, case.rows), rng.integers(1, 6, case.rows))[: case.rows]
    num_rows = case.rows if case.num_rows is None else case.num_rows
    x = rng.standard_normal((case.rows, case.inputs))
    x[num_rows:] = np.nan
    rows = rng.standard_normal((case.rows, case.outputs))
    return [
        device_array(x, dtype), device_array(rows, base or dtype), device_array(a, pool), device_array(b, pool), ranks,
        scales, slots.astype(np.int32), np.int32(num_rows),
    ]  # fmt: skip


def part_of(case: Case) -> np.ndarray:
    """The part of each output."""
    return np.concatenate([np.full(width, part) for part, width in case.pattern * case.repeats])


def in_float64(case: Case, call: list[Any]) -> np.ndarray:
    """Results of the needed rows."""
    x, base, a, b = (np.asarray(array).astype(np.float64) for array in call[:4])
    ranks, scales, slots, num_rows = call[4:]
    part, out = part_of(case), base[:num_rows].copy()
    for row in range(num_rows):
        slot = int(slots[row])
        for p in range(a.shape[2]) if slot >= 0 else ():
            rank, columns = ranks[LAYER, slot, p], np.flatnonzero(part == p)
            h = a[LAYER, slot, p, :rank] @ x[row] * np.float64(scales[LAYER, slot, p])
            out[row, columns] += h @ b[LAYER, slot, :rank, columns].T
    return out


# Llama 3.1 8B: inputs, pattern, outputs
LLAMA = {
    "qkv": (4096, ((0, 512), (1, 128), (2, 128)), 6144), "gate_up": (4096, ((0, 14336), (1, 14336)), 28672),
    "down": (14336, ((0, 4096),), 4096), "lm_head": (4096, ((0, 128256),), 128256),
}  # fmt: skip


def llama_call(name, rows, rank, dtype="bfloat16", layers=32, slots=64):
    """A function of arrays, and their ShapeDtypeStructs."""
    inputs, pattern, outputs = LLAMA[name]
    parts = 1 + max(part for part, _ in pattern)
    shapes = [
        ((rows, inputs), dtype), ((rows, outputs), dtype), ((layers, slots, parts, rank, inputs), dtype),
        ((layers, slots, rank, outputs), dtype), ((layers, slots, parts), "int32"), ((layers, slots, parts), "float32"),
        ((rows,), "int32"), ((), "int32"), ((), "int32"),
    ]  # fmt: skip
    return (
        lambda *args: grouped_lora(*args[:-1], layer=args[-1], pattern=pattern),
        [jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in shapes],
    )
