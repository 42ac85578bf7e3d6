"""set_rows: replaces rows of an array in place. On CPU, a native kernel does so for dtypes that XLA would convert."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.platforms import takes_native
from pallas_kernels.set_rows import cpu


def set_rows(
    table: Shaped[Array, "*shape"],
    index: Int[Array, " n"],
    rows: Shaped[Array, "n width"],
    *,
    plain: Callable[[Array], Array] | None = None,
) -> Shaped[Array, "*shape"]:
    """The table with row index[i] replaced by rows[i]. An index outside the table is padding; others are distinct.

    table: read as rows of `width` numbers, in the order of memory.
    rows:  of the table's dtype. The bits are copied as they are.
    plain: XLA operations for devices without a kernel; None: reshape the table, and scatter rows. XLA copies a table
        that is reshaped, so a caller whose rows are parts of axes should pass a scatter without a reshape.

    In place if the table is donated.
    """

    def scatter(table: Array) -> Array:
        flat = table.reshape(-1, rows.shape[1])
        inside = jnp.where(index < 0, flat.shape[0], index)  # a negative index would count from the end
        return flat.at[inside].set(rows, mode="drop").reshape(table.shape)

    elsewhere = plain or scatter
    if not takes_native(cpu.refuse, table):
        return elsewhere(table)
    return lax.platform_dependent(table, cpu=lambda own: cpu.set_rows(own, index, rows), default=elsewhere)
