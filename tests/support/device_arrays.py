"""Arrays on the device without a compiled program.

`jnp.asarray` compiles a program for each new shape and dtype. A test of many shapes then compiles more programs for its
inputs than for the functions that it tests.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def device_array(values: Any, dtype: Any) -> jax.Array:
    """`values` as an array of `dtype` on the default device. numpy converts them."""
    return jax.device_put(np.asarray(values).astype(jnp.dtype(dtype)))
