"""Workloads of gated_dot for kernels.py and tune_kernels.py: gate, up and activation of a feed-forward network.

An iteration runs several layers, more than any cache holds. A layer's result is an input of the next layer. XLA's
matmul and activation together are compared with one kernel.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import seconds, sentence, too_large, within_limit

from pallas_kernels.gated_dot import IMPLEMENTATIONS, triton
from pallas_kernels.gated_dot.tiling import Tiling
from pallas_kernels.platforms import compiled_on, has_small_blocks
from pallas_kernels.self_check import KernelCheckError, check_gated_dot


@dataclasses.dataclass(frozen=True)
class Products:
    """A call: rows of `inputs` numbers, and matrices for `outputs` of gate and of up."""

    rows: int
    inputs: int
    outputs: int
    layers: int = 3  # 235 MB each with Llama 3.1 8B

    @property
    def name(self) -> str:
        return f"gated_dot, {self.rows:,} rows, {self.inputs:,} to 2 x {self.outputs:,}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of both matrices, in bf16."""
        return 2 * 2 * self.inputs * self.outputs

    @property
    def flops(self) -> int:
        """Flops of both matmuls."""
        return 2 * 2 * self.rows * self.inputs * self.outputs

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """x and the weights of a layer."""
        x, weight = (self.rows, self.inputs), (2, self.outputs, self.inputs)
        return jax.ShapeDtypeStruct(x, jnp.dtype("bfloat16")), jax.ShapeDtypeStruct(weight, jnp.dtype("bfloat16"))

    def arrays(self) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """x, and the weights of all layers. Sums are about 1."""
        x, *weights = jax.random.split(jax.random.key(0), self.layers + 1)
        scale = jnp.bfloat16(self.inputs**-0.5)
        layers = (jax.random.normal(key, (2, self.outputs, self.inputs), jnp.bfloat16) * scale for key in weights)
        return jax.random.normal(x, (self.rows, self.inputs), jnp.bfloat16), tuple(layers)


def workloads(tiny: bool) -> list[Products]:
    """Decodes of 1, 64 and 256 rows, and a chunk, of Llama 3.1 8B."""
    if tiny:
        return [Products(3, 32, 48, 1)]
    return [Products(rows, 4096, 14336) for rows in (1, 64, 256, 2048)]


def kernel(tiling: Tiling) -> Callable[..., jax.Array]:
    """The kernel for NVIDIA with a tiling, for SiLU."""
    return functools.partial(compiled_on("cuda", triton.gated_dot), activation="silu", tiling=tiling)


def xla() -> Callable[..., jax.Array]:
    """XLA's matmul with both matrices, and the activation, for SiLU."""
    return functools.partial(IMPLEMENTATIONS["xla"].call, activation="silu")


def times(products: Products, call: Callable[..., jax.Array], arrays: tuple, repeats: int) -> list[float]:
    """Seconds per call. arrays: `products.arrays()`."""
    x, layers = arrays
    on_gpu = jax.default_backend() == "gpu"
    one = products.layers * (products.weight_bytes / 3e12 + products.flops / 5e14)
    turns = max(1, round(0.02 / one)) if on_gpu else 1

    @jax.jit
    def run(x: jax.Array, layers: tuple) -> jax.Array:
        def turn(_: jax.Array, y: jax.Array) -> jax.Array:
            for weight in layers:
                # the barrier keeps XLA from computing only the part of the activation that the next layer reads
                out = lax.optimization_barrier(call(y, weight, jnp.int32(x.shape[0])))
                y = x + jnp.resize(out, x.shape)
            return y

        return lax.fori_loop(0, turns, turn, x)

    return seconds(run, (x, layers), turns * products.layers, repeats)


def measure(products: Products, repeats: int) -> dict[str, Any]:
    """Seconds per call of XLA, and of the kernel with the rule's tiling. An error message replaces missing seconds."""
    arrays = products.arrays()
    rule = Tiling.by_rule(products.rows, small_blocks=has_small_blocks())
    results: dict[str, Any] = {}
    for name, call in (("xla", xla()), ("triton", kernel(rule))):
        try:
            results[name] = times(products, call, arrays, repeats)
        except Exception as error:  # continue with the other implementation
            results[name] = sentence(error)
    return results


def check(tiny: bool) -> dict[str, Any]:
    """Print and return the kernel's difference from the reference for each workload, or the error."""
    found: dict[str, Any] = {}
    for products in workloads(tiny):
        try:
            found[products.name] = {"silu": check_gated_dot(*products.shapes(), "silu", implementation="triton")}
            text = within_limit(found[products.name], products.shapes()[0].dtype.name)
        except KernelCheckError as error:
            text = found[products.name] = too_large(error)
        except Exception as error:  # compiler errors as well
            text = found[products.name] = sentence(error)
        print(f"  {products.name}: {text}", flush=True)
    return found


class Judge:
    """Measures tilings with the same arrays."""

    def __init__(self, products: Products, repeats: int) -> None:
        self._products, self._repeats, self._arrays = products, repeats, products.arrays()
        x, layers = self._arrays
        self._expected = np.asarray(jax.jit(xla())(x, layers[0], products.rows), np.float32)
        self.problems: dict[str, str] = {}

    def __call__(self, tiling: Tiling) -> float:
        """Seconds per call; infinite if the tiling does not run or gives wrong results."""
        x, layers = self._arrays
        try:
            out = np.asarray(jax.jit(kernel(tiling))(x, layers[0], jnp.int32(self._products.rows)), np.float32)
            difference = np.abs(out - self._expected) / np.maximum(1, np.abs(self._expected))
            if not difference.max() <= 2e-2:
                raise ValueError(f"differs from XLA's by {difference.max():.3g}")
            return statistics.median(times(self._products, kernel(tiling), self._arrays, self._repeats))
        except Exception as error:  # the tiling does not compile, or its results are wrong
            self.problems[str(tiling)] = sentence(error)
            return float("inf")

    def xla_seconds(self) -> float:
        """Seconds per call of XLA's matmul and activation."""
        return statistics.median(times(self._products, xla(), self._arrays, self._repeats))
