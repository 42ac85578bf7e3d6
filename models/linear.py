"""All matmuls of the decoder with weight matrices, by the name of the leaf, and the embedding (`take_rows`).

The one exception is the gate of a shared expert (`experts`). `linear` is a plain matmul. `linear_with_bias` adds the
leaf's bias. `linear_per_head` has a matrix per attention head, and `linear_per_expert` a matrix per block of rows.

Inside `jax.shard_map` each device multiplies by its part of a matrix (`sharding`). `linear_with_bias` and `take_rows`
add the results of all devices. All other functions return this device's results.
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

from jpaged.models.adapters import LayerAdapters, product_with_adapters, with_adapters
from jpaged.models.quantization import JoinedWeight
from jpaged.models.sharding import TENSOR, WHOLE, Shards, SplitWeight, splits_inputs
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from pallas_kernels import QuantizedWeight, dot, gather_rows, grouped_dot, quantized_dot, quantized_grouped_dot
from pallas_kernels.dot.cpu import refuse as refuse_cpu_dot
from pallas_kernels.platforms import takes_native


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "cos", "sin", "real", "num_rows", "adapters", "query_factors", "layer_input", "token_ids"],
    meta_fields=["spec", "layout", "gated_dot", "fused", "shards", "watch"],
)
@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Data that the functions of one layer share: the model, the layer's weights, and facts about the tokens.

    `params` is the model's whole tree for the embedding and the `lm_head`, which belong to no layer.
    """

    spec: DecoderSpec
    layout: WeightLayout
    params: Params              # leaves by name: the layer's leaves, and its rows of stacked vectors
    cos: Array | None = None    # float32[tokens, half] of the rope angles; None: the layer has no rope. sin likewise
    sin: Array | None = None
    real: Array | None = None   # bool[tokens], False for padding; None: no token is padding
    # int32[], number of needed rows, which come first; None: all, and matmuls have gradients
    num_rows: Array | None = None
    gated_dot: str | None = None  # implementation of `gated_dot`; None: the best one
    shards: Shards = WHOLE        # split of the leaves; `params` has this device's parts
    # called with the name and the input of each `linear` while it is traced; for calibration
    watch: Callable[[str, Array], None] | None = None
    adapters: LayerAdapters | None = None  # LoRA adapters of the tokens; None: the engine has none
    query_factors: Array | None = None  # float32[tokens], factors of the queries (`spec.QueryScaling`); None: 1
    layer_input: Array | None = None  # [tokens, size], vectors of `spec.LayerEmbedding`; None: the model has none
    token_ids: Array | None = None  # int32[tokens], for `Experts.hashed`; None: the model has no such layers
    # implementation of the matmuls and sums in `fused_layer`, "triton" or "triton_fixed"; None: XLA's operations
    fused: str | None = None

    def dot_implementation(self, dtype: DTypeLike) -> str | None:
        """Implementation of `pallas_kernels.dot` for rows of this dtype; None: the best one."""
        return "triton_fixed" if self.shards.fixed_kernels(dtype) else self.fused


def linear(
    name: str, x: Float[Array, "rows in"], context: LayerContext, *,
    dtype: DTypeLike | None = None, min_outputs: int = 0,
) -> Float[Array, "rows out"]:  # fmt: skip
    """x times the matrix `name`. The outputs are all axes of the leaf except the last, merged into one.

    dtype:       of the result; None = x's dtype. float32 operands are multiplied in true float32 on every platform.
    min_outputs: pad a matrix [out, in] with rows of zeros to this number of outputs. The result excludes the padding.

    The leaf may be a `QuantizedWeight`, or a `JoinedWeight` of several. Each row's adapter is added.
    """
    weight, transposed = context.params[name], name in context.layout.transposed
    if context.watch is not None:
        context.watch(name, x)
    adapters, num_rows = context.adapters, context.num_rows
    is_array = not isinstance(weight, JoinedWeight | QuantizedWeight)
    is_plain = is_array and num_rows is not None and not transposed and not min_outputs  # as for `dot` in `_product`
    if is_plain and adapters is not None and name in adapters.pools:
        return product_with_adapters(name, x, weight.reshape(-1, x.shape[1]), adapters, num_rows, dtype)
    if not isinstance(weight, JoinedWeight):
        out = _product(weight, x, context, dtype, transposed=transposed, min_outputs=min_outputs)
    else:
        products = []
        for part in weight.parts:
            product = _product(part, x, context, dtype, transposed=transposed, min_outputs=0)
            products.append(product.reshape(x.shape[0], *part.shape[:-1]))
        out = jnp.concatenate(products, 1 + weight.axis).reshape(x.shape[0], -1)
    return with_adapters(name, x, out, context.adapters, context.num_rows)


