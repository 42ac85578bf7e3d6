"""rms_norm_rows and silu_and_mul: against float64 and their plain forms, with the same bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm, rms_norm_rows, silu_and_mul
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
