"""Dequantises the leaves of a parameter tree."""

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.models.quantization import JoinedWeight, is_quantized
from pallas_kernels import QuantizedWeight


def dense(params: Any) -> Any:
    """The tree with every quantised leaf dequantised, its inputs in the original order."""
    return jax.tree.map(_numbers, params, is_leaf=is_quantized)


def _numbers(leaf: Any) -> jax.Array:
    if isinstance(leaf, JoinedWeight):
        return jnp.concatenate([_numbers(part) for part in leaf.parts], leaf.axis)
    return leaf.in_order_of_inputs(leaf.dequantize()) if isinstance(leaf, QuantizedWeight) else leaf