def _product(
    weight: Any, x: Float[Array, "rows in"], context: LayerContext, dtype: DTypeLike | None, *, transposed: bool,
    min_outputs: int,
) -> Float[Array, "rows out"]:  # fmt: skip
    """`linear` for one matrix, an array or a QuantizedWeight."""
    if isinstance(weight, QuantizedWeight):
        return quantized_dot(x, weight, x.shape[0] if context.num_rows is None else context.num_rows, dtype=dtype)
    # A trainer's matrix may have an axis of heads: [in, heads, head_dim] or [heads, head_dim, in]
    weight = weight.reshape((x.shape[1], -1) if transposed else (-1, x.shape[1]))
    outputs = weight.shape[0]
    if outputs < min_outputs:
        weight = jnp.pad(weight, ((0, min_outputs - outputs), (0, 0)))
    if context.num_rows is not None and not transposed and outputs >= min_outputs:
        return dot(x, weight, context.num_rows, dtype=dtype, implementation=context.dot_implementation(x.dtype))
    dims = (((1,), (0 if transposed else 1,)), ((), ()))
    out = lax.dot_general(x, weight, dims, precision=_precision(x), preferred_element_type=dtype or x.dtype)
    return out if outputs >= min_outputs else out[:, :outputs]


def linear_with_bias(name: str, x: Float[Array, "rows in"], context: LayerContext) -> Float[Array, "rows out"]:
    """`linear`, summed over devices if the inputs are split, plus the leaf NAME_bias if the model has it."""
    bias = context.params.get(f"{name}_bias")
    if not splits_inputs(name, context.shards):
        return add(linear(name, x, context), bias)
    return add(context.shards.total(products(name, x, context), x.dtype), bias)


def products(name: str, x: Float[Array, "rows in"], context: LayerContext) -> list[Float[Array, "rows out"]]:
    """This device's partial results of a matmul with split inputs, for `Shards.total`."""
    weight = context.params[name]
    if not isinstance(weight, SplitWeight):
        return [linear(name, x, context)]
    return [
        _product(part, of_part, context, jnp.float32, transposed=False, min_outputs=0)
        for part, of_part in zip(weight.parts, jnp.split(x, len(weight.parts), axis=1), strict=True)
    ]


def take_rows(
    name: str, indices: Int[Array, " tokens"], context: LayerContext, *, in_loop: bool = False, scale: float = 1
) -> Float[Array, "tokens width"]:
    """Rows of the matrix `name` at these indices, times `scale`: an embedding. Indices out of range are clipped.

    in_loop: the program takes rows in a loop. Then use `gather_rows` for the first `context.num_rows` indices.
    """
    weight, shards = context.params[name], context.shards

    def scaled(rows: Array) -> Array:
        return rows if scale == 1 else rows * jnp.asarray(scale, rows.dtype)

    if in_loop and shards.count == 1 and not isinstance(weight, QuantizedWeight):
        return scaled(gather_rows(weight, indices, len(indices) if context.num_rows is None else context.num_rows))
    if shards.count > 1:
        indices -= shards.first(weight.shape[0])
    rows = weight.rows(indices) if isinstance(weight, QuantizedWeight) else jnp.take(weight, indices, 0, mode="clip")
    # Before devices exchange rows. After it, XLA for CPU would move the product next to the residual's sum, and round
    # another one of the two products there (a fused multiply-add) than it does on one device.
    rows = scaled(rows)
    if shards.count == 1:
        return rows
    is_here = (indices >= 0) & (indices < weight.shape[0])
    return jax.lax.psum(jnp.where(is_here[:, None], rows, 0), TENSOR)  # exact: all other devices have zeros


def linear_per_head(
    name: str, x: Float[Array, "tokens heads in"], context: LayerContext, *, part: slice, transposed: bool
) -> Float[Array, "tokens heads out"]:
    """x times a matrix per head. part: slice of axis 1 of the leaf.

    transposed: the slice is [heads, in, out]; otherwise it is [heads, out, in].
    """
    weight = context.params[name][:, part]
    precision = _precision(x)

    def direct(x: Array, weight: Array) -> Array:
        dims = (((2,), (1 if transposed else 2,)), ((1,), (0,)))
        return lax.dot_general(x, weight, dims, precision=precision)

    def by_rows(x: Array, weight: Array) -> Array:
        rows = lax.optimization_barrier(weight.swapaxes(1, 2))
        return lax.dot_general(x, rows, (((2,), (2,)), ((1,), (0,))), precision=precision)

    if transposed:  # on CPU, the bits of XLA's matmul with [in, out] matrices differ from 64 rows on
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

    Results are defined for the first `num_blocks_used` blocks, and for each block's first `rows_of_block` rows.
    """
    weight = context.params[name]
    if isinstance(weight, QuantizedWeight):
        return quantized_grouped_dot(x, weight, expert_of_block, num_blocks_used, rows_of_block=rows_of_block)
    weight = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    return grouped_dot(x, weight, expert_of_block, num_blocks_used, rows_of_block=rows_of_block)


def has_native_matmul(spec: DecoderSpec, dtype: DTypeLike) -> bool:
    """True if a native CPU kernel computes the matmuls of a model with weights of this dtype when serving."""
    if spec.experts is not None or spec.latent is not None:
        return False
    hidden = spec.hidden_size
    sizes = {hidden, spec.embed_size or hidden, spec.intermediate_size, *spec.intermediate_sizes}
    sizes |= {spec.num_heads * spec.head_dim, *(spec.num_heads * kv.head_dim for kv in spec.layer_kv)}
    sizes |= set() if spec.layer_embed is None else {spec.layer_embed.size}
    sizes |= set() if spec.recurrence is None else {spec.recurrence.inner_size}
    for inputs in sizes:
        row = jax.ShapeDtypeStruct((1, inputs), dtype)
        if not takes_native(refuse_cpu_dot, row, row, dtype):
            return False
    return True


def add(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def _precision(x: Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
