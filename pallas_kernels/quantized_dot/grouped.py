"""quantized_grouped_dot: blocks of rows, each times the quantised matrix of its expert."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_dot import cpu_grouped, xla
from pallas_kernels.quantized_dot.weight import QuantizedWeight


def quantized_grouped_dot(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    *,
    rows_of_block: Int[Array, " blocks"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "blocks rows out"]:
    """As `grouped_dot`, for weights [matrices, ..., in].

    Layout "rows": one matrix at a time is dequantised. Layout "tiles": rows of x are rounded to 8 bits, as in
    `quantized_dot`, and a row has the bits that `quantized_dot` gives it, in any block.

    rows_of_block:  int32, number of each block's first rows that are needed; None: all. The results of the others, and
                    of blocks from `num_blocks_used` on, are undefined, but finite if x is.
    implementation: None: the best one. "xla" is XLA operations. "cpu" is a native kernel for CPU, for the layout
                    "tiles".

    Raises ValueError if the implementation is unknown, or refuses the weights.
    """
    if implementation not in (None, "xla", "cpu"):
        raise ValueError(f"implementation={implementation!r}: must be None, xla or cpu")
    if weight.order is not None:
        x = x[..., weight.order]
    if rows_of_block is None:
        rows_of_block = jnp.full(x.shape[0], x.shape[1], jnp.int32)
    reason = "asked for xla" if implementation == "xla" else cpu_grouped.refuse(jax.devices("cpu")[0], x, weight)
    if reason is None and x.size and weight.num_outputs:
        return cpu_grouped.quantized_grouped_dot(x, weight, matrix_of_block, num_blocks_used, rows_of_block)
    if implementation == "cpu":
        raise ValueError(f"implementation='cpu' cannot run: {reason}")
    return _with_xla(x, weight, matrix_of_block, num_blocks_used)


def _with_xla(
    x: Float[Array, "blocks rows in"],
    weight: QuantizedWeight,
    matrix_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
) -> Float[Array, "blocks rows out"]:
    """A loop over the used blocks. The results of the others are zero."""
    outputs = weight.num_outputs // weight.shape[0]

    def multiply_block(i: Array, out: Array) -> Array:
        rows = lax.dynamic_index_in_dim(x, i, keepdims=False)
        if weight.layout == "tiles":
            matrix = weight.matrix(matrix_of_block[i])
            product = xla.quantized_dot(rows, matrix, jnp.int32(rows.shape[0]), dtype=x.dtype)
        else:
            product = xla.dequantized_product(rows, weight, matrix_of_block[i] * outputs, outputs, x.dtype)
        return lax.dynamic_update_index_in_dim(out, product, i, 0)

    return lax.fori_loop(0, num_blocks_used, multiply_block, jnp.zeros((*x.shape[:2], outputs), x.dtype))
