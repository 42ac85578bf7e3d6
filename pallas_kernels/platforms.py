"""Chooses the implementation for a device, and if a Pallas kernel is interpreted. Only this module knows platforms."""

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

# JAX 0.11 deprecates the Triton back end of Pallas and warns at every lowering. Users cannot act on the warning.
# docs/kernels.md says what replaces the back end.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


# Implementations by platform, best first. The first one that exists and accepts the call is chosen, else "xla".
PREFERRED = {"cpu": ("cpu", "xla_loop"), "gpu": ("triton", "triton_small"), "tpu": ("mosaic_tpu",)}


class Implementation(NamedTuple):
    """An implementation of an operation, and the calls that it refuses."""

    call: Callable[..., Any]
    # refuse(device, *arguments) returns None, or the reason why the call is not possible. Each operation defines the
    # arguments; arrays may be ShapeDtypeStructs. The default is for XLA operations, which take every call.
    refuse: Callable[..., str | None] = lambda *_: None


def candidates(implementations: Mapping[str, Implementation], device: Any, *call: Any) -> tuple[str, ...]:
    """Names of the implementations that accept a call on a jax Device, best first. The last one is "xla"."""
    known = [name for name in PREFERRED.get(device.platform, ()) if name in implementations]
    return *(name for name in known if implementations[name].refuse(device, *call) is None), "xla"


def choose(implementations: Mapping[str, Implementation], device: Any, *call: Any) -> str:
    """Name of the best implementation for a jax Device and the arguments of a call."""
    return candidates(implementations, device, *call)[0]


def pick(implementations: Mapping[str, Implementation], wanted: str | None, *call: Any) -> Callable[..., Any]:
    """The implementation called `wanted`; None: the best one for JAX's default device.

    Raises ValueError if the name is unknown, or if the implementation refuses the call.
    """
    device = default_device()
    name = wanted or choose(implementations, device, *call)
    if name not in implementations:
        raise ValueError(f"implementation={name!r}: must be one of {', '.join(implementations)}")
    reason = implementations[name].refuse(device, *call)
    if reason is not None:
        raise ValueError(f"implementation={name!r} cannot take this: {reason}. Leave it out to choose automatically")
    return functools.partial(_in_32_bits, implementations[name].call)


def _in_32_bits(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run the call without x64, because kernels count in int32."""
    with jax.enable_x64(False):
        return call(*args, **options)


def compiled_on(platform: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `kernel` compiled on `platform`, and in interpret mode (XLA operations) elsewhere.

    platform: "cuda" or "tpu". kernel: takes arrays by position, options by name, and the option `interpret`.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        compiled, interpreted = (functools.partial(kernel, **options, interpret=i) for i in (False, True))
        return jax.lax.platform_dependent(*args, **{platform: compiled}, default=interpreted)

    return call


def default_device() -> Any:
    """JAX's default Device: `jax.default_device` if it is set, else the first device."""
    named = jax.config.jax_default_device
    if named is None:
        return jax.devices()[0]
    return jax.devices(named)[0] if isinstance(named, str) else named


def nvidia_capability(device: Any) -> tuple[int, int] | None:
    """Compute capability of a jax Device, (9, 0) for Hopper; None if it is not an NVIDIA GPU."""
    # "9.0" on NVIDIA, a name like "gfx942" on AMD
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if device.platform == "gpu" and major.isdigit() and minor.isdigit() else None


def _described_device() -> jax.sharding.AbstractDevice | None:
    """Device of the mesh that a kernel is traced in, which may be a GPU that this machine lacks; None without one."""
    return jax.sharding.get_abstract_mesh().abstract_device


def device_kind() -> str:
    """Kind of the device that a kernel is traced for: the mesh's device, else JAX's default device."""
    described = _described_device()
    return (described if described is not None else default_device()).device_kind


def traced_platform() -> str:
    """Platform that a kernel is traced for: of the mesh's device, else of JAX's default device."""
    described = _described_device()
    return (default_device() if described is None else described).platform


def is_interpreted() -> bool:
    """True if a Mosaic GPU kernel is traced for the interpreter on CPU, not for a GPU, present or described."""
    return traced_platform() == "cpu"


def num_multiprocessors() -> int:
    """Multiprocessors of the mesh's device, else of JAX's default device. 132, as on an H200, if it reports none."""
    described = _described_device()
    cores = described.num_cores if described is not None else getattr(default_device(), "core_count", None)
    return cores or 132


# GPUs with at most 99 KiB of shared memory per thread block: compute capabilities 8.6, 8.9 and 12.
_SMALL_BLOCKS = re.compile(r"\b(A2|A10G?|A16|A40|L4|L40S?|RTX|GeForce)\b")


def has_small_blocks() -> bool:
    """True if the GPU that a kernel is traced for has 99 KiB of shared memory per thread block, not 163 or 227."""
    described = _described_device()
    if described is not None:
        return _SMALL_BLOCKS.search(described.device_kind) is not None
    capability = nvidia_capability(default_device())
    return capability is not None and (capability in ((8, 6), (8, 9)) or capability[0] == 12)


_A100 = re.compile(r"\b(A100|A800|A30)\b")


def is_a100() -> bool:
    """True if a kernel is traced for a GPU of compute capability 8.0: A100, A800 or A30."""
    described = _described_device()
    if described is not None:
        return _A100.search(described.device_kind) is not None
    return nvidia_capability(default_device()) == (8, 0)


_HOPPER = re.compile(r"\b(H20|H100|H200|H800|GH200)\b")


def is_hopper() -> bool:
    """True if a kernel is traced for a GPU of compute capability 9."""
    described = _described_device()
    if described is not None:
        return _HOPPER.search(described.device_kind) is not None
    return (nvidia_capability(default_device()) or (0, 0))[0] == 9


def takes_native(refuse: Callable[..., str | None], *call: Any) -> bool:
    """True if the call is traced for CPU and a native kernel accepts it. refuse: as `Implementation.refuse`.

    For other devices `refuse` is not called: its first call compiles the kernel, which takes up to 25 s.
    """
    return traced_platform() == "cpu" and refuse(jax.devices("cpu")[0], *call) is None


def refuse_cpu(device: Any) -> str | None:
    """Reason why native kernels cannot run on a device; None if it is a CPU."""
    return None if device.platform == "cpu" else f"it is for CPU, not for {device.device_kind}"


def refuse_triton(device: Any) -> str | None:
    """Reason why kernels lowered through Triton cannot run on a device; None if they can. CPU interprets them."""
    capability = nvidia_capability(device)
    if device.platform == "cpu" or (capability and capability >= (8, 0)):
        return None
    if capability:
        has = ".".join(map(str, capability))
        return f"its matmuls need compute capability 8.0 (Ampere) or newer, {device.device_kind} has {has}"
    return f"it is for NVIDIA, and for CPU in interpret mode, not for {device.device_kind}"


def refuse_tpu(device: Any) -> str | None:
    """Reason why kernels lowered through Mosaic for TPU cannot run on a device; None if they can."""
    if device.platform in ("cpu", "tpu"):
        return None
    return f"it is for TPU, and for CPU in interpret mode, not for {device.device_kind}"
