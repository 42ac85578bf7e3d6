"""quantized_dot for TPU: numbers in interpret mode against float64, and programs compiled for a v5e."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantized_dot
from pallas_kernels.quantized_dot import mosaic_tpu, xla
from pallas_kernels.quantized_dot.mosaic_tpu import Tiling
from pallas_kernels.quantized_dot.weight import to_lanes, to_rows
from tests.deviceless import V5E, marks
from tests.kernels.test_compiling_tpu import compile_for_v5e
from tests.kernels.test_lowering import lower_for
from tests.kernels.test_quantized_dot_gpu import Case, x_of

CPU = jax.devices("cpu")[0]


def deviceless(test):
    return functools.reduce(lambda made, mark: mark(made), marks(V5E), test)


def placed(plain):
    """In the layout that the kernel takes."""
    return to_lanes(plain) if plain.kind == "int4" else to_rows(plain)


def numbers(plain):
    """The weights [out, in] in float64, by the definition in `QuantizedWeight`."""
    codes = np.asarray(plain.codes, np.float64).reshape(*plain.scales.shape, -1)

    def by_group(array, outer):
        values = np.asarray(array, np.float64)
        if outer is None:
            return values[..., None]
        outer = np.repeat(np.asarray(outer, np.float64), values.shape[1] // outer.shape[1], 1)
        return (values / outer if plain.divides else values * outer)[..., None]

    zero = 8 if plain.kind == "int4" and plain.mins is None else 0
    if plain.zeros is not None:
        zero = np.asarray(plain.zeros, np.float64)[..., None]
    found = by_group(plain.scales, plain.outer) * (codes - zero)
    if plain.mins is not None:
        found -= by_group(plain.mins, plain.outer_mins)
    return found.reshape(plain.shape)


def oracle(x, plain):
    x = np.asarray(x, np.float32)
    if plain.activations == "int8":
        largest = np.abs(x).max(1, keepdims=True)
        x = np.round(x * (np.float32(127) / largest)) * (largest.astype(np.float64) / 127)
    return x.astype(np.float64) @ numbers(plain).T


def kernel(tiling=None, dtype=jnp.float32):
    """The kernel in interpret mode, of (x, weight, num_rows)."""
    return jax.jit(functools.partial(mosaic_tpu.quantized_dot, dtype=dtype, tiling=tiling, interpret=True))


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)  # JAX takes a second or more to compile each
# rows, tiling, matrix. Small tiles have edges in small shapes.
NUMBERS = [
    SLOW(1, None, Case("int4", 256, 128)),
    (8, Tiling(16, 128, 128), Case("int4", 256, 64, zeros=True, outputs=200)),
    SLOW(200, Tiling(64, 128, 256), Case("int4", 256, 32, mins=True, outer=2, scales="uint8", outputs=130)),
    SLOW(5, None, Case("int4", 128, 32, zeros=True, scales="float16", outer=1, divides=True)),
    SLOW(8, Tiling(16, 37, 512), Case("int4", 1024)),
    SLOW(8, None, Case("int4", 5120, 32, outputs=16)),  # more groups than lanes
    (1, None, Case("int4", 640, zeros=True)),
    (32, Tiling(32, 128, 128), Case("int8", 384, outputs=150)),
    SLOW(5, None, Case("int8", 256, 16, zeros=True)),
    SLOW(5, None, Case("int8", 512, 256, mins=True, scales="float32")),
    (200, Tiling(96, 128, 256), Case("int8", 256, activations="int8", outputs=150)),
    SLOW(1, None, Case("int8", 384, 128, activations="int8")),
    SLOW(8, None, Case("int8", 256, 32, activations="int8")),
    SLOW(8, None, Case("int8", 512, 256, activations="int8")),
]


@pytest.mark.parametrize(("rows", "tiling", "case"), NUMBERS, ids=str)
def test_matches_float64(rows, tiling, case):
    x, plain = x_of(rows, case), case.plain()
    weight = placed(plain)
    assert mosaic_tpu.refuse(CPU, x, weight, jnp.float32) is None
    got = np.asarray(kernel(tiling)(x, weight, jnp.int32(rows)))
    expected = oracle(x, plain)
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * np.abs(expected).max())
    if case.activations == "int8":
        np.testing.assert_array_equal(got, xla.quantized_dot(x, weight, jnp.int32(rows), dtype=jnp.float32))
