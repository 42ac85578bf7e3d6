"""Lowers kernel calls to StableHLO for accelerators. Needs no device."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
}


def lower_for(platform, call, arguments):
    """Return the StableHLO of `call` for an accelerator."""
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=DEVICES[platform])):
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
