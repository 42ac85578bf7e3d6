"""What tests that compile for a device that is not there share: the targets, their marks, and where pages lie."""

import jax
import pytest

from jpaged.runtime.targets import TARGETS, Target
from pallas_kernels.kv_pages import page_format

H200, V5E = TARGETS["h200"], TARGETS["v5e"]


def marks(target: Target) -> list[pytest.MarkDecorator]:
    """Of a test that compiles for a target: not in the default run, and only where its compiler is installed."""
    return [
        pytest.mark.deviceless,
        pytest.mark.skipif(target.missing is not None, reason=f"needs {target.missing}"),
        # programs for a device that is not there can be put into the compile cache, and not be taken out of it
        pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
    ]


def page(array: jax.ShapeDtypeStruct, target: Target) -> jax.ShapeDtypeStruct:
    """An array of pages there, as KVPages places it."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=page_format(target.sharding(), len(array.shape)))
