"""The adapters of one engine step on CPU: time of `grouped_lora`, and of reading the same bytes.

    python benchmarks/grouped_lora.py [--repeats 15] [--slots 256] [--cases "32 rows, ranks 8-16"]

A step adds the adapters to qkv, o, gate_up and down of a model with 6 layers, hidden size 256 and intermediate size
704: 24 calls. Activations are float32, and pools bfloat16. Each repeat uses other slots, so that adapters come from
memory. "read" is the time in which two threads add up as many bytes of the pools. Repeats of all programs are
interleaved in one process. The ratio is the median of the ratios within a repeat.
"""

import argparse
import concurrent.futures
import functools
import platform
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_lora

LAYERS, HIDDEN, INTER, SLOTS = 6, 256, 704, 256
MATRICES = {  # name: inputs, pattern, repeats of the pattern
    "qkv": (HIDDEN, ((0, 128), (1, 64), (2, 64)), 2), "o": (HIDDEN, ((0, 256),), 1),
    "gate_up": (HIDDEN, ((0, INTER), (1, INTER)), 1), "down": (INTER, ((0, 256),), 1),
}  # fmt: skip


class Batch(NamedTuple):
    """Rows of a step."""

    rows: int
    adapters: int            # distinct ones
    ranks: tuple[int, ...]   # in turn
    is_sorted: bool = True   # rows of an adapter are neighbours


CASES = {
    "no adapter": Batch(32, 0, (16,)),
    "1 row, rank 16": Batch(1, 1, (16,)),
    "32 rows, ranks 8-16": Batch(32, 32, (8, 16)),
    "32 rows, ranks 8-64": Batch(32, 32, (8, 16, 32, 64)),
    "32 rows, 4 adapters": Batch(32, 4, (16,), is_sorted=False),
    "512 rows, 1 adapter": Batch(512, 1, (16,)),
    "512 rows, 8 adapters": Batch(512, 8, (16,)),
}


class Pool(NamedTuple):
    """Adapters of one matrix."""

    a: Any
    b: Any
    ranks: Any
    scales: Any


def pools_of(ranks: np.ndarray, largest: int) -> dict[str, Pool]:
    """A pool for each matrix, with these true ranks of the slots."""
    rng, made = np.random.default_rng(0), {}
    for name, (inputs, pattern, repeats) in MATRICES.items():
        parts, outputs = 1 + max(part for part, _ in pattern), repeats * sum(width for _, width in pattern)
        shape = (LAYERS, len(ranks))
        a, b = (
            np.resize(rng.standard_normal(1 << 16).astype(jnp.bfloat16), shape)
            for shape in ((*shape, parts, largest, inputs), (*shape, largest, outputs))
        )
        own = np.broadcast_to(ranks[:, None], (*shape, parts)).astype(np.int32)
        scales = np.full((*shape, parts), 1e-6, np.float32)  # results of a step are the base of the next one
        made[name] = Pool(*map(jnp.asarray, (a, b, own, scales)))
    return made


def bytes_of(ranks: np.ndarray) -> int:
    """Bytes of the adapters with these ranks, in all layers and matrices."""
    numbers = sum(
        inputs * (1 + max(part for part, _ in pattern)) + repeats * sum(width for _, width in pattern)
        for inputs, pattern, repeats in MATRICES.values()
    )
    return int(2 * LAYERS * numbers * ranks.sum())


@functools.partial(jax.jit, donate_argnums=0)
def step(bases: dict[str, Any], x: dict[str, Any], pools: dict[str, Pool], slots: Any) -> dict[str, Any]:
    """Add the adapters of a step. bases: [layers][rows, outputs] of each matrix."""
    rows = slots.shape[0]
    return {
        name: [
            grouped_lora(x[name], base, *pools[name], slots, rows, layer=layer, pattern=pattern)
            for layer, base in enumerate(bases[name])
        ]
        for name, (_, pattern, _) in MATRICES.items()
    }


def read(data: np.ndarray, start: int, count: int, pool: concurrent.futures.Executor) -> None:
    """Add up `count` int64 numbers with two threads."""
    start %= max(1, data.size - count)
    half = count // 2
    list(pool.map(lambda at: data[at : at + half].sum(), (start, start + half)))


def measure(batch: Batch, slots: int, repeats: int) -> dict[str, float]:
    """Microseconds of a step and of the read, gigabytes per second of the step, and the ratio of both times."""
    rng = np.random.default_rng(1)
    ranks = np.resize(batch.ranks, slots)
    pools = pools_of(ranks, max(batch.ranks))
    x = {name: jnp.asarray(rng.standard_normal((batch.rows, inputs)), jnp.float32)
         for name, (inputs, _, _) in MATRICES.items()}  # fmt: skip
    bases = {name: [jnp.zeros((batch.rows, pool.b.shape[-1])) for _ in range(LAYERS)] for name, pool in pools.items()}
    data = np.asarray(pools["gate_up"].b).reshape(-1).view(np.int64)
    times: dict[str, list[float]] = {"step": [], "read": []}
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for turn in range(repeats + 1):
            if batch.adapters:
                own = (turn * batch.adapters + np.arange(batch.adapters)) % slots
                of_row = np.resize(own, batch.rows).astype(np.int32)
                if batch.is_sorted:
                    of_row = own[np.sort(np.arange(batch.rows) % batch.adapters)].astype(np.int32)
                size = bytes_of(ranks[own])
            else:
                of_row, size = np.full(batch.rows, -1, np.int32), 0
            start = time.perf_counter()
            bases = jax.block_until_ready(step(bases, x, pools, of_row))
            middle = time.perf_counter()
            read(data, turn * (size // 8), size // 8, threads)
            times["step"].append(middle - start)
            times["read"].append(time.perf_counter() - middle)
    ratios = [a / b for a, b in zip(times["step"][1:], times["read"][1:], strict=True)]
    seconds = statistics.median(times["step"][1:])
    return {
        "step": seconds * 1e6, "read": statistics.median(times["read"][1:]) * 1e6, "MB": size / 1e6,
        "GB/s": size / seconds / 1e9, "ratio": statistics.median(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"JAX {jax.__version__}, {platform.processor() or platform.machine()}")
    print(f"{'':22} {'step us':>8} {'read us':>8} {'MB':>6} {'GB/s':>6} {'ratio':>6}")
    for name in args.cases:
        found = measure(CASES[name], args.slots, args.repeats)
        print(
            f"{name:22} {found['step']:8.0f} {found['read']:8.0f} {found['MB']:6.1f} {found['GB/s']:6.1f} "
            f"{found['ratio']:6.2f}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
