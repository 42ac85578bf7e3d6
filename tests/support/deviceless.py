"""Shared by tests that compile for a device without having one: targets, marks, and the placement of pages."""

import jax
import pytest

from jpaged.runtime.targets import TARGETS, Target
from pallas_kernels.kv_pages import page_format

H200, V5E = TARGETS["h200"], TARGETS["v5e"]


def marks(target: Target) -> list[pytest.MarkDecorator]:
    """Marks of a test that compiles for a target: not in the default run; skipped if the compiler is not installed."""
    return [
        pytest.mark.deviceless,
        pytest.mark.skipif(target.missing is not None, reason=f"needs {target.missing}"),
        # the compile cache can store programs for a missing device, but cannot load them
        pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
    ]


def page(array: jax.ShapeDtypeStruct, target: Target) -> jax.ShapeDtypeStruct:
    """Shape of a page array on the target, in the format that KVPages uses there."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=page_format(target.sharding(), len(array.shape)))
