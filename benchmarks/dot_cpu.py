"""Matmuls with weights on CPU: the native kernels for bf16, w8a8 and w4a8, and XLA's bf16 matmul.

    python benchmarks/dot_cpu.py [--shapes 3072x512 4864x896] [--rows 1 8 32 128 512] [--repeats 9]

Prints the median time of a matmul, the gigabytes per second of its weights, and GFLOP/s. A program runs many matmuls
with different weights, 60 MB in bf16, so that they come from memory. Runs are interleaved in one process.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dot, quantize, quantized_dot

BYTES = 60e6
CODE_BYTES = {"xla bf16": 2.0, "bf16": 2.0, "w8a8": 1.0, "w4a8": 0.5}


def products(product: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A program that multiplies x with each of several matrices."""
    return jax.jit(lambda x, weights: [product(x, weight)[:, :1] for weight in weights])


def measure(outputs: int, inputs: int, rows: int, repeats: int) -> dict[str, float]:
    """Median seconds of one matmul, by name."""
    rng = np.random.default_rng(0)
    count = max(1, int(BYTES / (2 * outputs * inputs)))
    weights = [jnp.asarray(rng.standard_normal((outputs, inputs)), jnp.bfloat16) for _ in range(count)]
    x = jnp.asarray(rng.standard_normal((max(rows, 8), inputs)), jnp.bfloat16)
    runs = {
        "xla bf16": (products(lambda x, w: dot(x, w, rows, implementation="xla")), weights),
        "bf16": (products(lambda x, w: dot(x, w, rows)), weights),
        "w8a8": (products(lambda x, w: quantized_dot(x, w, rows)), [quantize(w, 8) for w in weights]),
        "w4a8": (products(lambda x, w: quantized_dot(x, w, rows)), [quantize(w, 4, 64) for w in weights]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, (run, matrices) in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(x, matrices))
            seconds[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["3072x512", "4864x896"], help="outputs x inputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"JAX {jax.__version__}, {platform.processor() or platform.machine()}")
    print("rows x [outputs, inputs]: us, GB/s of weights, GFLOP/s")
    for shape in args.shapes:
        outputs, inputs = map(int, shape.split("x"))
        for rows in args.rows:
            found = measure(outputs, inputs, rows, args.repeats)
            figures = [
                f"{name} {s * 1e6:7.0f} {CODE_BYTES[name] * outputs * inputs / s / 1e9:5.1f} "
                f"{2 * rows * outputs * inputs / s / 1e9:5.0f}"
                for name, s in found.items()
            ]
            print(f"{rows:4} x [{outputs}, {inputs}]: {' | '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
