"""JAX's private names that there is no public way around, and the versions they were tried on (0.10.2, 0.11.2)."""

from jax._src import xla_bridge


def backends_are_started() -> bool:
    """Whether JAX has a back end already: options of it that are set from here on have no effect."""
    return xla_bridge.backends_are_initialized()
