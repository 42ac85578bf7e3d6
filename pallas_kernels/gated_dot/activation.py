"""Activation functions of a feed-forward network, in float32: bf16 transcendentals lose digits."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),      # exact, with erf
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),  # the tanh approximation
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),            # Primer, arXiv:2109.08668
    "tanh": jnp.tanh,
}  # fmt: skip


def activate(activation: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The activation function of that name, from ACTIVATIONS. Computed in float32, returned in x's dtype."""
    return ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)


def gated(activation: str, gate: Any, up: Any) -> Any:
    """act(gate) * up. The activation is rounded to the dtype before the product, as in Hugging Face Transformers."""
    return activate(activation, gate) * up
