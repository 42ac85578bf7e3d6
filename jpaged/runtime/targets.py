"""Kinds of devices to plan and compile for. JAX's compilers for NVIDIA and TPU need no device.

The numbers are from the vendors' data sheets; limits of a compute capability are from NVIDIA's CUDA C++ programming
guide. 80 GB of memory count as 80e9 bytes, a little less than the GPUs have.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os

import jax
from jax.experimental import topologies

from jpaged.collectives import Link
from jpaged.errors import ModelLoadError

GB = 10**9

# Usual links. Bandwidth is in one direction: half of the vendor's bidirectional number. A ring of TPUs uses two of a
# chip's ports: v5e and v6e have 4, v5p has 6. Latency of NVIDIA links: one step of NCCL's ring with LL128 (hwLat in its
# tuning.cc). Latency of a hop between TPUs: about 1 us (Austin et al., How to Scale Your Model). From the same book:
# NCCL reaches 370 of the 450 GB/s on 8 H100, with arrays of gigabytes.
_NVLINK_4, _NVLINK_3, _PCIE_4 = Link(450 * GB, 1.9e-6), Link(300 * GB, 1.9e-6), Link(32 * GB, 2.5e-6)
_ICI_V5E, _ICI_V6E, _ICI_V5P = Link(100 * GB, 1e-6), Link(200 * GB, 1e-6), Link(200 * GB, 1e-6)


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device. Has the attributes of `jax.Device` by which kernels are chosen."""

    name: str
    platform: str                    # "cpu", "gpu" or "tpu", as in `jax.Device.platform`
    device_kind: str                 # as in `jax.Device.device_kind`
    memory_bytes: int | None = None  # None: CPU; its KV pool does not depend on memory
    num_cores: int = 1               # NVIDIA multiprocessors, or TensorCores per JAX device on TPU
    compute_capability: str = ""     # NVIDIA only
    bandwidth: int = 0               # bytes a second; 0: not known
    flops: int = 0                   # dense bfloat16 FLOPs a second; 0: not known
    l2_bytes: int = 0                # NVIDIA only
    clock_ghz: float = 0.0           # NVIDIA only
    topology: str = ""               # TPU only: the smallest slice, as libtpu names it
    link: Link | None = None         # to other devices of the machine or slice; None: not known

    def slice_of(self, count: int) -> str:
        """TPU only: the smallest slice with `count` chips, as libtpu names it. Raises ModelLoadError."""
        kind, _, shape = self.topology.partition(":")
        sizes = _SLICES[shape.count("x")]
        if count not in sizes:
            raise ModelLoadError(
                f"tensor_parallel_size={count}: slices of {self.name} have {', '.join(map(str, sizes))} chips"
            )
        return f"{kind}:{sizes[count]}"

    @property
    def missing(self) -> str | None:
        """Package to install before compiling for the target; None if it is installed."""
        if self.platform == "gpu" and not _installed("jax_cuda13_plugin"):
            return "jax[cuda13]"
        if self.platform == "tpu" and not _installed("libtpu"):
            return "jax[tpu]"
        return None

    def sharding(self) -> jax.sharding.Sharding:
        """Sharding of arrays on the target, to compile with. Needs the package that `missing` names."""
        return jax.sharding.SingleDeviceSharding(self.devices(1)[0])

    def devices(self, count: int) -> list[jax.Device]:
        """`count` devices of one machine or slice, to compile for. Needs the package that `missing` names.

        Raises ModelLoadError if no TPU slice has `count` chips, or if JAX has fewer CPU devices.
        """
        return list(_devices(self, count))

    def tracing(self) -> contextlib.AbstractContextManager[object]:
        """Context manager for tracing and lowering. Kernels read the device from it."""
        if self.platform == "cpu":
            return contextlib.nullcontext()
        device = jax.sharding.AbstractDevice(
            device_kind=self.device_kind, num_cores=self.num_cores, platform=self.platform
        )
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@functools.cache  # every topology description makes new devices, and JAX cannot mix devices of two descriptions
def _devices(target: Target, count: int) -> tuple[jax.Device, ...]:
    if target.platform == "cpu":
        found = jax.devices("cpu")
        if len(found) < count:
            raise ModelLoadError(f"tensor_parallel_size={count}: this machine has {len(found)} CPU devices")
        return tuple(found[:count])
    if target.platform == "gpu":
        description = topologies.get_topology_desc(
            platform="cuda", target_config=_nvidia_config(target), topology=f"1x1x{count}"
        )
    else:
        # Without these variables libtpu looks for a TPU machine, and writes errors to stderr if there is none.
        for name, value in _NO_TPU_MACHINE.items():
            os.environ.setdefault(name, value)
        description = topologies.get_topology_desc(target.slice_of(count), platform="tpu")
    return tuple(description.devices[:count])


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


