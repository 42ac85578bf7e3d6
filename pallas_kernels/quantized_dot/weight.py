"""QuantizedWeight: a weight matrix in 8 or 4 bits, a class for each layout in memory, and its quantisation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

LARGEST = 127  # magnitude of an 8-bit code
LARGEST_FP8 = 448.0  # of e4m3fn
LEVELS = 16    # values of a 4-bit code
OUTPUTS, INPUTS = 16, 4  # of a tile of codes
CHUNK = 64  # inputs of a chunk in the layout "rows"
LANES = 128  # inputs of a chunk in the layout "lanes"
MOST_INPUTS = 65_536  # of a group: its sums must fit int32
# Shares of a group's range that the search for its scale tries. For normally distributed numbers in groups of 64, the
# squared error is 1.08 times as large without the search, and 0.5% smaller with half the step.
SHARES = tuple(1 - i / 32 for i in range(8))
BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
# dtypes of codes in the layout "plain", which has one code a byte
PLAIN_DTYPES = {"int8": np.int8, "int4": np.uint8, "fp8": ml_dtypes.float8_e4m3fn, "fp4": np.uint8}
# Values of the codes 0 to 7 of fp4 (E2M1, OCP Microscaling Formats 1.0). Codes 8 to 15 are their negatives.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_NUMBERS = np.array((*FP4_VALUES, *(-value for value in FP4_VALUES)), np.float32)  # by code
# bit offsets of the inputs in a word of the layout "lanes": [chunks, quarters, words, neighbours, outputs]
_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32).reshape(2, 4).T.reshape(1, 4, 1, 2, 1)
ARRAYS = ("codes", "scales", "zeros", "outer", "mins", "outer_mins", "order")
_STATIC = ["kind", "shape", "dtype", "activations", "divides"]
_pytree = functools.partial(jax.tree_util.register_dataclass, data_fields=list(ARRAYS), meta_fields=_STATIC)


@_pytree
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """Weights [..., out, in] in groups of neighbouring inputs. A group shares all fields but its codes.

        weight = scale * (number(code) - zero)   or, with `mins`,   scale * number(code) - min

    A scale is `scales`, times (or divided by) `outer` if there is one; a min is `mins` times `outer_mins`. These
    are float32 multiplications, so that the numbers are those of the checkpoint's format.

    Each layout in memory is a class. "out" is all axes of the shape but the last. This class is the layout "plain": one
    code a byte, [out, in]; all others [out, groups]. Checkpoint readers return it. No matmul takes it. Its subclasses
    are the other layouts.

    fp8 codes may be uint8, their bits. XLA on CPU converts all fp8 codes to float16 before it takes a slice: a program
    of Llama 3.1 8B had 15.4 GB of temporaries (JAX 0.10.2). Fields may be ShapeDtypeStructs, or numpy arrays on the
    host.
    """

    layout: ClassVar[str] = "plain"
    groups_axis: ClassVar[int] = -1  # of `scales`
    codes: Any
    scales: Any             # any float dtype, or integers with `outer`
    zeros: Any | None       # zero points: uint8 with int4, int8 with int8; None: 8 with int4, else 0
    outer: Any | None       # float32[out, supergroups]: factors of neighbouring groups' scales
    mins: Any | None        # as `scales`; not together with `zeros`. The zero of int4 is then 0
    outer_mins: Any | None  # as `outer`
    order: Any | None       # int32[in]: codes at position i are for input order[i] of x; None: for i
    kind: str               # int8, int4, fp8 (e4m3fn) or fp4 (e2m1)
    shape: tuple[int, ...]  # of the weights
    dtype: np.dtype         # of the weights before quantising, and of the activations
    # Rounding of x before a matmul. int8: to 8 bits, one scale per row. fp8: to e4m3, one scale per row and group of
    # the weights, which must be fp8. float: none
    activations: str = "int8"
    divides: bool = False   # scales are divided by `outer`

    def __init_subclass__(cls) -> None:
        _pytree(cls)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.kind]

    @property
    def groups(self) -> int:
        """Groups of an output."""
        return self.scales.shape[self.groups_axis]

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.shape[-1] // self.groups

    @property
    def num_outputs(self) -> int:
        """Outputs: all axes but the last."""
        return int(np.prod(self.shape[:-1]))

    def rows(self, indices: Int[Array, " rows"]) -> Float[Array, "rows in"]:
        """The rows with these indices of a matrix [out, in], in `dtype`. Indices out of range are clipped."""
        taken = self.select(jnp.clip(indices, 0, self.num_outputs - 1))
        return self.in_order_of_inputs(taken.dequantize())

    def select(self, indices: Int[Array, " rows"]) -> "QuantizedWeight":
        """The outputs with these indices, as a matrix in the layout "plain"."""
        return self._taken(lambda array, axis: array[(slice(None),) * axis + (indices,)], indices.shape[0])

    def slice(self, start: Int[Array, ""] | int, size: int) -> "QuantizedWeight":
        """`size` outputs from `start`, as a matrix in the layout "plain"."""
        return self._taken(lambda array, axis: lax.dynamic_slice_in_dim(array, start, size, axis), size)

    def plain(self) -> "QuantizedWeight":
        """The same weights in the layout "plain", with all outputs on one axis."""
        return self._taken(lambda array, _: array, self.num_outputs)

    def insert(self, part: "QuantizedWeight", first: Int[Array, ""] | int) -> "QuantizedWeight":
        """The weights with the outputs of `part` from `first`, a multiple of OUTPUTS, in place of theirs."""
        return jax.tree.map(lambda to, array: lax.dynamic_update_slice_in_dim(to, array, first, 0), self, part)

    def with_shape(self, shape: tuple[int, ...]) -> "QuantizedWeight":
        """The weights with their outputs on the axes of `shape`. Arrays may be ShapeDtypeStructs."""

        def on_axes(array: Any) -> Any:
            to, described = (*shape[:-1], array.shape[-1]), isinstance(array, jax.ShapeDtypeStruct)
            return jax.ShapeDtypeStruct(to, array.dtype) if described else array.reshape(to)

        return self.changed(on_axes, shape=shape)

    def changed(self, change: Callable[[Any], Any], **fields: Any) -> "QuantizedWeight":
        """change(array) in place of every array but `order`, and these fields."""
        made = jax.tree.map(change, dataclasses.replace(self, order=None))
        return dataclasses.replace(made, **{"order": self.order, **fields})

    def into(self, layout: type["QuantizedWeight"], **fields: Any) -> Any:
        """A weight of another class, with these fields and otherwise the same ones."""
        return layout(**(vars(self) | fields))

    def numbers(self) -> Float[Array, "*shape"]:
        """The weights in float32, inputs in the order of the codes. Only for the layout "plain"."""
        values = self.values()
        scales = self._scaled(self.scales, self.outer, divides=self.divides)
        if self.mins is None:
            return (values * scales[..., None]).reshape(self.shape)
        mins = self._scaled(self.mins, self.outer_mins, divides=False)
        return (values * scales[..., None] - mins[..., None]).reshape(self.shape)

    def dequantize(self) -> Float[Array, "*shape"]:
        """The weights as numbers, in `dtype`, inputs in the order of the codes."""
        plain = self if type(self) is QuantizedWeight else self.plain()
        return plain.numbers().reshape(self.shape).astype(self.dtype)

    def in_order_of_inputs(self, numbers: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """Reorder numbers from the order of the codes, as in `dequantize`, to the order of the inputs."""
        return numbers if self.order is None else jnp.zeros_like(numbers).at[..., self.order].set(numbers)

    def values(self) -> Float[Array, "... groups size"]:
        """number(code) - zero, float32. Only for the layout "plain"."""
        by_group = (*self.scales.shape, -1)
        if self.kind == "fp4":
            return fp4_numbers(jnp.asarray(self.codes)).reshape(by_group)
        codes = jnp.asarray(self.codes)
        if self.kind == "fp8" and codes.dtype == jnp.uint8:
            codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        values = codes.astype(jnp.float32).reshape(by_group)
        if self.zeros is not None:
            return values - jnp.asarray(self.zeros).astype(jnp.float32)[..., None]
        return values - LEVELS // 2 if self.kind == "int4" and self.mins is None else values

    def integers(self) -> Int[Array, "out in"]:
        """code - zero, int8. Only for int8 without zeros, and for int4."""
        plain = self.plain()
        if self.kind == "int8":
            return plain.codes
        codes = plain.codes.astype(jnp.int8)
        if plain.zeros is None:
            return codes if self.mins is not None else codes - LEVELS // 2
        return (codes.reshape(*plain.zeros.shape, -1) - plain.zeros.astype(jnp.int8)[..., None]).reshape(codes.shape)

    def scales_by_group(self) -> Float[Array, "groups out"]:
        """The scales in float32, group by group."""
        plain = self.plain()
        return self._scaled(plain.scales, plain.outer, divides=self.divides).T

    def mins_by_group(self) -> Float[Array, "groups out"] | None:
        """The mins in float32, group by group. Zero points of 8 bits are mins here, scale * zero."""
        plain = self.plain()
        if plain.mins is not None:
            return self._scaled(plain.mins, plain.outer_mins, divides=False).T
        if self.kind == "int8" and plain.zeros is not None:
            return self.scales_by_group() * jnp.asarray(plain.zeros).astype(jnp.float32).T
        return None

    def _taken(self, take: Callable[[Any, int], Any], outputs: int) -> "QuantizedWeight":
        """Some outputs, as a matrix in the layout "plain". take(array, axis): these outputs of an array."""
        return self._plain(take(self._matrix(self.codes), 0), lambda array: take(self._matrix(array), 0), outputs)

    def _plain(self, codes: Any, change: Callable[[Any], Any], outputs: int) -> "QuantizedWeight":
        """A matrix in the layout "plain". codes: the outputs' codes. change(array): their part of another array."""
        others = jax.tree.map(change, dataclasses.replace(self, codes=None, order=None))
        codes = codes.reshape(outputs, -1) if self.bits == 8 else self._one_a_byte(codes, outputs)
        return others.into(QuantizedWeight, codes=codes, shape=(outputs, self.shape[-1]))

    def _one_a_byte(self, codes: Array, outputs: int) -> Array:
        """4-bit codes in this layout, as [outputs, in] with one a byte."""
        return codes.reshape(outputs, -1)

    @staticmethod
    def _scaled(array: Any, outer: Any, *, divides: bool) -> Array:
        values = jnp.asarray(array).astype(jnp.float32)
        if outer is None:
            return values
        wide = values.reshape(*outer.shape, -1)
        if not divides:
            return (wide * outer[..., None]).reshape(values.shape)
        # XLA divides by a broadcast number with its reciprocal: a quarter of the results were 1 ulp off (CPU,
        # JAX 0.10.2 and 0.11.2). A barrier hides the broadcast.
        factors = jax.lax.optimization_barrier(jnp.broadcast_to(outer[..., None], wide.shape))
        return (wide / factors).reshape(values.shape)

    def _matrix(self, array: Any) -> Any:
        """An array as [out, n]."""
        return array.reshape(self.num_outputs, array.shape[-1])


