"""Times of jitted loops, and texts for the results of checks, for the benchmarks of kernels."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.self_check import TOLERANCE


def seconds(call: Callable[..., Any], arguments: tuple, turns: int, repeats: int) -> list[float]:
    """Seconds per iteration of `call(*arguments)`, a jitted loop of `turns` iterations. The first run is left out."""
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append((time.perf_counter() - start) / turns)
    return times


def sentence(error: Exception) -> str:
    """An error on one line, with its type."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def within_limit(differences: Mapping[str, float], dtype: str) -> str:
    """Text for a check that passed: the difference of each case, and the limit."""
    found = ", ".join(f"{case} {difference:.1e}" for case, difference in differences.items())
    return f"{found}; limit {TOLERANCE[dtype]:.0e}: ok"


def too_large(error: Exception) -> str:
    """Text for a check that failed. The error has the case, the difference and the limit."""
    return f"too large: {str(error).splitlines()[0]}"
