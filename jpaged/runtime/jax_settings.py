"""JAX's settings for the engine. They belong to the process, and a trainer may have changed them."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Set JAX as the engine needs it, in this thread and inside the context only. The caller's settings stay."""
    with (
        jax.enable_x64(False),  # ids, positions and the request table are int32
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.threefry_partitionable(True),  # another value gives other draws from the same seed
        jax.default_matmul_precision("default"),  # code that needs another precision names it
        jax.debug_nans(False),  # True switches donation off: every step would copy the KV pool
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),  # a step transfers one packed array in and its tokens out
    ):
        yield
