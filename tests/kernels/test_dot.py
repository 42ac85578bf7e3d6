"""dot: against float64, and with the same bits in any batch."""

import functools
import itertools

import jax
import numpy as np
import pytest

from pallas_kernels import dot
from pallas_kernels.dot import cpu
from tests.support.device_arrays import device_array

CPU = jax.devices("cpu")[0]
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}  # relative to the largest result


def arrays(rows, inputs, outputs, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, inputs)), rng.standard_normal((outputs, inputs))
    return device_array(x, dtype), device_array(weight, dtype)


@functools.cache
def product(implementation, dtype=None):
    """dot in a program of (x, weight, num_rows)."""
    return jax.jit(functools.partial(dot, dtype=dtype, implementation=implementation))


def native(dtype):
    """Skip a test of the native kernel where it cannot run."""
    x, weight = arrays(8, 64, 8, dtype)
    reason = cpu.refuse(CPU, x, weight, dtype)
    if reason is not None:
        pytest.skip(reason)


SHAPES = [(1, 32, 1), (2, 512, 67), (3, 4864, 40), (8, 64, 5), (9, 512, 67), (33, 96, 128), (70, 1536, 300)]
DTYPES = list(itertools.product(("float32", "bfloat16"), repeat=2))  # of the rows, of the result
# The default run takes two of the four pairs of dtypes for each shape. Dtypes and shapes do not interact.
CASES = [
    pytest.param(*shape, *dtypes, marks=[pytest.mark.slow] * ((index + dtypes.count("bfloat16")) % 2))
    for index, shape in enumerate(SHAPES) for dtypes in DTYPES
]  # fmt: skip


@pytest.mark.parametrize(("rows", "inputs", "outputs", "dtype", "result"), CASES)
def test_matches_float64(rows, inputs, outputs, dtype, result):
    native(dtype)
    x, weight = arrays(rows, inputs, outputs, dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    limit = max(TOLERANCE[dtype] if dtype == "float32" else 2e-6, TOLERANCE[result]) * np.abs(expected).max()
    for implementation in ("cpu", "xla", None):
        out = product(implementation, result)(x, weight, np.int32(rows))
        assert out.dtype == result
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=limit, rtol=0)


@pytest.mark.codegen
@pytest.mark.parametrize("inputs", [768, 4864])  # 8 rows of the second do not fit into the first-level cache
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype, inputs):
    native(dtype)
    call = product("cpu")
    x, weight = arrays(200, inputs, 321, dtype)
    x = np.asarray(x)
    whole = np.asarray(call(x, weight, np.int32(200)))
    for rows, count in ((8, 1), (8, 2), (8, 3), (8, 5), (32, 32), (64, 33), (200, 7), (128, 128)):
        for first in (0, 3, 200 - rows):
            np.testing.assert_array_equal(
                np.asarray(call(x[first : first + rows], weight, np.int32(count)))[:count], whole[first : first + count]
            )


def test_rows_that_are_not_needed_are_finite():
    native("float32")
    x, weight = arrays(16, 64, 40, "float32")
    harmed = np.array(x)
    harmed[5:] = np.nan
    out = np.asarray(product("cpu")(harmed, weight, np.int32(5)))
    assert np.isfinite(out[:5]).all()
    assert not out[5:].any()
    assert not np.asarray(product("cpu")(x, weight, np.int32(0))).any()


def test_nan_of_a_row_stays_in_its_row():
    native("float32")
    x, weight = arrays(16, 64, 40, "float32")
    harmed = np.array(x)
    harmed[3] = np.nan
    expected = np.asarray(product("cpu")(x, weight, np.int32(16)))
    out = np.asarray(product("cpu")(harmed, weight, np.int32(16)))
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(expected, 3, 0))


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        ((8, 40), (16, 40), {"implementation": "cpu"}, "rows of 40 numbers are not a multiple of 64 bytes"),
        ((8, 64), (16, 32), {}, r"weight \(16, 32\) of float32: must be \[out, 64\] of float32, as x"),
        ((8, 64), (16,), {}, r"weight \(16,\): must be \[out, in\]"),
        ((8, 64), (16, 64), {"implementation": "cuda"}, "implementation='cuda': must be one of xla, cpu"),
        ((8, 64), (16, 64), {"implementation": "cpu", "dtype": "float16"}, "multiplies bfloat16 or float32"),
    ],
)
@pytest.mark.usefixtures("plain_errors")
def test_wrong_arguments_are_named(x, weight, options, message):
    native("float32")
    with pytest.raises(ValueError, match=message):
        dot(device_array(np.zeros(x), "float32"), device_array(np.zeros(weight), "float32"), 8, **options)


def test_other_shapes_use_xla():
    """Sizes that the kernel refuses, and no rows at all."""
    for rows, inputs in ((8, 40), (0, 64), (8, 0)):
        x, weight = arrays(rows, inputs, 16, "float32")
        out = product(None)(x, weight, np.int32(rows))
        np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(weight).T, atol=1e-5)
