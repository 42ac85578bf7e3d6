"""quantized_dot: against int64 and float64, with the same bits in every implementation and in any batch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize, quantized_dot
from pallas_kernels.quantized_dot import cpu
from tests.kernels.integer_matmul import SHAPES, arrays, dequantize, oracle, product, quantize_in_program
from tests.support.device_arrays import device_array

CPU = jax.devices("cpu")[0]


@pytest.fixture(scope="module", autouse=True)
def _native():
    """Skip the module where the native kernel cannot run."""
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    reason = cpu.refuse(CPU, x, jax.eval_shape(functools.partial(quantize, bits=8), x), jnp.float32)
    if reason is not None:
        pytest.skip(reason)


DTYPES = list(itertools.product(("float32", "bfloat16"), repeat=2))  # of the rows, of the result
# The default run takes one of the four pairs of dtypes for each shape. Dtypes and shapes do not interact.
CASES = [
    pytest.param(*shape, *dtypes, marks=[pytest.mark.slow] * (index % 4 != which))
    for index, shape in enumerate(SHAPES) for which, dtypes in enumerate(DTYPES)
]  # fmt: skip


@pytest.mark.codegen
@pytest.mark.parametrize(("rows", "inputs", "outputs", "bits", "group_size", "dtype", "result"), CASES)
def test_matches_the_oracle(rows, inputs, outputs, bits, group_size, dtype, result):
    x, weight = arrays(rows, inputs, outputs, bits, group_size, dtype)
    expected = oracle(x, weight)
    native, xla, chosen = (
        np.asarray(product(name, result)(x, weight, np.int32(rows))) for name in ("cpu", "xla", None)
    )
    np.testing.assert_array_equal(native, xla)
    np.testing.assert_array_equal(native, chosen)
    atol = (2e-6 if result == "float32" else 4e-3) * np.abs(expected).max()
    np.testing.assert_allclose(native.astype(np.float64), expected, atol=atol, rtol=0)


@pytest.mark.codegen
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 64)])
def test_bits_of_a_row_do_not_depend_on_the_others(bits, group_size):
    call = product("cpu")
    x, weight = arrays(200, 768, 321, bits, group_size, "bfloat16")
    x = np.asarray(x)
    whole = np.asarray(call(x, weight, np.int32(200)))
    for rows, count in ((8, 1), (8, 5), (32, 32), (64, 33), (200, 7), (128, 128)):
        for first in (0, 3, 200 - rows):
            np.testing.assert_array_equal(
                np.asarray(call(x[first : first + rows], weight, np.int32(count)))[:count], whole[first : first + count]
            )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_a_row_that_is_not_finite_stays_so_and_stays_alone(bad, implementation):
    x, weight = arrays(16, 256, 40, 8)  # more inputs than a register has: XLA's maximum of them drops a NaN
    call, harmed = product(implementation), np.array(x)
    harmed[3, 5] = bad
    expected = np.asarray(call(x, weight, np.int32(16)))
    out = np.asarray(call(harmed, weight, np.int32(16)))
    assert not np.isfinite(out[3]).any()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(expected, 3, 0))


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-31, 1e30])
def test_rows_of_extreme_numbers(size):
    x, weight = arrays(8, 64, 40, 8)
    x = np.asarray(x) * np.float32(size)
    outs = [np.asarray(product(name)(x, weight, np.int32(8))) for name in ("cpu", "xla")]
    np.testing.assert_array_equal(*outs)
    assert np.isfinite(outs[0]).all()
    assert outs[0].any() == (size == 1e30)


def test_rows_that_are_not_needed_are_finite():
    x, weight = arrays(16, 64, 40, 4, 64)
    harmed = np.array(x)
    harmed[5:] = np.nan
    out = np.asarray(product("cpu")(harmed, weight, np.int32(5)))
    assert out[:5].any(1).all()
    assert not out[5:].any()
    assert not np.asarray(product("cpu")(x, weight, np.int32(0))).any()


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 16), (4, 64)])
def test_quantize_rounds_to_nearest(bits, group_size):
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((2, 21, 128)).astype(np.float32)
    numbers[1, 3] = 0
    weight = quantize_in_program(numbers, bits, group_size)
    found = np.asarray(dequantize(weight))
    assert weight.shape == found.shape == numbers.shape
    assert not found[1, 3].any()
    groups = (numbers - found).reshape(2, 21, -1, weight.group_size)
    largest = np.abs(numbers).reshape(groups.shape).max(-1, keepdims=True)
    if bits == 8:
        assert (np.abs(groups) <= largest / 127 / 2 * 1.001).all()
    else:  # no share of the range does better on any group

        def error(values, share):
            low, high = np.minimum(values.min(), 0), np.maximum(values.max(), 0)
            scale = share * (high - low) / 15
            zero = np.clip(np.round(-share * low / scale), 0, 15)
            return ((scale * (np.clip(np.round(values / scale) + zero, 0, 15) - zero) - values) ** 2).sum()

        for row, left in zip(numbers[0], groups[0], strict=True):
            for values, errors in zip(row.reshape(-1, 64), left, strict=True):
                assert (errors**2).sum() <= min(error(values, share) for share in (1, 0.9375, 0.875)) * 1.001
    ids = np.array([0, 7, 41, 20, 999], np.int32)
    rows = jax.jit(lambda weight, ids: weight.rows(ids))(weight, ids)
    np.testing.assert_array_equal(rows, found.reshape(-1, 128)[[0, 7, 41, 20, 41]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: quantized_dot(x[:, :32], w, 8), r"weight \(16, 64\): must be \[\.\.\., 32\]"),
        (
            lambda x, w: quantized_dot(x, w, 8, implementation="cuda"),
            "implementation='cuda': must be one of reference, xla, cpu, triton, mosaic_gpu, mosaic_tpu",
        ),
        (lambda x, w: quantized_dot(x, w, 8, dtype="float16", implementation="cpu"), "multiplies bfloat16 or float32"),
        (
            lambda x, w: quantized_dot(x, dataclasses.replace(w, activations="fp8"), 8),
            r"weight \(16, 64\): activations=fp8 with weights of int8: must be float, or int8, or have weights of fp8",
        ),
        (lambda x, w: quantize(x, 3), "bits=3: must be 4 or 8"),
        (lambda x, w: quantize(x, 4, 24), "group_size=24: must divide the 64 inputs, be a multiple of 16"),
    ],
)
@pytest.mark.usefixtures("plain_errors")
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(device_array(np.ones((8, 64)), "float32"), quantize_in_program(np.ones((16, 64), np.float32), 8))
