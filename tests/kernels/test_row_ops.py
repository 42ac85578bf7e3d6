"""rms_norm_rows and silu_and_mul against float64, with the same bits in any batch; argmax_rows and gather_rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import argmax_rows, gather_rows, rms_norm, rms_norm_rows, silu_and_mul
from pallas_kernels.row_ops import cpu
from tests.support.device_arrays import device_array

CPU = jax.devices("cpu")[0]
EPS = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _native():
    """Skip the module where the native kernel cannot run."""
    reason = cpu.refuse(CPU, jax.ShapeDtypeStruct((8, 64), jnp.float32), 64)
    if reason is not None:
        pytest.skip(reason)


def numbers(rows, width, dtype, seed=0):
    return device_array(np.random.default_rng(seed).standard_normal((rows, width)) * 8, dtype)


def weights(width, dtype, seed=0):
    return device_array(np.asarray(numbers(1, width, dtype, seed))[0], dtype)


norm = jax.jit(lambda x, weight, num_rows: rms_norm_rows(x, weight, EPS, num_rows))
gate = jax.jit(silu_and_mul)
plain_norm = jax.jit(lambda x, weight: rms_norm(x, weight, EPS))


@jax.jit
def plain_gate(both):
    half = both.shape[1] // 2
    return jax.nn.silu(both[:, :half].astype(jnp.float32)).astype(both.dtype) * both[:, half:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (8, 64), (33, 704), (300, 256)])
def test_matches_float64(rows, width, dtype):
    x, weight = numbers(rows, width, dtype), weights(width, dtype, seed=1)
    wide = np.asarray(x, np.float64)
    out = np.asarray(norm(x, weight, np.int32(rows)), np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
    limit = 1e-6 if dtype == "float32" else 2**-7  # two roundings to bfloat16, of 2**-9 each, and their products
    np.testing.assert_allclose(out, expected, rtol=limit, atol=1e-12)
    both = numbers(rows, 2 * width, dtype, seed=2)
    wide = np.asarray(both, np.float64)
    out = np.asarray(gate(both, np.int32(rows)), np.float64)
    expected = wide[:, :width] / (1 + np.exp(-wide[:, :width])) * wide[:, width:]
    np.testing.assert_allclose(out, expected, rtol=limit, atol=1e-12)


@pytest.mark.codegen
def test_plain_form_elsewhere():
    """A width that the kernel refuses, and float16."""
    for width, dtype in ((40, "float32"), (64, "float16")):
        x, weight = numbers(8, width, dtype), weights(width, dtype)
        np.testing.assert_array_equal(norm(x, weight, np.int32(8)), plain_norm(x, weight))
        both = numbers(8, 2 * width, dtype)
        np.testing.assert_array_equal(gate(both, np.int32(8)), plain_gate(both))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype):
    x, weight = numbers(300, 512, dtype), weights(512, dtype, seed=1)
    norms, gates = (np.asarray(a) for a in (norm(x, weight, np.int32(300)), gate(x, np.int32(300))))
    for first, rows, count in ((0, 8, 1), (5, 8, 8), (100, 64, 33), (299, 1, 1)):
        some, needed = np.asarray(x)[first : first + rows], np.int32(count)
        for whole, found in ((norms, norm(some, weight, needed)), (gates, gate(some, needed))):
            np.testing.assert_array_equal(np.asarray(found)[:count], whole[first : first + count])
            assert not np.asarray(found)[count:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0, 88.0, -88.0, 1e-40])
def test_unusual_numbers_agree_with_the_plain_form(value):
    x = np.array(numbers(8, 64, "float32"))
    x[3, 5] = value
    weight = weights(64, "float32")
    for found, plain in (
        (norm(x, weight, np.int32(8)), plain_norm(x, weight)),
        (gate(x, np.int32(8)), plain_gate(x)),
    ):
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-35)


WIDTHS = (133, 128, 5)  # with and without a rest after whole vectors, and less than a vector


@jax.jit
def largest(x, num_rows):
    return [argmax_rows(x, num_rows, width=width) for width in WIDTHS]


def rows_with_ties():
    """float32[16, 133]: ties across lanes and vectors, rows of -inf and of NaN, NaN among numbers, and infinity."""
    x = np.array(np.random.default_rng(3).integers(-40, 40, (16, 133)), np.float32)
    x[1], x[2], x[3] = 7, -np.inf, np.nan
    x[4, [0, 1, 17, 130]] = np.nan
    x[5, [131, 100, 4]] = np.inf
    x[6], x[6, 2] = -np.inf, -3e38
    x[7, ::2], x[7, 1::2] = -0.0, 0.0
    x[8] = np.arange(133)
    return x


@pytest.mark.parametrize("num_rows", [16, 5, 0, -3, 99])
def test_argmax_is_the_lowest_index_of_the_largest_number(num_rows):
    x = rows_with_ties()
    without_nan = np.where(np.isnan(x), -np.inf, x)
    count = min(max(num_rows, 0), 16)
    for width, found in zip(WIDTHS, largest(x, np.int32(num_rows)), strict=True):
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found[:count], without_nan[:count, :width].argmax(1))
        assert not np.asarray(found)[count:].any()  # ids of rows that are not needed are in range


def test_argmax_without_the_kernel():
    """A dtype that the kernel refuses. `plain` gets the numbers that are searched."""
    x = jnp.asarray(rows_with_ties(), jnp.bfloat16)
    np.testing.assert_array_equal(argmax_rows(x, 3, width=5, plain=lambda x: jnp.full(16, x.shape[1])), 5)


@jax.jit
def gather(tables, index, num_rows):
    return [gather_rows(table, index, num_rows) for table in tables]


@pytest.mark.parametrize("num_rows", [7, 3, 0])
def test_gathered_rows_have_the_bits_of_the_table(num_rows):
    """Of any width, with NaN. Indices outside the table are clipped."""
    tables = [np.array(numbers(5, 24, "bfloat16")), np.array(numbers(5, 7, "float32"))]
    for table in tables:
        table[4, 2] = np.nan
    index = np.array([4, 0, -1, 4, 5, 2**31 - 1, -(2**31)], np.int32)
    for table, found in zip(tables, gather(tables, index, np.int32(num_rows)), strict=True):
        assert np.asarray(found)[:num_rows].tobytes() == table[np.clip(index, 0, 4)][:num_rows].tobytes()
        assert not np.asarray(found)[num_rows:].any()


def test_a_gather_in_a_loop_converts_no_table():
    """XLA for CPU converted the whole table to float32 before the loop."""
    table, index = jax.ShapeDtypeStruct((512, 96), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)

    def summed(table, index):
        start = jnp.zeros((8, 96), table.dtype)
        return jax.lax.fori_loop(0, index[0], lambda i, total: total + gather_rows(table, index + i, 8), start)

    assert "f32[512,96]" not in jax.jit(summed).lower(table, index).compile().as_text()