class RowsWeight(QuantizedWeight):
    """As the layout "plain", with two 4-bit codes a byte: uint8[out, in / 2].

    Byte 32 * c + i holds input 64 * c + i in its low 4 bits, and input 64 * c + 32 + i in its high 4 bits.
    """

    layout = "rows"

    @classmethod
    def of(cls, plain: QuantizedWeight) -> "RowsWeight":
        """Weights in the layout "plain", in this one."""
        plain = jax.tree.map(jnp.asarray, plain)
        codes = plain.codes
        if plain.bits == 4:
            pairs = codes.reshape(*codes.shape[:-1], -1, 2, chunk_of(plain.shape[-1]) // 2)
            codes = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)
        return plain.into(cls, codes=codes)

    def _one_a_byte(self, codes: Array, outputs: int) -> Array:
        return _apart(codes, outputs, chunk_of(self.shape[-1]) // 2)


class TilesWeight(QuantizedWeight):
    """For the native kernel on CPU. The outputs are in blocks of 16; the last block is padded with zeros.

    A tile holds 4 neighbouring inputs of 16 outputs: byte 4 * o + i is of output o and input i.
    codes: int8[blocks, in / 4, 64], a tile each, or uint8[blocks, in / 8, 64], with even tiles in the low 4 bits and
           odd tiles in the high 4 bits. scales and mins float32[blocks, groups, 16], zeros uint8 of the same shape.
    """

    layout = "tiles"
    groups_axis = 1

    @classmethod
    def of(cls, plain: QuantizedWeight) -> "TilesWeight":
        """Weights in the layout "plain", in this one. Raises ValueError if `refuse` refuses.

        fp4 becomes int8: twice an fp4 number is an integer, with half the scale. So it takes 8 bits.
        """
        if (reason := cls.refuse(plain)) is not None:
            raise ValueError(reason)
        flat, scales = plain.plain(), plain.scales_by_group().T
        codes = jnp.asarray(flat.codes)
        if plain.kind == "fp4":
            codes, scales = (2 * fp4_numbers(codes)).astype(jnp.int8), scales / 2
        tiles = _blocks(codes, INPUTS)
        if plain.kind == "int4":
            pairs = tiles.reshape(tiles.shape[0], -1, 2, OUTPUTS * INPUTS)
            tiles = pairs[:, :, 0] | pairs[:, :, 1] << 4
        mins = flat.mins_by_group()
        return plain.into(
            cls, codes=tiles, scales=_blocks(scales, 1), outer=None, outer_mins=None,
            zeros=None if flat.zeros is None or mins is not None else _blocks(jnp.asarray(flat.zeros), 1),
            mins=None if mins is None else _blocks(mins.T, 1),
            kind="int8" if plain.kind == "fp4" else plain.kind, activations="int8", divides=False,
        )  # fmt: skip

    @staticmethod
    def refuse(plain: QuantizedWeight) -> str | None:
        """Reason why weights in the layout "plain" cannot have this one; None if they can."""
        if plain.kind not in ("int8", "int4", "fp4"):
            return f"the codes are {plain.kind}: must be int8, int4 or fp4"
        return refuse_group(plain.shape[-1], plain.group_size)

    @staticmethod
    def refuse_matrices(shape: tuple[int, ...]) -> str | None:
        """Reason why matrices of weights [matrices, ..., in] share tiles; None if none do."""
        outputs = int(np.prod(shape[1:-1]))
        return None if outputs % OUTPUTS == 0 else f"a matrix has {outputs} outputs: must be a multiple of {OUTPUTS}"

    def select(self, indices: Int[Array, " rows"]) -> QuantizedWeight:
        block, output = jnp.divmod(indices, OUTPUTS)
        tiles = self.codes.reshape(self.codes.shape[0], -1, OUTPUTS, INPUTS)[block, :, output]
        return self._plain(tiles, lambda array: array[block, :, output], indices.shape[0])

    def matrix(self, index: Int[Array, ""] | int) -> QuantizedWeight:
        """One matrix [out, in] of weights [matrices, ..., in] in whole tiles. index: clipped to the valid range."""
        index = jnp.clip(index, 0, self.shape[0] - 1)
        blocks, outputs = self.codes.shape[0] // self.shape[0], self.num_outputs // self.shape[0]
        cut = lambda array: lax.dynamic_slice_in_dim(array, index * blocks, blocks)  # noqa: E731
        return self.changed(cut, shape=(outputs, self.shape[-1]), order=None)

    def insert(self, part: QuantizedWeight, first: Int[Array, ""] | int) -> QuantizedWeight:
        return super().insert(part, first // OUTPUTS)

    def with_shape(self, shape: tuple[int, ...]) -> QuantizedWeight:
        return dataclasses.replace(self, shape=shape)

    def _one_a_byte(self, codes: Array, outputs: int) -> Array:
        return _apart(codes, outputs, INPUTS)

    def _matrix(self, array: Any) -> Any:  # from [blocks, n, 16 * m]
        blocks, count = array.shape[:2]
        tiles = array.reshape(blocks, count, OUTPUTS, -1)
        return tiles.swapaxes(1, 2).reshape(blocks * OUTPUTS, -1)[: self.num_outputs]


class LanesWeight(QuantizedWeight):
    """For the kernel on TPU, where outputs are along a register's lanes. The inputs are a multiple of 128.

    int8: codes int8[out, in]. int4: codes uint32[in / 8, out]. Word 16 * c + i holds the inputs
    128 * c + 32 * q + 2 * i, for q = 0 to 3, in the bits from 4 * q on, and the next inputs in the bits from 16 + 4 * q
    on. scales, zeros and mins [groups, out]. int8 has mins in place of zeros.
    """

    layout = "lanes"
    groups_axis = 0

    @classmethod
    def of(cls, plain: QuantizedWeight) -> "LanesWeight":
        """Weights in the layout "plain", in this one. Raises ValueError if `refuse` refuses.

        Scales and minima that have `outer` factors, or are not bfloat16, become float32.
        """
        if (reason := cls.refuse(plain)) is not None:
            raise ValueError(reason)
        flat = plain.plain()
        codes, scales, mins = jnp.asarray(flat.codes), flat.scales_by_group(), flat.mins_by_group()
        if plain.kind == "int4":
            inputs = codes.T.astype(jnp.uint32).reshape(-1, 4, LANES // 8, 2, codes.shape[0])
            codes = (inputs << _SHIFTS).sum((1, 3), dtype=jnp.uint32).reshape(-1, codes.shape[0])
        if flat.scales.dtype == jnp.bfloat16 and flat.outer is None:
            scales = scales.astype(jnp.bfloat16)
        if mins is not None and flat.mins is not None and flat.mins.dtype == jnp.bfloat16 and flat.outer_mins is None:
            mins = mins.astype(jnp.bfloat16)
        zeros = None if flat.zeros is None or mins is not None else jnp.asarray(flat.zeros).T
        return plain.into(
            cls, codes=codes, scales=scales, zeros=zeros, mins=mins, outer=None, outer_mins=None, divides=False
        )

    @staticmethod
    def refuse(plain: QuantizedWeight) -> str | None:
        """Reason why weights in the layout "plain" cannot have this one; None if they can."""
        if plain.kind not in ("int8", "int4"):
            return f"the codes are {plain.kind}: must be int8 or int4"
        inputs = plain.shape[-1]
        return f"{inputs} inputs: must be a multiple of {LANES}" if inputs % LANES else None

    def insert(self, part: QuantizedWeight, first: Int[Array, ""] | int) -> QuantizedWeight:
        axis = lambda array: 0 if array.dtype == jnp.int8 else 1  # noqa: E731
        return jax.tree.map(lambda to, a: lax.dynamic_update_slice_in_dim(to, a, first, axis(to)), self, part)

    def with_shape(self, shape: tuple[int, ...]) -> QuantizedWeight:
        return dataclasses.replace(self, shape=shape)

    def _taken(self, take: Callable[[Any, int], Any], outputs: int) -> QuantizedWeight:
        return self._plain(take(self.codes, int(self.bits == 4)), lambda array: take(array, 1).T, outputs)

    def _one_a_byte(self, codes: Array, outputs: int) -> Array:
        words = codes.reshape(-1, 1, LANES // 8, 1, outputs)
        return (words >> _SHIFTS & 15).astype(jnp.uint8).reshape(-1, outputs).T


def fp4_numbers(codes: Integer[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The numbers of fp4 codes, float32."""
    return jnp.asarray(FP4_NUMBERS)[codes.astype(jnp.int32)]


def refuse_activations(weight: QuantizedWeight) -> str | None:
    """Reason why no matmul takes weights with their `activations`; None if one does."""
    if weight.activations == "fp8" and weight.kind != "fp8":
        return f"activations=fp8 with weights of {weight.kind}: must be float, or int8, or have weights of fp8"
    return None


def quantize(weight: Float[Array, "*shape"], bits: int, group_size: int | None = None) -> TilesWeight:
    """Round weights [..., out, in] to 8 or 4 bits. The result has the layout "tiles".

    bits:       8: scale = largest magnitude / 127, zero = 0. 4: 16 levels, one of them 0, over a share of each
                group's range: the share in SHARES with the smallest squared error.
    group_size: inputs that share a scale, a multiple of 16. None: all inputs.

    Raises ValueError if the sizes do not fit.
    """
    inputs = weight.shape[-1]
    group_size = group_size or inputs
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: must be 4 or 8")
    if (reason := refuse_group(inputs, group_size)) is not None:
        raise ValueError(reason)
    return TilesWeight.of(quantize_plain(weight, f"int{bits}", group_size))


def quantize_plain(weight: Float[Array, "*shape"], kind: str, group_size: int) -> QuantizedWeight:
    """As `quantize`, in the layout "plain". kind: int8, int4 or fp8. group_size: divides the inputs."""
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group_size)
    codes, scales, zeros = {"int8": _eight_bits, "int4": _four_bits, "fp8": _floats}[kind](groups)
    return QuantizedWeight(
        codes.reshape(weight.shape), scales, zeros, None, None, None, None, kind, weight.shape, np.dtype(weight.dtype),
    )  # fmt: skip


def refuse_group(inputs: int, group_size: int) -> str | None:
    """Reason why `inputs` inputs cannot have groups of `group_size`; None if they can."""
    if inputs % group_size or group_size % OUTPUTS or group_size > MOST_INPUTS:
        accepted = f"must divide the {inputs} inputs, be a multiple of 16, and at most {MOST_INPUTS}"
        return f"group_size={group_size}: {accepted}"
    return None


def chunk_of(inputs: int) -> int:
    """Inputs of a chunk of 4-bit codes in the layout "rows"."""
    return next(size for size in (CHUNK, CHUNK // 2, CHUNK // 4, 2) if inputs % size == 0)


def _apart(codes: Array, outputs: int, half: int) -> Array:
    """4-bit codes, one a byte. Of `half` bytes, the low halves are `half` codes, and the high halves the next."""
    pairs = codes.reshape(outputs, -1, 1, half)
    # not `concatenate`: XLA on CPU does not fuse it, and 4-bit matmuls took 2 to 11 times as long
    return (pairs >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(outputs, -1)


def _blocks(array: Array, inputs: int) -> Array:
    """[out, n * inputs] as [blocks, n, 16 * inputs], padded with zeros."""
    array = jnp.pad(array, ((0, -array.shape[0] % OUTPUTS), (0, 0)))
    tiles = array.reshape(array.shape[0] // OUTPUTS, OUTPUTS, -1, inputs)
    return tiles.swapaxes(1, 2).reshape(tiles.shape[0], -1, OUTPUTS * inputs)


def _eight_bits(groups: Float[Array, "*lead groups size"]) -> tuple[Array, Array, None]:
    scales = jnp.abs(groups).max(-1) / LARGEST
    codes = jnp.round(groups / jnp.where(scales > 0, scales, 1)[..., None])
    return codes.astype(jnp.int8), scales, None


def _floats(groups: Float[Array, "*lead groups size"]) -> tuple[Array, Array, None]:
    largest = jnp.abs(groups).max(-1)
    scales = jnp.where(largest > 0, largest / LARGEST_FP8, 1)
    return (groups / scales[..., None]).astype(jnp.float8_e4m3fn), scales, None


def _four_bits(groups: Float[Array, "*lead groups size"]) -> tuple[Array, Array, Array]:
    low, high = jnp.minimum(groups.min(-1), 0), jnp.maximum(groups.max(-1), 0)

    def rounded(share: Array) -> tuple[Array, Array, Array]:
        scales = share * (high - low) / (LEVELS - 1)
        safe = jnp.where(scales > 0, scales, 1)
        zeros = jnp.clip(jnp.round(-share * low / safe), 0, LEVELS - 1)
        codes = jnp.clip(jnp.round(groups / safe[..., None]) + zeros[..., None], 0, LEVELS - 1)
        return codes.astype(jnp.uint8), scales, zeros.astype(jnp.uint8)

    def error(share: Array) -> Array:
        codes, scales, zeros = rounded(share)
        found = scales[..., None] * (codes.astype(jnp.float32) - zeros[..., None].astype(jnp.float32))
        return ((found - groups) ** 2).sum(-1)

    shares = jnp.array(SHARES, jnp.float32)

    def improve(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        best, least = found
        now = error(shares[i])
        return jnp.where(now < least, shares[i], best), jnp.minimum(now, least)

    # Not unrolled: XLA on CPU took twice as long to compile it and to run it (46 ns a weight instead of 23).
    first = error(shares[0])
    return rounded(lax.fori_loop(1, len(SHARES), improve, (jnp.full_like(first, shares[0]), first))[0])
