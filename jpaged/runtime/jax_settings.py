"""JAX's settings for the engine. They belong to the process, and a trainer may have changed them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

# Values that serve the engine. The first one is set where JAX has none of them.
_WANTED: dict[str, tuple[Any, ...]] = {
    "enable_x64": (False,),  # ids, positions and the request table are int32
    "numpy_rank_promotion": ("allow",),
    "numpy_dtype_promotion": ("standard",),
    "threefry_partitionable": (True,),  # another value gives other draws from the same seed
    "default_matmul_precision": ("default", None),  # code that needs another precision names it
    "debug_nans": (False,),  # True switches donation off: every step would copy the KV pool
    "debug_infs": (False,),
    "disable_jit": (False,),
    # a step transfers one packed array in and its tokens out
    "transfer_guard_host_to_device": ("allow", None),
    "transfer_guard_device_to_host": ("allow", None),
    "transfer_guard_device_to_device": ("allow", None),
}


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Set JAX as the engine needs it, in this thread and inside the context only. The caller's settings stay.

    Settings that serve already are left alone: reading all takes 4 us, and setting all 16. A step does it twice.
    """
    changes = [name for name, wanted in _WANTED.items() if getattr(jax.config, f"jax_{name}") not in wanted]
    if not changes:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in changes:
            stack.enter_context(getattr(jax, name)(_WANTED[name][0]))
        yield
