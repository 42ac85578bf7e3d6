"""Time a fixed workload that resembles the tests, to compare test times of different processors.

    python tools/calibrate.py

Most of a test run is tracing in Python and compiling in XLA, in one process per core. This script does both for a fixed
decoder, in one process per core, without a compile cache. It prints the processor, the JAX version, and the median
seconds of a round. If that is A seconds on one processor and B on another, a test run of T seconds on the first takes
about T * B / A on the second. docs/testing.md lists measured processors.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

LAYERS, ROWS = 6, 32


def processor() -> str:
    """Name and model number of the processor. Virtual machines have names without a number."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return f"{fields.get('model name', platform.machine())} (model {fields.get('model', 'unknown')})"


def round_of_work(number: int) -> float:
    """Seconds to trace, lower and compile a decoder. `number % 8` sets its width: eight different programs."""
    import jax
    import jax.numpy as jnp

    width = 64 + 8 * (number % 8)

    def layer(x, w):
        q, k, v = (x @ w[i] for i in range(3))
        scores = jnp.where(jnp.tri(ROWS, dtype=bool), q @ k.T / width**0.5, -jnp.inf)
        x = x + jax.nn.softmax(scores) @ v
        gate, up = jnp.split(jax.nn.silu(x @ w[3]) * jnp.cumsum(x, 0), 2, axis=-1)
        order = jnp.argsort(x.sum(-1))
        return x[order] + jnp.concatenate([gate, up], -1) @ w[4]

    def model(x, weights):
        for index in range(LAYERS):
            x = layer(x, weights[index])
        return jax.lax.top_k(jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ weights[0, 0]), x), 5)

    start = time.perf_counter()
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, width), (LAYERS, 5, width, width))]
    jax.jit(model).lower(*shapes).compile()
    return time.perf_counter() - start


def rounds(count: int) -> list[float]:
    """Seconds of each of `count` rounds, after a round that imports JAX and warms up."""
    round_of_work(0)
    return [round_of_work(number) for number in range(1, count + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "XLA_FLAGS": ""}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        seconds = [one for each in pool.map(rounds, [args.rounds] * args.processes) for one in each]
    print(f"{processor()}, {args.processes} processes, JAX {version('jax')}: "
          f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
