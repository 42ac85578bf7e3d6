"""Quantised weights of every kind, drawn or as shapes, for tests of the products on NVIDIA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QuantizedWeight
from pallas_kernels.quantized_dot.weight import PLAIN_DTYPES, to_rows
from tests.support.device_arrays import device_array

rows_of = jax.jit(to_rows)  # one program; called alone, `to_rows` compiles one for each operation

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


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
            scales() if self.mins else None, outer() if self.outer and self.mins else None, None, self.kind, "plain",
            shape, np.dtype(self.dtype), self.activations, self.divides,
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
        return jax.eval_shape(to_rows, weight) if weight.bits == 8 else dataclasses.replace(
            weight, codes=jax.ShapeDtypeStruct((*self.lead, self.inputs // 2), jnp.uint8), layout="rows"
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
