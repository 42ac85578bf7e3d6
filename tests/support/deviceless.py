"""Compiles for a target without its device: targets, marks of tests, and the placement of pages."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jpaged.runtime.targets import TARGETS, Target
from pallas_kernels.kv_pages import KVPages, page_format

H200, V5E = TARGETS["h200"], TARGETS["v5e"]


def marks(target: Target) -> list[pytest.MarkDecorator]:
    """Marks of a test that compiles for a target: not in the default run; skipped if the compiler is not installed."""
    return [
        pytest.mark.deviceless,
        pytest.mark.skipif(target.missing is not None, reason=f"needs {target.missing}"),
        # the compile cache can store programs for a missing device, but cannot load them
        pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
    ]


def deviceless(target: Target) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a test the marks of a target."""
    return lambda test: functools.reduce(lambda made, mark: mark(made), marks(target), test)


def page(array: jax.ShapeDtypeStruct, target: Target) -> jax.ShapeDtypeStruct:
    """Shape of a page array on the target, in the format that KVPages uses there."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=page_format(target.sharding(), len(array.shape)))


def on_v5e(x):
    """Return ShapeDtypeStructs on a v5e. Pages have the layout of KVPages."""
    if isinstance(x, KVPages):
        return jax.tree.map(lambda array: page(array, V5E), x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=V5E.sharding())


def compile_for_v5e(call, arguments, place=on_v5e, **options):
    """Compile a call for a v5e. `place` puts arguments and pages on the device."""
    arguments = jax.tree.map(place, arguments, is_leaf=lambda x: isinstance(x, KVPages))
    with V5E.tracing():
        return jax.jit(call, **options).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
