"""self_check: does the chosen attention give on this device what the specification says? Seconds, at start-up."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import choose_implementation, paged_attention
from pallas_kernels.write_kv import IMPLEMENTATIONS as WRITES
from pallas_kernels.write_kv import write_kv

# Largest difference from the reference in float32, on inputs from N(0, 1); the products' own rounding is below half.
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}
ROWS, WIDTH_KEYS = 4, 2048


class KernelCheckError(RuntimeError):
    """An implementation gives other results on this device than the reference does."""


def self_check(
    *,
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: Any = jnp.bfloat16,
    sliding_window: int | None = None,
    implementation: str | None = None,
    device: Any = None,
) -> dict[str, float]:
    """Run decodes, chunks and a mix of both through write_kv and paged_attention, and compare with the reference.

    The shape is that of one layer; rows have 1 to 2,048 keys in shuffled blocks whose unused tails hold NaN. device: a
    jax Device; JAX's default otherwise. Returns the largest difference of each case. Raises KernelCheckError, which
    names the implementation, the device, the case and the difference, where one is too large or not a number.
    """
    device = device or jax.devices()[0]
    name = implementation or choose_implementation(device)
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(dtype)
    width = -(-WIDTH_KEYS // block_size)
    tables = rng.permutation(ROWS * width).reshape(ROWS, width).astype(np.int32)
    errors = {}
    for case, counts, lens in (
        ("decode", (1, 1, 1, 1), (1, block_size, 777, WIDTH_KEYS)),
        ("chunks", (64, 0, 33, 2), (64, 0, 1000, block_size + 1)),
        ("mixed", (1, 70, 0, 1), (WIDTH_KEYS, 200, 0, 5)),
    ):
        tokens = -(-sum(counts) // 8) * 8 if case != "decode" else ROWS
        history = np.full((ROWS * width, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
        slots = np.full(tokens, -1, np.int32)
        token = 0
        for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
            for position in range(length):
                block, place = tables[row, position // block_size], position % block_size
                if position < length - count:
                    history[block, :, :, place] = rng.standard_normal((2, kv_heads, head_dim))
                else:
                    slots[token] = block * block_size + place
                    token += 1
        q, k, v = (rng.standard_normal((tokens, heads, head_dim)) for heads in (q_heads, kv_heads, kv_heads))
        arguments = jax.device_put(
            (
                *(jnp.asarray(a, dtype) for a in (history, q, k, v)),
                slots, tables, np.array(lens, np.int32), np.cumsum([0, *counts], dtype=np.int32),
            ),
            device,
        )  # fmt: skip
        results = [
            np.asarray(
                _attend(
                    *arguments, implementation=which, sliding_window=sliding_window, max_query_len=max(counts)
                ),
                np.float64,
            )[: sum(counts)]
            for which in (name, "reference")
        ]
        difference = np.abs(results[0] - results[1]).max()
        errors[case] = float(difference)
        if not difference <= TOLERANCE[dtype.name]:  # NaN is not, either
            raise KernelCheckError(
                f"paged_attention {name!r} on {device.device_kind}, case {case} ({q_heads}/{kv_heads} heads of "
                f"{head_dim}, {dtype.name}, blocks of {block_size}): differs from the reference by {difference:.3g}, "
                f"more than {TOLERANCE[dtype.name]:g}. Use the implementation 'xla', and please report this"
            )
    return errors


@functools.partial(jax.jit, static_argnames=("implementation", "sliding_window", "max_query_len"))
def _attend(
    history: Any, q: Any, k: Any, v: Any, slots: Any, tables: Any, lens: Any, starts: Any, *, implementation: str,
    sliding_window: int | None, max_query_len: int,
) -> Any:  # fmt: skip
    pages = write_kv(
        KVPages(history), k, v, slots, implementation=implementation if implementation in WRITES else None
    )
    # the scale spreads the weights over many keys, as a model's does
    return paged_attention(
        q, pages, tables, lens, starts, scale=q.shape[2] ** -0.5, max_query_len=max_query_len,
        sliding_window=sliding_window, implementation=implementation,
    )  # fmt: skip
