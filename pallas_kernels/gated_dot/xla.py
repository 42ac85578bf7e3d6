"""gated_dot as one matmul with both matrices, then the activation. On CPU both are native kernels for SiLU."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dot import dot
from pallas_kernels.gated_dot.activation import gated
from pallas_kernels.row_ops import silu_and_mul


def gated_dot(
    x: Float[Array, "rows in"], weight: Float[Array, "2 out in"], num_rows: Int[Array, ""], *, activation: str
) -> Float[Array, "rows out"]:
    """See `pallas_kernels.gated_dot`. Writes gate and up, [rows, 2 * out], and reads them again."""
    outputs = weight.shape[1]
    both = dot(x, weight.reshape(2 * outputs, -1), num_rows)
    if activation == "silu":
        return silu_and_mul(both, num_rows)
    return gated(activation, both[:, :outputs], both[:, outputs:])
