"""set_rows: the bits of numpy, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.set_rows import cpu, set_rows
from tests.support.device_arrays import device_array

CPU = jax.devices("cpu")[0]
DTYPES = ("bfloat16", "float8_e4m3fn", "float32")


def bits(shape, dtype, seed):
    """Random bits, NaN among them, as numbers."""
    size = jnp.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "width", "count"),
    [((6, 2, 5, 3), 3, 20), ((9, 2, 8), 16, 5), pytest.param((600, 4096), 4096, 300, marks=pytest.mark.slow)],
)
def test_rows_have_the_bits_they_had(dtype, shape, width, count):
    table, rows = bits(shape, dtype, 0), bits((count, width), dtype, 1)
    total = table.size // width
    index = np.random.default_rng(2).permutation(total)[:count].astype(np.int32)
    index[:3] = -1, total, 2**30  # padding
    expected = table.reshape(total, width).copy()
    expected[index[3:]] = rows[3:]
    found = np.asarray(jax.jit(set_rows)(device_array(table, dtype), index, device_array(rows, dtype)))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_is_not_copied(dtype):
    if dtype != "float32" and cpu.kernel().name is None:
        pytest.skip(cpu.kernel().reason)
    arguments = ((512, 2, 1024), dtype), ((4,), jnp.int32), ((4, 1024), dtype)
    shapes = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in arguments]
    memory = jax.jit(set_rows, donate_argnums=0).lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2**20 * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 2**16


def test_types_that_xla_updates_in_place_are_left_to_it():
    assert cpu.refuse(CPU, jax.ShapeDtypeStruct((2, 2), jnp.int8)) == "XLA updates int8 in place"
