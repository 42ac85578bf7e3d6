"""An H200 to compile for without having one. Hardware facts from NVIDIA's data sheets, in XLA's text format."""

import contextlib
import importlib.util

import jax
from jax.experimental import topologies

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  l2_cache_size: 52428800 clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def available() -> bool:
    """Whether JAX's compiler for NVIDIA is installed."""
    return bool(importlib.util.find_spec("jax_cuda13_plugin"))


def sharding() -> jax.sharding.Sharding:
    """Where arguments lie that are compiled for the H200. Needs the jax-cuda plugin, no card."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def tracing() -> contextlib.AbstractContextManager:
    """What to trace and lower in: kernels ask it for the device."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
