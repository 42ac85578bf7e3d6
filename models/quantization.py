"""Quantised weights of a model: the leaves to quantise, their bits, and their layout in memory.

`Quantizer.__call__` rounds the numbers of a leaf, for the option `--quantization`. `Quantizer.packed` converts a leaf
that is quantised in the checkpoint. Both choose the platform's layout.

The matrices of `linear`, `take_rows` and `linear_per_expert` are quantised. Vectors, routers, positions, the
matrices of `linear_per_head`, and `delta_ba`, whose outputs become exponents, keep their dtype. So do Kimi Linear's
small matrices of a recurrent layer.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jpaged.models.spec import Params
from pallas_kernels import QuantizedWeight
from pallas_kernels.quantized_dot.weight import (
    LANES,
    OUTPUTS,
    LanesWeight,
    RowsWeight,
    TilesWeight,
    quantize_plain,
    refuse_group,
)

EXPERTS = frozenset({"expert_gate_up", "expert_down"})
LEAVES = EXPERTS | {
    "embed", "lm_head", "qkv", "o", "gate_up", "up", "down", "q_a", "q_b", "kv_a", "project_in", "project_out",
    "shared_gate_up", "shared_down", "q", "k", "delta_qkvz", "delta_qkv", "delta_o", "conv_in", "conv_out",
}  # fmt: skip
# Both have one row per token of the vocabulary. Their errors affect every logit, so they keep 8 bits.
EIGHT_BITS = frozenset({"embed", "lm_head"})
# Numbers that are quantised at once. The search for scales needs 37 bytes per number. On CPU, small parts are also
# faster: int4 of [8192, 1024] took 0.40 to 0.61 s, and with 2^24 numbers 0.89 to 0.93 s (two cores, other load).
MOST_NUMBERS = 1 << 19
# Axis of a fused leaf along which its parts are joined: [kv_heads, q_per_kv + 2, head_dim, in] and [2, inter, in].
PART_AXES = {"qkv": 1, "gate_up": 0, "shared_gate_up": 0}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Kind of codes, number of inputs per scale, and precision of activations."""

    kind: str
    group_size: int | None  # None: all inputs of an output
    activations: str        # int8 or float, except on CPU, where integer codes use int8


SCHEMES = {
    "int8": Scheme("int8", None, "float"), "int4": Scheme("int4", 64, "float"), "fp8": Scheme("fp8", None, "float"),
    "w8a8": Scheme("int8", None, "int8"),
}  # fmt: skip


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["axis"])
@dataclasses.dataclass(frozen=True)
class JoinedWeight:
    """A fused leaf of parts with different formats, joined along an axis: in a GGUF file, 4-bit q and k and 6-bit v."""

    parts: tuple[Any, ...]
    axis: int  # of the leaf's shape

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        joined = sum(part.shape[self.axis] for part in self.parts)
        return (*first[: self.axis], joined, *first[self.axis + 1 :])

    @property
    def dtype(self) -> np.dtype:
        """dtype of the activations."""
        return self.parts[0].dtype


def is_quantized(leaf: Any) -> bool:
    """True for a QuantizedWeight or a JoinedWeight."""
    return isinstance(leaf, (QuantizedWeight, JoinedWeight))


