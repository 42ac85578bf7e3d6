"""A TPU v5e to compile for without having one: JAX's TPU compiler (the package `libtpu`) needs no device."""

import contextlib
import functools
import importlib.util
import os

import jax
import pytest
from jax.experimental import topologies

from pallas_kernels.kv_pages import page_format

MARKS = [
    pytest.mark.deviceless,
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs jax[tpu]"),
    # programs for a device that is not there can be put into the compile cache, and not be taken out of it
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
]


@functools.cache  # each description has devices of its own, which do not mix
def sharding() -> jax.sharding.Sharding:
    """Where arguments lie that are compiled for it."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nobody to ask which machine this is
    topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def page(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An array of pages there, as KVPages places it."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=page_format(sharding(), len(array.shape)))


def tracing() -> contextlib.AbstractContextManager:
    """What to trace and lower in."""
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
