"""Types of numbers in memory, for the options of kernels and for numba code."""

import jax.numpy as jnp

FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8 = range(5)
KINDS = {
    jnp.dtype(jnp.float32): FLOAT32, jnp.dtype(jnp.bfloat16): BFLOAT16, jnp.dtype(jnp.float16): FLOAT16,
    jnp.dtype(jnp.int8): INT8, jnp.dtype(jnp.float8_e4m3fn): FLOAT8,
}  # fmt: skip
