"""Which form of a Pallas kernel runs where: the one place that knows about platforms and their warnings."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

# JAX 0.11 deprecates the Triton back end of Pallas and warns at every lowering. What happens when it goes is in
# docs/kernels.md; until then the warning tells a user nothing that they could act on.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def on_cuda(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` compiled where the call is lowered for NVIDIA, and in interpret mode (XLA operations) elsewhere.

    kernel: takes arrays by position, options by name, and `interpret`.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        compiled, interpreted = (functools.partial(kernel, **options, interpret=i) for i in (False, True))
        return jax.lax.platform_dependent(*args, cuda=compiled, default=interpreted)

    return call


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
