"""Quantised weights of every kind, drawn or as shapes, for tests of matmuls on GPU and TPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QuantizedWeight, quantized_dot
from pallas_kernels.quantized_dot.weight import PLAIN_DTYPES, LanesWeight, RowsWeight
from tests.support.device_arrays import device_array

rows_of = jax.jit(RowsWeight.of)  # one program; called alone, `of` compiles one for each operation
lanes_of = jax.jit(LanesWeight.of)

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCKS = (np.array([2, 2, 0, 3, 1], np.int32), np.int32(4))  # matrix of each block, and the number of used blocks


@dataclasses.dataclass(frozen=True)
class Case:
    """Weights [out, in], or [matrices, out, in]. group: its size, None: all inputs. outer: supergroups of an output."""

    kind: str
    inputs: int
    group: int | None = None
    zeros: bool = False
    mins: bool = False
    outer: int = 0
    divides: bool = False
    scales: str = "bfloat16"
    activations: str = "float"
    dtype: str = "bfloat16"
    outputs: int = 37
    matrices: int | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes of the outputs."""
        return (self.outputs,) if self.matrices is None else (self.matrices, self.outputs)

    def weight(self, make) -> QuantizedWeight:
        """In the layout "plain". make(shape, dtype, low, high): an array of whole numbers, divided by 16 if floats."""
        shape, groups = (*self.lead, self.inputs), self.inputs // (self.group or self.inputs)
        low, high = {"int8": (-127, 128), "fp8": (-40, 41)}.get(self.kind, (0, 16))
        scales = functools.partial(make, (*self.lead, groups), self.scales, 8, 24)
        outer = functools.partial(make, (*self.lead, self.outer), "float32", 8, 24)
        zero = ("int8", -9, 10) if self.kind == "int8" else ("uint8", 0, 16)
        return QuantizedWeight(
            make(shape, PLAIN_DTYPES[self.kind], low, high), scales(),
            make((*self.lead, groups), *zero) if self.zeros else None, outer() if self.outer else None,
            scales() if self.mins else None, outer() if self.outer and self.mins else None, None, self.kind, shape,
            np.dtype(self.dtype), self.activations, self.divides,
        )  # fmt: skip

    def drawn(self) -> QuantizedWeight:
        """In the layout "plain", with numbers that are the same at every call."""
        rng = np.random.default_rng(self.inputs)

        def make(shape, dtype, low, high):
            numbers = rng.integers(low, high, shape)
            return device_array(numbers if jnp.issubdtype(dtype, jnp.integer) else numbers / 16, dtype)

        return self.weight(make)

    def shapes(self) -> QuantizedWeight:
        """In the layout "rows", of ShapeDtypeStructs."""
        weight = self.weight(lambda shape, dtype, *_: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
        return jax.eval_shape(RowsWeight.of, weight) if weight.bits == 8 else weight.into(
            RowsWeight, codes=jax.ShapeDtypeStruct((*self.lead, self.inputs // 2), jnp.uint8)
        )  # fmt: skip


def numbers_of(weight: QuantizedWeight) -> np.ndarray:
    """The weights of the layout "plain" in float64, by the formula of `QuantizedWeight`, in numpy."""

    def wide(array, count):
        return np.repeat(np.asarray(array).astype(np.float64), count, -1)

    def scaled(array, outer, divides=False):
        values = wide(array, 1)
        if outer is None:
            return wide(values, weight.group_size)
        factor = wide(outer, values.shape[-1] // outer.shape[-1])
        return wide(values / factor if divides else values * factor, weight.group_size)

    codes = np.asarray(weight.codes)
    values = FP4[codes] if weight.kind == "fp4" else codes.astype(np.float64)
    if weight.zeros is not None:
        values = values - wide(weight.zeros, weight.group_size)
    elif weight.kind == "int4" and weight.mins is None:
        values = values - 8
    numbers = values * scaled(weight.scales, weight.outer, weight.divides)
    return numbers if weight.mins is None else numbers - scaled(weight.mins, weight.outer_mins)


def rounded_to_fp8(x, groups: int) -> np.ndarray:
    """Rows of x [..., in] after rounding to e4m3 with a scale for each group, in float64, by the rules of e4m3."""
    x = np.asarray(x).astype(np.float32)
    numbers = x.reshape(*x.shape[:-1], groups, -1)
    most = np.abs(numbers).max(-1, keepdims=True)
    scaled = (numbers * (np.float32(448) / most)).astype(np.float64)
    # 3 bits after the first one; numbers below 2**-6 have the steps of 2**-6
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6))), -6) - 3)
    codes = np.minimum(np.abs(np.round(scaled / step) * step), 448) * np.sign(scaled)
    return (codes * (most.astype(np.float64) / 448)).reshape(x.shape)


def x_of(rows, case, seed=0):
    """Return random x[rows, in] of the case's dtype."""
    return device_array(np.random.default_rng(seed).standard_normal((rows, case.inputs)), case.dtype)


@functools.cache
def in_program(module):
    """Return quantized_dot of an implementation in a program, with results in float32."""
    return jax.jit(functools.partial(module.quantized_dot, dtype=jnp.float32))


def call_of(case, rows, name=None):
    """Return a matmul and the shapes of its arguments. The result has x's dtype."""
    leaves, tree = jax.tree.flatten(case.shapes())
    call = lambda x, *arrays: quantized_dot(x, jax.tree.unflatten(tree, arrays), rows, implementation=name)  # noqa: E731
    return call, (jax.ShapeDtypeStruct((rows, case.inputs), jnp.dtype(case.dtype)), *leaves)


def in_tpu_layout(plain):
    """Return weights in the layout that the TPU kernel takes."""
    return lanes_of(plain) if plain.kind == "int4" or (plain.kind == "int8" and plain.groups > 1) else rows_of(plain)


def shapes_of(case):
    """Return shapes of the case's weights in the layout that the TPU kernel takes."""
    plain = case.weight(lambda shape, dtype, *_: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    return jax.eval_shape(in_tpu_layout, plain)


def x_blocks_of(rows, case, blocks=5):
    """Return random x[blocks, rows, in] of the case's dtype."""
    return device_array(np.random.default_rng(3).standard_normal((blocks, rows, case.inputs)), case.dtype)
