"""Products with weight matrices. Every weight product of the decoder is made here, by the name of its leaf,
except the row sum of a shared expert's gate (`experts`).

`linear` is the plain product, and `linear_with_bias` adds the leaf's bias. `take_rows` is an embedding.
`linear_per_head` multiplies every attention head by its own matrix. `linear_per_expert` multiplies every block of rows
by the matrix of its expert.

Inside `jax.shard_map` each device multiplies its part of a matrix (`sharding`). `linear_with_bias` and `take_rows` add
the devices' results; the products of the other functions belong to one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jpaged.models.quantization import JoinedWeight
from jpaged.models.sharding import TENSOR, WHOLE, Shards, SplitWeight, splits_inputs
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from pallas_kernels import QuantizedWeight, dot, grouped_dot, quantized_dot, quantized_grouped_dot
from pallas_kernels.dot.cpu import refuse as refuse_cpu_dot
from pallas_kernels.platforms import takes_native


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "cos", "sin", "real", "num_rows"],
    meta_fields=["spec", "layout", "gated_dot", "shards", "watch"],
)
@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Data that the functions of one layer share: the model, the layer's weights, and facts about the tokens.

    The embedding and the `lm_head` belong to no layer. Their context has the model's whole tree as `params`.
    """

    spec: DecoderSpec
    layout: WeightLayout
    params: Params              # leaves by name: the layer's own, and its rows of the stacked vectors
    cos: Array | None = None    # float32[tokens, half] of the rope angles; None: the layer has no rope. sin likewise
    sin: Array | None = None
    real: Array | None = None   # bool[tokens], False for padding; None: no token is padding
    # int32[], number of first rows that are needed; None: all, and products have gradients
    num_rows: Array | None = None
    gated_dot: str | None = None  # implementation of `gated_dot`; None: the best one
    shards: Shards = WHOLE        # number of parts of the leaves; `params` has this device's
    # called with the name and the input of each product of `linear` while it is traced; for calibration
    watch: Callable[[str, Array], None] | None = None


def linear(
    name: str, x: Float[Array, "rows in"], context: LayerContext, *,
    dtype: DTypeLike | None = None, min_outputs: int = 0,
) -> Float[Array, "rows out"]:  # fmt: skip
    """x times the matrix `name`. All axes of the leaf but the last are one axis here, the outputs.

    dtype:       of the result; None = x's dtype. float32 operands give true float32 products on every platform.
    min_outputs: compute at least this many outputs of a matrix [out, in], which is padded with rows of zeros. The
                 result has the matrix's own outputs only.

    The leaf may be a `QuantizedWeight`, or a `JoinedWeight` of several.
    """
    weight, transposed = context.params[name], name in context.layout.transposed
    if context.watch is not None:
        context.watch(name, x)
    if not isinstance(weight, JoinedWeight):
        return _product(weight, x, context, dtype, transposed=transposed, min_outputs=min_outputs)
    products = []
    for part in weight.parts:
        product = _product(part, x, context, dtype, transposed=transposed, min_outputs=0)
        products.append(product.reshape(x.shape[0], *part.shape[:-1]))
    return jnp.concatenate(products, 1 + weight.axis).reshape(x.shape[0], -1)


def _product(
    weight: Any, x: Float[Array, "rows in"], context: LayerContext, dtype: DTypeLike | None, *, transposed: bool,
    min_outputs: int,
) -> Float[Array, "rows out"]:  # fmt: skip
    """x times one matrix: an array or a QuantizedWeight. See `linear`."""
    if isinstance(weight, QuantizedWeight):
        return quantized_dot(x, weight, x.shape[0] if context.num_rows is None else context.num_rows, dtype=dtype)
    weight = weight.reshape(-1, weight.shape[-1])
    outputs = weight.shape[0]
    if outputs < min_outputs:
        weight = jnp.pad(weight, ((0, min_outputs - outputs), (0, 0)))
    if context.num_rows is not None and not transposed and outputs >= min_outputs:
        return dot(x, weight, context.num_rows, dtype=dtype)
    dims = (((1,), (0 if transposed else 1,)), ((), ()))
    out = lax.dot_general(x, weight, dims, precision=_precision(x), preferred_element_type=dtype or x.dtype)
    return out if outputs >= min_outputs else out[:, :outputs]


