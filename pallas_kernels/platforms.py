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
