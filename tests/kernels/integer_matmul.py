"""Matmuls of 8-bit activations and quantised weights: shapes, drawn arrays, and the result in float64."""

import dataclasses
import functools

import jax
import numpy as np

from pallas_kernels import QuantizedWeight, quantize, quantized_dot
from tests.support.device_arrays import device_array

# Called as users call them: inside a program.
quantize_in_program = jax.jit(quantize, static_argnums=(1, 2))
dequantize = jax.jit(lambda weight: weight.dequantize())

# rows, inputs, outputs, bits, group size
SHAPES = [
    (1, 64, 1, 8, None), (8, 48, 5, 8, None), (9, 704, 67, 4, 64), (33, 96, 128, 4, 16), (70, 1536, 300, 8, 128),
    (16, 2048, 33, 4, 128), (1, 2048, 40, 4, None),
]  # fmt: skip


@functools.cache
def product(implementation, dtype=None):
    """Return quantized_dot in a program of (x, weight, num_rows)."""
    return jax.jit(functools.partial(quantized_dot, dtype=dtype, implementation=implementation))


def arrays(rows, inputs, outputs, bits, group_size=None, dtype="float32"):
    """Return random x[rows, inputs] and quantised weights [outputs, inputs]."""
    rng = np.random.default_rng(rows + inputs)
    x, numbers = rng.standard_normal((rows, inputs)), rng.standard_normal((outputs, inputs))
    return device_array(x, dtype), quantize_in_program(device_array(numbers, dtype), bits, group_size)


def oracle(x, weight: QuantizedWeight):
    """Return the matmul with rows of x rounded to 8 bits, in float64. Reads the weights through `dequantize`."""
    x = np.asarray(x, np.float32)
    largest = np.abs(x).max(1, keepdims=True)
    codes = np.round(x * (np.float32(127) / largest)).astype(np.int64)
    weight = np.asarray(dequantize(dataclasses.replace(weight, dtype=np.dtype(np.float32))), np.float64)
    return (codes @ weight.T) * (largest.astype(np.float64) / 127)
