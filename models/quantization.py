"""Quantises the weights of a model when it is loaded: which leaves, in how many bits.

Matrices that `linear` multiplies are quantised. Vectors, routers, positions and the matrices of latent attention that
are multiplied per head keep their dtype.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jpaged.errors import ModelLoadError
from jpaged.models.spec import DecoderSpec, Params
from pallas_kernels import QuantizedWeight, quantize
from pallas_kernels.quantized_dot.weight import OUTPUTS, refuse_group

LEAVES = frozenset({
    "embed", "lm_head", "qkv", "o", "gate_up", "up", "down", "q_a", "q_b", "kv_a", "project_in", "project_out",
})  # fmt: skip
# Both have one row a token of the vocabulary. Their errors reach every logit, so they keep 8 bits.
EIGHT_BITS = frozenset({"embed", "lm_head"})
MOST_NUMBERS = 1 << 24  # that are quantised at once: the search needs about 40 bytes for each


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Bits of the weights, and the inputs that share a scale. Activations have 8 bits."""

    bits: int
    group_size: int | None  # None: all inputs of an output


SCHEMES = {"int8": Scheme(8, None), "int4": Scheme(4, 64)}


def scheme_of_leaf(name: str, shape: tuple[int, ...], scheme: Scheme) -> Scheme | None:
    """The scheme of the leaf `name`; None if it keeps its dtype.

    A matrix whose number of inputs is not a multiple of the group size has 8 bits.
    """
    if name not in LEAVES:
        return None
    for candidate in (scheme, SCHEMES["int8"]):
        has_bits = candidate.bits == 8 or name not in EIGHT_BITS
        if has_bits and refuse_group(shape[-1], candidate.group_size or shape[-1]) is None:
            return candidate
    return None


def quantize_leaf(scheme: Scheme, name: str, leaf: Float[Array, "*shape"]) -> Float[Array, "*shape"] | QuantizedWeight:
    """The leaf `name`, quantised if `scheme_of_leaf` says so."""
    chosen = scheme_of_leaf(name, leaf.shape, scheme)
    if chosen is None:
        return leaf
    matrix = leaf.reshape(-1, leaf.shape[-1])
    rows = max(OUTPUTS, MOST_NUMBERS // leaf.shape[-1] // OUTPUTS * OUTPUTS)
    parts = [_quantize(matrix[i : i + rows], chosen.bits, chosen.group_size) for i in range(0, matrix.shape[0], rows)]
    joined = parts[0] if len(parts) == 1 else jax.tree.map(_join, *(dataclasses.replace(p, shape=()) for p in parts))
    return jax.block_until_ready(dataclasses.replace(joined, shape=leaf.shape))


def quantized_shapes(spec: DecoderSpec, shapes: Params, quantization: str | None) -> Params:
    """The tree `param_shapes(spec, dtype)`, as it is after quantising. quantization: a name in SCHEMES, or None.

    Raises ModelLoadError for a model that cannot be quantised.
    """
    if quantization is None:
        return shapes
    scheme = SCHEMES[quantization]
    if spec.experts is not None:
        raise ModelLoadError(
            f"quantization={quantization!r}: the experts of a mixture of experts cannot be quantised yet: leave it out"
        )

    def changed(leaves: Params) -> Params:
        return {
            name: tuple(map(changed, leaf)) if name == "layers" else _shape(name, leaf, scheme)
            for name, leaf in leaves.items()
        }

    return changed(shapes)


def _shape(name: str, leaf: jax.ShapeDtypeStruct, scheme: Scheme) -> Any:
    chosen = scheme_of_leaf(name, leaf.shape, scheme)
    if chosen is None:
        return leaf
    matrix = jax.ShapeDtypeStruct((math.prod(leaf.shape[:-1]), leaf.shape[-1]), leaf.dtype)
    made = jax.eval_shape(functools.partial(quantize, bits=chosen.bits, group_size=chosen.group_size), matrix)
    return dataclasses.replace(made, shape=leaf.shape)


_quantize = jax.jit(quantize, static_argnums=(1, 2))


def _join(*parts: Array) -> Array:
    return jnp.concatenate(parts)