_NO_TPU_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}  # fmt: skip

# Smallest TPU slice for a number of chips. First key: number of "x" in the topology, 1 in 2D and 2 in 3D.
_SLICES = {
    1: {1: "2x2", 2: "2x2", 4: "2x2", 8: "2x4", 16: "4x4"}, 2: {1: "2x2x1", 2: "2x2x1", 4: "2x2x1", 8: "2x2x2"},
}  # fmt: skip

# By compute capability, per multiprocessor: threads, FPUs, bytes of shared memory, maximum shared bytes of one block.
_MULTIPROCESSOR = {
    "8.0": (2048, 64, 167936, 166912),
    "8.6": (1536, 128, 102400, 101376),
    "8.9": (1536, 128, 102400, 101376),
    "9.0": (2048, 128, 233472, 232448),
}


def _nvidia_config(target: Target) -> str:
    """XLA's text format. Without a driver version, CUDA graphs leave out branches, loops and library calls."""
    threads, units, shared, shared_block = _MULTIPROCESSOR[target.compute_capability]
    major, minor = target.compute_capability.split(".")
    extension = "feature_extension: ACCELERATED_FEATURES" if major == "9" else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  core_count: {target.num_cores} fpus_per_core: {units} threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: {threads}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_block} shared_memory_per_core: {shared}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  l2_cache_size: {target.l2_bytes} clock_rate_ghz: {target.clock_ghz}
  memory_bandwidth: {target.bandwidth} device_memory_size: {target.memory_bytes}
  driver_version: "13.0.0" runtime_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{target.device_kind}"
"""


def _nvidia(
    name: str, kind: str, memory_gb: int, cores: int, capability: str, gb_a_second: int, tera: int, l2_mib: int,
    clock: float, link: Link,
) -> Target:  # fmt: skip
    return Target(
        name, "gpu", kind, memory_gb * GB, cores, capability, gb_a_second * GB, tera * 10**12, l2_mib * 2**20, clock,
        link=link,
    )  # fmt: skip


def _tpu(
    name: str, kind: str, memory_gb: int, gb_a_second: int, tera: int, topology: str, link: Link, cores: int = 1
) -> Target:
    return Target(
        name, "tpu", kind, memory_gb * GB, cores, bandwidth=gb_a_second * GB, flops=tera * 10**12, topology=topology,
        link=link,
    )  # fmt: skip


TARGETS = {
    target.name: target
    for target in (
        _nvidia("h200", "NVIDIA H200", 141, 132, "9.0", 4800, 989, 50, 1.98, _NVLINK_4),
        _nvidia("h100", "NVIDIA H100 80GB HBM3", 80, 132, "9.0", 3350, 989, 50, 1.98, _NVLINK_4),
        _nvidia("a100", "NVIDIA A100-SXM4-80GB", 80, 108, "8.0", 2039, 312, 40, 1.41, _NVLINK_3),
        _nvidia("a100-40gb", "NVIDIA A100-SXM4-40GB", 40, 108, "8.0", 1555, 312, 40, 1.41, _NVLINK_3),
        _nvidia("l40s", "NVIDIA L40S", 48, 142, "8.9", 864, 362, 96, 2.52, _PCIE_4),
        _nvidia("l4", "NVIDIA L4", 24, 58, "8.9", 300, 121, 48, 2.04, _PCIE_4),
        _nvidia("a10", "NVIDIA A10", 24, 72, "8.6", 600, 125, 6, 1.695, _PCIE_4),
        _tpu("v5e", "TPU v5 lite", 16, 819, 197, "v5e:2x2", _ICI_V5E),
        _tpu("v6e", "TPU v6 lite", 32, 1640, 918, "v6e:2x2", _ICI_V6E),
        _tpu("v5p", "TPU v5", 95, 2765, 459, "v5p:2x2x1", _ICI_V5P, cores=2),
        Target("cpu", "cpu", "cpu"),
    )
}


def with_memory(target: Target, memory_bytes: int) -> Target:
    """The same kind of device with `memory_bytes` bytes of memory."""
    return dataclasses.replace(target, memory_bytes=memory_bytes)