def linear_with_bias(name: str, x: Float[Array, "rows in"], context: LayerContext) -> Float[Array, "rows out"]:
    """`linear`, summed over the devices if the inputs are split, plus the leaf NAME_bias if the model has it."""
    bias = context.params.get(f"{name}_bias")
    if not splits_inputs(name, context.shards):
        return add(linear(name, x, context), bias)
    return add(context.shards.total(products(name, x, context), x.dtype), bias)


def products(name: str, x: Float[Array, "rows in"], context: LayerContext) -> list[Float[Array, "rows out"]]:
    """This device's products with a matrix whose inputs are split, for `Shards.total`."""
    weight = context.params[name]
    if not isinstance(weight, SplitWeight):
        return [linear(name, x, context)]
    return [
        _product(part, of_part, context, jnp.float32, transposed=False, min_outputs=0)
        for part, of_part in zip(weight.parts, jnp.split(x, len(weight.parts), axis=1), strict=True)
    ]


def take_rows(
    name: str, indices: Int[Array, " tokens"], context: LayerContext
) -> Float[Array, "tokens width"]:
    """The rows of the matrix `name` with these indices: an embedding. Indices out of range are clipped."""
    weight, shards = context.params[name], context.shards
    if shards.count > 1:
        indices -= shards.first(weight.shape[0])
    rows = weight.rows(indices) if isinstance(weight, QuantizedWeight) else jnp.take(weight, indices, 0, mode="clip")
    if shards.count == 1:
        return rows
    is_here = (indices >= 0) & (indices < weight.shape[0])
    return jax.lax.psum(jnp.where(is_here[:, None], rows, 0), TENSOR)  # exact: one device has the row, all others zeros


def linear_per_head(
    name: str, x: Float[Array, "tokens heads in"], context: LayerContext, *, part: slice, transposed: bool
) -> Float[Array, "tokens heads out"]:
    """x times a matrix per head. `part` slices axis 1 of the leaf.

    transposed: the leaf is [heads, in, out]; otherwise it is [heads, out, in].
    """
    weight = context.params[name][:, part]
    precision = _precision(x)

    def direct(x: Array, weight: Array) -> Array:
        dims = (((2,), (1 if transposed else 2,)), ((1,), (0,)))
        return lax.dot_general(x, weight, dims, precision=precision)

    def by_rows(x: Array, weight: Array) -> Array:
        rows = lax.optimization_barrier(weight.swapaxes(1, 2))
        return lax.dot_general(x, rows, (((2,), (2,)), ((1,), (0,))), precision=precision)

    if transposed:  # XLA's CPU products with [in, out] matrices have other bits from 64 rows on
        out = lax.platform_dependent(x, weight, cpu=by_rows, default=direct)
    else:
        out = direct(x, weight)
    return out.swapaxes(0, 1)


def linear_per_expert(
    name: str,
    x: Float[Array, "blocks rows in"],
    expert_of_block: Int[Array, " blocks"],
    num_blocks_used: Int[Array, ""],
    rows_of_block: Int[Array, " blocks"],
    context: LayerContext,
) -> Float[Array, "blocks rows out"]:
    """Every block of rows times the matrix of its expert, from the leaf [experts, ..., in].

    The results are needed of the first `num_blocks_used` blocks, and of each block's first `rows_of_block` rows. The
    others are undefined.
    """
    weight = context.params[name]
    if isinstance(weight, QuantizedWeight):
        return quantized_grouped_dot(x, weight, expert_of_block, num_blocks_used, rows_of_block=rows_of_block)
    weight = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    return grouped_dot(x, weight, expert_of_block, num_blocks_used, rows_of_block=rows_of_block)


def has_native_matmul(spec: DecoderSpec, dtype: DTypeLike) -> bool:
    """True if a native kernel for CPU computes the products of a model with weights of this dtype, when serving."""
    if spec.experts is not None or spec.latent is not None:
        return False
    hidden = spec.hidden_size
    for inputs in {hidden, spec.embed_size or hidden, spec.intermediate_size, spec.num_heads * spec.head_dim}:
        row = jax.ShapeDtypeStruct((1, inputs), dtype)
        if not takes_native(refuse_cpu_dot, row, row, dtype):
            return False
    return True


def add(x: Array, bias: Array | None) -> Array:
    """x, plus the bias if there is one."""
    return x if bias is None else x + bias


def _precision(x: Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
