"""JAX's settings for the engine. The settings are process-wide, and a trainer may have changed them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax

# Values that the engine accepts. If JAX has another value, `pinned` sets the first one.
_WANTED: dict[str, tuple[Any, ...]] = {
    "enable_x64": (False,),  # ids, positions and the request table are int32
    "numpy_rank_promotion": ("allow",),
    "numpy_dtype_promotion": ("standard",),
    "threefry_partitionable": (True,),  # False gives other random numbers from the same seed
    "default_matmul_precision": ("default", None),  # code that needs another precision passes it
    "debug_nans": (False,),  # True switches donation off: every step would copy the KV pool
    "debug_infs": (False,),
    "disable_jit": (False,),
    # a step uploads one packed array and downloads its tokens
    "transfer_guard_host_to_device": ("allow", None),
    "transfer_guard_device_to_host": ("allow", None),
    "transfer_guard_device_to_device": ("allow", None),
}

# Names of attributes of `jax.config`. Looking up a name that is built at every step takes 0.8 us, this table 0.2 us.
_ATTRIBUTES = {name: f"jax_{name}" for name in _WANTED}
_ALL = tuple(_WANTED)

DOWNLOADS = ("transfer_guard_device_to_host",)  # the settings that reading a result depends on
_AS_IT_IS = contextlib.nullcontext()


def pinned(names: Iterable[str] = _ALL) -> contextlib.AbstractContextManager[None]:
    """Set JAX as the engine needs it, in this thread and inside the context only.

    names: settings to check. Accepted values stay unchanged: reading all takes 3 us, setting all 16 us.
    """
    config = jax.config
    changes = [name for name in names if getattr(config, _ATTRIBUTES[name]) not in _WANTED[name]]
    return _set(changes) if changes else _AS_IT_IS


@contextlib.contextmanager
def _set(names: Iterable[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(getattr(jax, name)(_WANTED[name][0]))
        yield
