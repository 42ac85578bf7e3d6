"""RMS norm and the SiLU gate on CPU: the native kernel and XLA's operations.

    python benchmarks/row_ops_cpu.py [--width 512 --intermediate 1408] [--rows 1 8 32 512] [--dtype bfloat16]

Prints the median time of a call in microseconds. Interleaved calls in one process.
"""

import argparse
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rms_norm, rms_norm_rows, silu_and_mul

EPS = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("intermediate", 1408), ("repeats", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"JAX {jax.__version__}, {platform.processor() or platform.machine()}, {args.dtype}")
    rng = np.random.default_rng(0)
    half = args.intermediate
    weight = jnp.asarray(rng.standard_normal(args.width), args.dtype)
    for rows in args.rows:
        padded = max(rows, 8)
        x = jnp.asarray(rng.standard_normal((padded, args.width)), args.dtype)
        both = jnp.asarray(rng.standard_normal((padded, 2 * half)), args.dtype)
        calls = {
            "norm": jax.jit(lambda x, _, rows=rows: rms_norm_rows(x, weight, EPS, rows)),
            "norm by XLA": jax.jit(lambda x, _: rms_norm(x, weight, EPS)),
            "gate": jax.jit(lambda _, both, rows=rows: silu_and_mul(both, rows)),
            "gate by XLA": jax.jit(
                lambda _, both: jax.nn.silu(both[:, :half].astype(jnp.float32)).astype(both.dtype) * both[:, half:]
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.repeats + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call(x, both).block_until_ready()
                times[name].append(time.perf_counter() - start)
        figures = [f"{name} {statistics.median(each[1:]) * 1e6:.1f}" for name, each in times.items()]
        print(f"{rows:4} rows: {' | '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
