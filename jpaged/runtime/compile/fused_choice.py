"""Chooses how layers are computed: by XLA's matmuls, or by the few kernels of `models.fused_layer`."""

import logging
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, first_line
from jpaged.models.fused_layer import FIXED, refuse_layer
from jpaged.models.sharding import Shards
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.runtime.step.batch import ForwardShape
from pallas_kernels.platforms import refuse_triton
from pallas_kernels.self_check import check_partial_dots

logger = logging.getLogger(__name__)

MAX_ROWS = 256  # of a decode program with fused layers. More rows wait for the matmuls, not for kernels to start
# Weights of a layer up to which fused layers are the default. They save three kernels, about 7 us a layer. That is the
# time to read 34 MB on an H200, so a kernel that reads at half of XLA's speed loses with more. Predicted, not measured.
MAX_LAYER_BYTES = 2**25
MATRICES = ("qkv", "o", "gate_up", "down")


def fused_implementation(
    config: EngineConfig, spec: DecoderSpec, params: Params, layout: WeightLayout, device: Any, shards: Shards,
    dtype: np.dtype,
) -> str | None:  # fmt: skip
    """Implementation of the fused layers: "triton" in decode programs, "triton_fixed" in all programs, or None.

    params: one device's part. device: a jax Device or a Target. Raises ModelLoadError if the options ask for fused
    layers, and the model or the device does not allow them.
    """
    layers = [{**params, **layer} for layer in params["layers"]]
    reason = next(filter(None, (refuse_layer(spec, layout, leaves) for leaves in layers)), None)
    if np.dtype(dtype).itemsize != 2:
        reason = reason or f"weights of {np.dtype(dtype).name}"
    reason = reason or refuse_triton(device)
    if shards.fixed_kernels(dtype):
        if reason is not None:
            raise ModelLoadError(f"deterministic=True cannot serve this model here: {reason}: leave it out")
        return FIXED
    if shards.count > 1:
        reason = reason or f"tensor_parallel_size={shards.count}"
    if config.enable_lora:
        reason = reason or "enable_lora=True"
    if config.fused_layers and reason is not None:
        raise ModelLoadError(f"fused_layers=True cannot serve this model here: {reason}: leave it out for the default")
    if config.fused_layers is not None:
        return "triton" if config.fused_layers else None
    if reason is not None or device.platform != "gpu":
        return None
    largest = max(sum(leaves[name].size * leaves[name].dtype.itemsize for name in MATRICES) for leaves in layers)
    return "triton" if largest <= MAX_LAYER_BYTES else None


def takes_fused(implementation: str | None, shape: ForwardShape) -> bool:
    """True if a forward program has fused layers. implementation: of `fused_implementation`."""
    return implementation == FIXED or (implementation is not None and shape.is_decode and shape.tokens <= MAX_ROWS)


def checked_implementation(
    name: str | None, config: EngineConfig, params: Params, tokens: list[int], device: jax.Device
) -> str | None:
    """Compare the kernels with their reference on this device. Returns `name`, or None if they fail.

    tokens: of the programs that have fused layers. Logs a wrong result or a failed compile as an error, or raises
    ModelLoadError if the options need the kernels.
    """
    if name is None or device.platform == "cpu":
        return name
    leaves, largest = params["layers"][0], 0.0
    try:
        for weight in (leaves["o"], leaves["down"]):
            for rows in tokens:
                x = jax.ShapeDtypeStruct((rows, weight.shape[1]), np.dtype(weight.dtype))
                largest = max(largest, check_partial_dots(x, weight, implementation=name, device=device))
    except Exception as error:  # wrong results, or a kernel that does not compile or run on this device
        reason = f"{type(error).__name__}: {first_line(error)}"
        if config.deterministic or config.fused_layers:
            option = "deterministic" if config.deterministic else "fused_layers"
            kind = device.device_kind
            raise ModelLoadError(f"{option}=True does not work on {kind}: {reason}: leave it out") from error
        logger.error(
            "fused layers do not work on %s, so XLA's matmuls are used: %s. `jpaged report` writes what is needed to "
            "find out why", device.device_kind, reason,
        )  # fmt: skip
        return None
    logger.info("the kernels of fused layers agree with their reference: largest difference %.2g", largest)
    return name
