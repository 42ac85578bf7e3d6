"""RawQKV: the output of a layer's q, k and v matmul, and what write_qkv still applies to it."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qkv", "bias", "cos", "sin", "q_norm", "k_norm"],
    meta_fields=["norm_eps"],
)
@dataclasses.dataclass(frozen=True)
class RawQKV:
    """q, k and v before bias, norm and rotary embedding. `write_qkv` explains the fields. None: skip this step."""

    qkv: Float[Array, "tokens kv_heads q_per_kv_plus_2 head_dim"]
    bias: Float[Array, "kv_heads q_per_kv_plus_2 head_dim"] | None = None
    cos: Float[Array, "tokens half"] | None = None
    sin: Float[Array, "tokens half"] | None = None
    q_norm: Float[Array, " head_dim"] | None = None
    k_norm: Float[Array, " head_dim"] | None = None
    norm_eps: float = 0.0  # static
