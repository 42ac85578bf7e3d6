"""Shows where XLA's CPU results depend on the number of rows computed together. The smallest shapes follow from this.

    python benchmarks/cpu_bits.py

For each operation and width it computes M copies of one row, and prints the groups of M that give equal bits. An engine
must use one group only. Constants ensure this: `MIN_BUCKET` and `MIN_REDUCTION` (jpaged/runtime/step/programs.py),
`TILE_ROWS`, `MIN_TILES` and `MIN_SCORES` (pallas_kernels/paged_attention/xla.py). Run it for every new version of JAX.
"""

import argparse
import platform
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 56, 64, 96, 128, 256, 512)


def product(dtype: str, inner: int, outer: int) -> dict[bytes, list[int]]:
    """Multiply x [M, inner] with w [outer, inner]."""
    rng = np.random.default_rng(0)
    row, weight = rng.standard_normal((1, inner)), jnp.asarray(rng.standard_normal((outer, inner)), dtype)
    exact = lax.Precision.HIGHEST if dtype == "float32" else None

    @jax.jit
    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=x.dtype)

    return groups(lambda rows: call(jnp.asarray(np.tile(row, (rows, 1)), dtype), weight))


def values_product(dtype: str, keys: int, width: int) -> dict[bytes, list[int]]:
    """Multiply weights [M, keys] with values [keys, width], batched: the second matmul of attention."""
    rng = np.random.default_rng(0)
    row, values = rng.random((1, 1, keys)), jnp.asarray(rng.standard_normal((8, keys, width)), dtype)
    exact = lax.Precision.HIGHEST if dtype == "float32" else None

    @jax.jit
    def call(x: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum("bqk,bkd->bqd", x, v, precision=exact, preferred_element_type=jnp.float32)

    return groups(lambda rows: call(jnp.asarray(np.tile(row, (8, rows, 1)), dtype), values)[0])


def reduction(width: int) -> dict[bytes, list[int]]:
    """Compute the sum of squares of each row in float32, as a norm does."""
    row = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    call = jax.jit(lambda x: jnp.mean(x * x, axis=-1))
    return groups(lambda rows: call(np.tile(row, (rows, 1))))


def groups(run: Callable[[int], jax.Array]) -> dict[bytes, list[int]]:
    """Group numbers of rows by the bits of their results."""
    found: dict[bytes, list[int]] = {}
    for rows in ROWS:
        found.setdefault(np.asarray(run(rows))[0].tobytes(), []).append(rows)
    return found


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(f"JAX {jax.__version__}, Python {platform.python_version()}, {platform.machine()}")
    for dtype in ("float32", "bfloat16"):
        for inner, outer in ((64, 256), (64, 128), (128, 32), (128, 64), (512, 512), (1536, 512), (896, 4864)):
            print(f"product {dtype} [M, {inner}] x [{outer}, {inner}]:", *product(dtype, inner, outer).values())
        for width in (16, 32, 64, 128):
            print(f"attention values {dtype} [M, 128] x [128, {width}]:", *values_product(dtype, 128, width).values())
    for width in (16, 64, 256, 320, 512, 4096):
        print(f"sum of squares of [M, {width}]:", *reduction(width).values())


if __name__ == "__main__":
    main()