def quantized_parts(params: Params) -> Iterator[QuantizedWeight]:
    """All QuantizedWeights of a parameter tree."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    return (leaf for leaf in leaves if isinstance(leaf, QuantizedWeight))


class LeafPlacer(Protocol):
    """Puts leaves on devices: `Quantizer` on one, `ShardedQuantizer` on several, `StagedPlacer` on pipeline stages."""

    def of_layer(self, layer: int | None) -> "LeafPlacer":
        """The placer for a layer's leaves: itself if all layers are on the same devices. None: outside of layers."""
        return self

    def finish(self, tree: Params) -> Any:
        """An engine's weights, from the tree of all placed leaves."""
        return tree

    def __call__(self, name: str, leaf: Any) -> Any:
        """The leaf `name` on the devices."""
        ...

    def part(self, name: str, leaf: Any) -> Array:
        """A dense part of a JoinedWeight."""
        ...

    def packed(self, name: str, weight: QuantizedWeight) -> Any:
        """A leaf that is quantised in the checkpoint, on the devices."""
        ...

    def packed_shape(self, name: str, weight: QuantizedWeight) -> Any:
        """As `packed`, for ShapeDtypeStructs."""
        ...

    def shapes(self, shapes: Params) -> Params:
        """The tree `param_shapes(spec, dtype)` with the shapes and shardings on the devices."""
        ...

    def reads_views(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the leaf may be a view of a mapped file, because the placer keeps no reference to it."""
        ...

    def scheme_of_leaf(self, name: str, shape: tuple[int, ...]) -> "Scheme | None":
        """The scheme of the leaf `name`; None if it keeps its dtype."""
        ...


@dataclasses.dataclass(frozen=True)
class Quantizer(LeafPlacer):
    """Quantises the leaves of a parameter tree for a platform, and puts them on one device."""

    scheme: Scheme | None = None  # None: dense leaves are not rounded
    platform: str = "cpu"
    activations: str = "auto"     # `EngineConfig.quantized_activations`

    def __call__(self, name: str, leaf: Shaped[Any, "*shape"]) -> Shaped[Array, "*shape"] | QuantizedWeight:
        """Put the leaf `name` on the default device, quantised by `scheme_of_leaf`. leaf: a jax or numpy array.

        A leaf is quantised in parts, so that only one part at a time is on the device in full precision.
        """
        chosen = self.scheme_of_leaf(name, leaf.shape)
        if chosen is None:
            return jax.block_until_ready(jax.device_put(leaf))
        matrix = leaf.reshape(-1, leaf.shape[-1])
        rows = max(OUTPUTS, MOST_NUMBERS // leaf.shape[-1] // OUTPUTS * OUTPUTS)
        # All other leaves have the same layout, and share a program.
        like, shape = (name, leaf.shape) if name in EXPERTS else ("embed" if name == "embed" else "o", ())

        def part(first: int) -> QuantizedWeight:
            numbers = matrix[first : first + rows]
            if isinstance(numbers, np.ndarray):
                numbers = numbers.copy()  # JAX may hold a view for longer, and then its mapped file cannot close
            made = _quantized(numbers, quantizer=self, name=like, scheme=chosen, shape=shape)
            return dataclasses.replace(made, shape=())

        if rows >= matrix.shape[0]:
            return jax.block_until_ready(part(0).with_shape(leaf.shape))
        described = self.shape(name, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        flat = dataclasses.replace(described.with_shape(matrix.shape), shape=())  # like `part`
        whole = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), flat)
        for first in range(0, matrix.shape[0], rows):
            whole = jax.block_until_ready(_insert(whole, part(first), first))  # else many parts would be in memory
        return whole.with_shape(leaf.shape)

    def packed(self, name: str, weight: QuantizedWeight) -> QuantizedWeight | Array:
        """Convert a checkpoint's leaf from the layout "plain" into the platform's layout.

        On CPU it is dequantised if no native kernel multiplies it. It stays quantised with activations "float", and fp8
        weights stay quantised with activations "fp8".
        """
        return jax.block_until_ready(_place(jax.device_put(weight), quantizer=self, name=name))

    def part(self, name: str, leaf: Float[Any, "*shape"]) -> Array:
        """A dense part of the JoinedWeight `name`, on the default device."""
        return jax.device_put(leaf)

    def packed_shape(self, name: str, weight: QuantizedWeight) -> QuantizedWeight | jax.ShapeDtypeStruct:
        """As `packed`, for ShapeDtypeStructs."""
        return jax.eval_shape(functools.partial(_place, quantizer=self, name=name), weight)

    def shapes(self, shapes: Params) -> Params:
        """The tree `param_shapes(spec, dtype)` after quantisation."""
        return {
            name: tuple(map(self.shapes, leaf)) if name == "layers" else self.shape(name, leaf)
            for name, leaf in shapes.items()
        }

    def shape(self, name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        """As `__call__`, for a ShapeDtypeStruct."""
        chosen = self.scheme_of_leaf(name, leaf.shape)
        if chosen is None:
            return leaf
        matrix = jax.ShapeDtypeStruct((math.prod(leaf.shape[:-1]), leaf.shape[-1]), leaf.dtype)
        make = functools.partial(_quantized, quantizer=self, name=name, scheme=chosen, shape=leaf.shape)
        return jax.eval_shape(make, matrix).with_shape(leaf.shape)

    def reads_views(self, name: str, shape: tuple[int, ...]) -> bool:
        """True for a leaf that is rounded: its parts are copied."""
        return self.scheme_of_leaf(name, shape) is not None

    def scheme_of_leaf(self, name: str, shape: tuple[int, ...]) -> Scheme | None:
        """The scheme of the leaf `name`; None if it keeps its dtype. 8 bits if groups do not divide the inputs."""
        if name not in LEAVES or self.scheme is None:
            return None
        for candidate in (self.scheme, SCHEMES["int8"]):
            has_bits = candidate.kind != "int4" or name not in EIGHT_BITS
            if has_bits and refuse_group(shape[-1], candidate.group_size or shape[-1]) is None:
                return candidate
        return None

    def place(self, name: str, weight: QuantizedWeight, shape: tuple[int, ...]) -> QuantizedWeight:
        """Convert weights from the layout "plain" into the platform's layout, and set their `activations`.

        shape: of the whole leaf. The weights may be a part of it.

        "tiles": the native CPU kernels, which round activations to 8 bits.
        "lanes": the TPU kernels, for 4 bits or groups. Experts need a multiple of 128 outputs. Not the embedding.
        "rows":  all other weights. On CPU these are fp8, and weights with activations that are not rounded. They
                 dequantise blocks of outputs in every step, which is slow on CPU.
        """
        if self.platform == "cpu" and self.activations != "float" and _has_kernel(name, weight, shape):
            return TilesWeight.of(weight)
        able = weight.kind == "int8" and weight.zeros is None and weight.mins is None and name not in EXPERTS
        wanted = weight.activations if self.activations in ("auto", "fp8") else self.activations
        rounds = able and wanted == "int8" and self.platform != "cpu"
        on_lanes = self.platform == "tpu" and (weight.kind == "int4" or weight.groups > 1)
        whole_tiles = name not in EXPERTS or math.prod(shape[1:-1]) % LANES == 0
        if on_lanes and name != "embed" and whole_tiles and LanesWeight.refuse(weight) is None:
            made = LanesWeight.of(weight)
        else:
            made = RowsWeight.of(weight)
        if self.platform == "cpu" and made.kind == "fp8":
            made = dataclasses.replace(made, codes=jax.lax.bitcast_convert_type(made.codes, jnp.uint8))
        if self.activations == "fp8" and weight.kind == "fp8":
            return dataclasses.replace(made, activations="fp8")
        return dataclasses.replace(made, activations="int8" if rounds else "float")


UNCHANGED = Quantizer()


def _has_kernel(name: str, weight: QuantizedWeight, shape: tuple[int, ...]) -> bool:
    """True if a native CPU kernel multiplies the leaf. shape: of the whole leaf."""
    return TilesWeight.refuse(weight) is None and (name not in EXPERTS or TilesWeight.refuse_matrices(shape) is None)


@functools.partial(jax.jit, static_argnames=("quantizer", "name"))
def _place(weight: QuantizedWeight, *, quantizer: Quantizer, name: str) -> QuantizedWeight | Array:
    stays = quantizer.activations == "float" or (quantizer.activations == "fp8" and weight.kind == "fp8")
    if quantizer.platform == "cpu" and not stays and not _has_kernel(name, weight, weight.shape):
        return weight.in_order_of_inputs(weight.dequantize())
    return quantizer.place(name, weight, weight.shape)


@functools.partial(jax.jit, static_argnames=("quantizer", "name", "scheme", "shape"))
def _quantized(
    matrix: Float[Array, "out in"], *, quantizer: Quantizer, name: str, scheme: Scheme, shape: tuple[int, ...]
) -> QuantizedWeight:
    """Quantise some outputs of the leaf `name`. shape: of the whole leaf."""
    plain = quantize_plain(matrix, scheme.kind, scheme.group_size or matrix.shape[-1])
    return quantizer.place(name, dataclasses.replace(plain, activations=scheme.activations), shape)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(whole: QuantizedWeight, part: QuantizedWeight, first: Int[Array, ""] | int) -> QuantizedWeight:
    """Write the outputs of `part` into `whole` from `first`, a multiple of OUTPUTS. Both have no static shape."""
    return whole.insert(part, first)
