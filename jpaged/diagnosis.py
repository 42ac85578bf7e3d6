"""Facts about a machine and checks of the kernels on its device, for `jpaged report`.

Imported late: JAX, which may be what does not work; the report then says so.
"""

import functools
import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from jpaged.errors import first_line

PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "numpy", "numba", "llvmlite", "transformers",
    "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvcc",
)  # fmt: skip
# Exact names, no prefixes: NVIDIA_API_KEY and similar variables are secrets.
VARIABLES = (
    "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_TRACEBACK_FILTERING", "JAX_DISABLE_JIT",
    "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TF_CPP_MIN_LOG_LEVEL",
)  # fmt: skip
SHAPES = {  # of attention: query heads, KV heads, head_dim, dtype
    "llama": (32, 8, 128, "bfloat16"), "qwen2": (14, 2, 64, "bfloat16"), "gemma": (8, 4, 256, "bfloat16"),
    "float32": (8, 2, 64, "float32"),
}  # fmt: skip

# On a CPU, every shape and case is compiled: SHAPES take 150 s, and the shape of the demo model 10 s.
CPU_SHAPES = {"demo": (4, 2, 64, "bfloat16")}
CPU_CASES = ("mixed",)  # it has decodes and chunks

GATED_ROWS = (64, 300)  # rows of gated_dot with a layer of Llama 3.1 8B: both sizes of its tiles


def diagnose() -> Iterator[dict[str, Any]]:
    """Collect facts about the machine, and check every kernel that supports its device.

    Yields one dict that grows: first without checks, then after each check. `left` is the number of remaining checks.
    """
    facts: dict[str, Any] = {"versions": _versions(), "environment": _environment()}
    from jpaged.runtime import nvidia_devices

    facts["nvidia_driver"] = nvidia_devices.driver_version()
    try:
        import jax

        device = jax.devices()[0]
    except Exception as error:  # JAX raises many types for a driver that it cannot use
        yield facts | {"problem": nvidia_devices.cannot_start(error), "device": {}, "checks": [], "left": 0}
        return
    facts |= {"problem": nvidia_devices.problem(device.platform), "device": _device(device)}
    jobs = _jobs(device)
    facts |= {"checks": [], "left": len(jobs)}
    yield facts
    for shape, name, run in jobs:
        begin = time.perf_counter()
        result: dict[str, Any] = {"implementation": name, "shape": shape}
        try:
            result["difference"] = run()
        except Exception as error:  # compilers and drivers raise many types
            result |= {"error": first_line(error), "traceback": traceback.format_exc()}
        facts["checks"].append(result | {"seconds": time.perf_counter() - begin})
        facts["left"] -= 1
        yield facts


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _device(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return {
        "kind": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "multiprocessors": getattr(device, "core_count", None),
        "runtime": device.client.platform_version,
        "memory": stats,
    }


def _jobs(device: Any) -> list[tuple[str, str, Callable[[], float]]]:
    """Return the checks for a device: shape, implementation, and a function that returns the largest difference."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import KVPages, self_check
    from pallas_kernels.paged_attention import usable_implementations
    from pallas_kernels.platforms import refuse_triton

    jobs: list[tuple[str, str, Callable[[], float]]] = []
    on_cpu = device.platform == "cpu"
    options: dict[str, Any] = {"cases": CPU_CASES} if on_cpu else {}
    for shape, (q_heads, kv_heads, head_dim, dtype) in (CPU_SHAPES if on_cpu else SHAPES).items():
        q = jax.ShapeDtypeStruct((64, q_heads, head_dim), jnp.dtype(dtype))
        pages = KVPages.shapes(1, 16, kv_heads, head_dim, dtype)
        tables = jax.ShapeDtypeStruct((4, 128), jnp.dtype("int32"))
        names = usable_implementations(device, q, pages, tables, 64)
        check = functools.partial(
            self_check, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device, **options
        )
        jobs += [
            (shape, name, lambda check=check, name=name: max(check(implementation=name).values()))
            for name in names
        ]
    jobs += [
        (f"{rows} rows", "gated_dot triton", functools.partial(_check_gated_dot, rows, device))
        for rows in GATED_ROWS
        if device.platform == "gpu" and refuse_triton(device) is None
    ]
    return jobs


def _check_gated_dot(rows: int, device: Any) -> float:
    """Compare the kernel of gated_dot with its reference, for `rows` rows. Returns the largest difference."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.self_check import check_gated_dot

    x, weight = (jax.ShapeDtypeStruct(shape, jnp.dtype("bfloat16")) for shape in ((rows, 4096), (2, 14336, 4096)))
    return check_gated_dot(x, weight, "silu", implementation="triton", device=device)
