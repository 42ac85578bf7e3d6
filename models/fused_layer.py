"""A layer as few kernels: matmuls with partial sums, and one kernel that adds them, the residual and the next norm.

`decoder` computes decode programs so on NVIDIA GPUs, where a step of a small model waits for kernels to start. All
programs of a `deterministic` engine with 16-bit weights have such layers (`Shards.fixed_kernels`). For Qwen3 these
kernels follow the attention: output matmul, sum with norm, gate and up with the activation, down matmul, sum with the
next layer's norm. A row's bits depend on no other row.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.models.layers import takes_gated_dot
from jpaged.models.linear import LayerContext
from jpaged.models.quantization import is_quantized
from jpaged.models.sharding import TENSOR
from jpaged.models.spec import Activation, DecoderSpec, Norm, NormPosition, Params, QKNorm, WeightLayout
from pallas_kernels import add_norm, gated_dot, partial_dots
from pallas_kernels.add_norm.reference import tree_sum
from pallas_kernels.add_norm.triton import MAX_WIDTH
from pallas_kernels.dot.tiling import parts_that_fill

FIXED = "triton_fixed"  # kernels with one tile for every number of rows
# From this number of rows on, one program adds the parts of a tile: their tiles alone fill the GPU, and separate sums
# are 4 * parts bytes for each output.
MAX_SEPARATE_ROWS = 256


@functools.partial(jax.tree_util.register_dataclass, data_fields=["mlp_norm", "attn_norm", "layer"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerNorms:
    """Norms that a fused layer applies, of all layers: XLA would copy a layer's row for the kernel."""

    mlp_norm: Float[Array, "layers hidden"]
    attn_norm: Float[Array, "layers hidden"] | None  # None: no next layer
    layer: Int[Array, ""]  # index of the layer in both


def refuse_fused(spec: DecoderSpec) -> str | None:
    """Reason why the layers of a model are not computed so; None if they are."""
    reasons = {
        "norms that are not RMS norms": spec.norm is not Norm.RMS,
        "norms after attention or after the feed-forward network": spec.norm_position is not NormPosition.PRE,
        "a parallel residual": spec.parallel_residual or spec.shared_norm,
        "a factor of the residual": spec.residual_scale != 1,
        "recurrent layers": any(spec.recurrent),
        "attention in both directions": spec.encoder is not None,
        "experts": spec.experts is not None,
        "latent attention": spec.latent is not None,
        "norms of queries and keys that are not per head and before rope": spec.qk_norm not in (None, QKNorm.HEAD),
        "layers with different heads or norms": bool(spec.heads_by_layer or spec.qk_norm_layers or spec.layer_kv),
        "queries that grow with their position": spec.query_scaling is not None,
        "attention in chunks": bool(spec.attention_chunks),
        "gates of attention's output": spec.output_gates != 0,
        "no gate in its feed-forward network": not spec.gated,
        "a clamp in its gate": spec.swiglu_limit is not None,
        "a factor of its gate or of a block's output": (
            (spec.gate_scale, spec.feed_forward_scale, spec.attention_out_scale) != (1, 1, 1)
        ),
        "exact GELU": spec.activation is Activation.GELU,
        f"more than {MAX_WIDTH} numbers in a hidden state": spec.hidden_size > MAX_WIDTH,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def refuse_layer(spec: DecoderSpec, layout: WeightLayout, leaves: Params) -> str | None:
    """Reason why a layer with these leaves is not computed so; None if it is."""
    if (reason := refuse_fused(spec)) is not None:
        return reason
    if layout != WeightLayout() or not takes_gated_dot(spec, layout, leaves):
        return "separate or transposed matrices, or biases of gate and up"
    if "o_bias" in leaves or "down_bias" in leaves:
        return "biases of the output or down projection"
    weights = [leaves[name] for name in ("qkv", "o", "gate_up", "down")]
    return "quantised weights" if any(is_quantized(w) or not hasattr(w, "ndim") for w in weights) else None


def finish_layer(
    x: Float[Array, "tokens hidden"], attended: Float[Array, "tokens heads_in"], context: LayerContext,
    norms: "LayerNorms",
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"] | None]:  # fmt: skip
    """A layer after its attention. Returns its output, and that after the norm of the next layer.

    x: input of the layer. attended: output of attention. Without a next layer the second result is None.
    """
    params, eps = context.params, context.spec.norm_eps
    sums = _partial_products("o", attended, context)
    x, normed = add_norm(sums, x, norms.mlp_norm, layer=norms.layer, eps=eps, implementation="triton")
    assert normed is not None  # there is a weight
    gated = gated_dot(
        normed, params["gate_up"], _num_rows(normed, context), activation=context.spec.activation.value,
        implementation=context.fused,
    )  # fmt: skip
    sums = _partial_products("down", gated, context)
    # The last sum is XLA's, which stores it where the next program reads it. A kernel's result would be copied there.
    adds = "xla" if norms.attn_norm is None else "triton"
    return add_norm(sums, x, norms.attn_norm, layer=norms.layer + 1, eps=eps, implementation=adds)


def _partial_products(
    name: str, x: Float[Array, "tokens in"], context: LayerContext
) -> Float[Array, "parts tokens hidden"]:
    """float32 sums over parts of the inputs, on all devices. Their sum, in pairs, is x times the matrix `name`."""
    shards, tokens = context.shards, x.shape[0]
    weight = context.params[name].reshape(-1, x.shape[1])
    parts = shards.parts_here
    if context.fused != FIXED:
        parts = parts_that_fill(tokens, *weight.shape)
    sums = partial_dots(
        x, weight, _num_rows(x, context), parts=parts, together=tokens > MAX_SEPARATE_ROWS,
        implementation=context.fused or FIXED,
    )  # fmt: skip
    if shards.count == 1:
        return sums
    total = tree_sum(list(sums))
    # the same order of additions as on one device, which has all parts
    return lax.all_gather(total, TENSOR) if shards.parts > 1 else lax.psum(total, TENSOR)[None]


def _num_rows(x: Array, context: LayerContext) -> Any:
    return x.shape[0] if context.num_rows is None else context.num_rows
