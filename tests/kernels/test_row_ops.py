"""rms_norm_rows and silu_and_mul: against float64 and their plain forms, with the same bits in any company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm, rms_norm_rows, silu_and_mul
from pallas_kernels.row_ops import cpu

CPU = jax.devices("cpu")[0]
EPS = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _native():
    """Skip the module where the native kernel cannot run."""
    reason = cpu.refuse(CPU, jnp.zeros((8, 64)), 64)
    if reason is not None:
        pytest.skip(reason)


def numbers(rows, width, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, width)) * 8, dtype)


def plain_gate(both):
    half = both.shape[1] // 2
    return jax.nn.silu(both[:, :half].astype(jnp.float32)).astype(both.dtype) * both[:, half:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (8, 64), (33, 704), (300, 256)])
def test_matches_float64(rows, width, dtype):
    x, weight = numbers(rows, width, dtype), numbers(1, width, dtype, seed=1)[0]
    wide = np.asarray(x, np.float64)
    out = np.asarray(rms_norm_rows(x, weight, EPS, rows), np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
    limit = 1e-6 if dtype == "float32" else 2**-7  # two roundings to bfloat16, of 2**-9 each, and their products
    np.testing.assert_allclose(out, expected, rtol=limit, atol=1e-12)
    both = numbers(rows, 2 * width, dtype, seed=2)
    wide = np.asarray(both, np.float64)
    out = np.asarray(silu_and_mul(both, rows), np.float64)
    expected = wide[:, :width] / (1 + np.exp(-wide[:, :width])) * wide[:, width:]
    np.testing.assert_allclose(out, expected, rtol=limit, atol=1e-12)


def test_plain_form_elsewhere():
    """A width that the kernel refuses, and float16."""
    for width, dtype in ((40, "float32"), (64, "float16")):
        x, weight = numbers(8, width, dtype), numbers(1, width, dtype)[0]
        np.testing.assert_array_equal(rms_norm_rows(x, weight, EPS, 8), rms_norm(x, weight, EPS))
        both = numbers(8, 2 * width, dtype)
        np.testing.assert_array_equal(silu_and_mul(both, 8), plain_gate(both))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype):
    x, weight = numbers(300, 512, dtype), numbers(1, 512, dtype, seed=1)[0]
    norms, gates = (np.asarray(a) for a in (rms_norm_rows(x, weight, EPS, 300), silu_and_mul(x, 300)))
    for first, rows, count in ((0, 8, 1), (5, 8, 8), (100, 64, 33), (299, 1, 1)):
        some = x[first : first + rows]
        for whole, found in ((norms, rms_norm_rows(some, weight, EPS, count)), (gates, silu_and_mul(some, count))):
            np.testing.assert_array_equal(np.asarray(found)[:count], whole[first : first + count])
            assert not np.asarray(found)[count:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0, 88.0, -88.0, 1e-40])
def test_unusual_numbers_agree_with_the_plain_form(value):
    x = numbers(8, 64, "float32").at[3, 5].set(value)
    weight = numbers(1, 64, "float32")[0]
    for found, plain in (
        (rms_norm_rows(x, weight, EPS, 8), rms_norm(x, weight, EPS)),
        (silu_and_mul(x, 8), plain_gate(x)),
    ):
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-35)
