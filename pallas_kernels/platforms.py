"""Which implementation, and which form of a Pallas kernel, runs where: the one place that knows about platforms."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

# JAX 0.11 deprecates the Triton back end of Pallas and warns at every lowering. What happens when it goes is in
# docs/kernels.md; until then the warning tells a user nothing that they could act on.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


# The first of these that an operation has, and that takes the call; "xla" where there is none.
PREFERRED = {"cpu": ("xla_loop",), "gpu": ("triton",), "tpu": ("mosaic_tpu",)}


class Implementation(NamedTuple):
    """One way to compute an operation, and what it cannot do."""

    call: Callable[..., Any]
    # (device, *what the operation goes by), arrays or ShapeDtypeStructs: None, or why it cannot take that
    refuse: Callable[..., str | None] = lambda *_: None  # XLA's operations take everything everywhere


def choose(implementations: Mapping[str, Implementation], device: Any, *call: Any) -> str:
    """The name of the implementation for a jax Device and a call."""
    for name in PREFERRED.get(device.platform, ()):
        if name in implementations and implementations[name].refuse(device, *call) is None:
            return name
    return "xla"


def pick(implementations: Mapping[str, Implementation], wish: str | None, *call: Any) -> Callable[..., Any]:
    """The implementation that is wished for, or that is chosen for JAX's default device.

    Raises ValueError where there is none of that name, or it cannot take the call.
    """
    device = default_device()
    name = wish or choose(implementations, device, *call)
    if name not in implementations:
        raise ValueError(f"implementation={name!r}: must be one of {', '.join(implementations)}")
    reason = implementations[name].refuse(device, *call)
    if reason is not None:
        raise ValueError(f"implementation={name!r} cannot take this: {reason}. Leave it out to have one chosen")
    return functools.partial(_in_32_bits, implementations[name].call)


def _in_32_bits(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Kernels count in int32, also in a program that has 64 bits switched on."""
    with jax.enable_x64(False):
        return call(*args, **options)


def compiled_on(platform: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` compiled where the call is lowered for `platform`, and in interpret mode (XLA operations) elsewhere.

    platform: "cuda" or "tpu". kernel: takes arrays by position, options by name, and `interpret`.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        compiled, interpreted = (functools.partial(kernel, **options, interpret=i) for i in (False, True))
        return jax.lax.platform_dependent(*args, **{platform: compiled}, default=interpreted)

    return call


def default_device() -> Any:
    """The jax Device that a call without arrays on another runs on: `jax.default_device`, or the first one."""
    named = jax.config.jax_default_device
    if named is None:
        return jax.devices()[0]
    return jax.devices(named)[0] if isinstance(named, str) else named


def nvidia_capability(device: Any) -> tuple[int, int] | None:
    """Compute capability of a jax Device, (9, 0) for Hopper; None where it is no NVIDIA card."""
    # "9.0" on NVIDIA, a name like "gfx942" on AMD
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if device.platform == "gpu" and major.isdigit() and minor.isdigit() else None


def refuse_triton(device: Any) -> str | None:
    """Why kernels lowered through Triton cannot run on a device; None where they can (on CPU in interpret mode)."""
    capability = nvidia_capability(device)
    if device.platform == "cpu" or (capability and capability >= (8, 0)):
        return None
    if capability:
        has = ".".join(map(str, capability))
        return f"its products need compute capability 8.0 (Ampere) or newer, {device.device_kind} has {has}"
    return f"it is for NVIDIA, and for CPU in interpret mode, not for {device.device_kind}"


def refuse_tpu(device: Any) -> str | None:
    """Why kernels lowered through Mosaic for TPU cannot run on a device; None where they can."""
    if device.platform in ("cpu", "tpu"):
        return None
    return f"it is for TPU, and for CPU in interpret mode, not for {device.device_kind}"
