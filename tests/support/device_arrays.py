"""Puts arrays on the device without a compiled program.

`jnp.asarray` compiles a program for each new shape and dtype. A test of many shapes would compile more programs for its
inputs than for the tested functions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def device_array(values: Any, dtype: Any) -> jax.Array:
    """`values` as an array of `dtype` on the default device. numpy converts them."""
    return jax.device_put(np.asarray(values).astype(jnp.dtype(dtype)))
