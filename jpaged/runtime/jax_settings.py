"""JAX's settings are the process's, and a trainer may have changed them: what a step means must not depend on it."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """JAX as the engine needs it, in this thread and inside only; the caller's settings are untouched."""
    with (
        jax.enable_x64(False),                  # indices and table are int32, whatever the caller computes in
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.threefry_partitionable(True),       # another value gives other draws from the same seed
        jax.default_matmul_precision("default"),  # where it matters the code says so itself
        jax.debug_nans(False),                  # switches donation off: every step would copy the KV pool
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),            # one packed array in, the tokens out: a step's only transfers
    ):
        yield
