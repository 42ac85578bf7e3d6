"""Refuses calls from inside a function that JAX traces."""

import sys

import numpy as np

from jpaged.errors import RequestError


def refuse_tracing(*values: object) -> None:
    """Raise RequestError while JAX traces, or if a value is a tracer: the call would run only once, during tracing."""
    jax = sys.modules.get("jax")
    if jax is None:
        return
    # Inside jit, scan and vmap even a constant becomes a tracer. Outside of them, device_put compiles nothing.
    if any(isinstance(value, jax.core.Tracer) for value in (*values, jax.device_put(np.int32(0)))):
        raise RequestError(
            "generate",
            "a call inside a function that JAX traces",
            "call it outside of jit, vmap, grad and scan, with concrete arrays",
        )
