"""Chooses the implementation of `gated_dot`: from the option or the tuning table, then checked at start."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, first_line
from jpaged.models.layers import takes_gated_dot
from jpaged.models.quantization import is_quantized
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from pallas_kernels.gated_dot import IMPLEMENTATIONS, choose_implementation
from pallas_kernels.self_check import check_gated_dot

logger = logging.getLogger(__name__)


def named_implementation(
    config: EngineConfig, spec: DecoderSpec, params: Params, layout: WeightLayout, device: Any
) -> str | None:
    """The implementation that the options name. None: the tuning table chooses one for each program.

    device: a jax Device or a Target. Raises ModelLoadError if the implementation cannot compute the model's layers.
    """
    name = config.gated_dot_implementation
    if name is None:
        return None
    if name not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ModelLoadError(f"gated_dot_implementation={name!r}: must be one of {known}; leave it out for the default")
    weights = list(_weights(spec, params, layout))
    reason = None if weights else "no layer has gate and up in one dense matrix without biases"
    for weight in weights:
        reason = reason or IMPLEMENTATIONS[name].refuse(device, _rows(1, weight), weight, spec.activation.value)
    if reason is not None and name != "xla":
        raise ModelLoadError(
            f"gated_dot_implementation={name!r} cannot serve this model here: {reason}; leave it out for the default"
        )
    return name


def checked_implementation(
    name: str | None, spec: DecoderSpec, params: Params, layout: WeightLayout, tokens: Iterable[int],
    device: jax.Device,
) -> str | None:  # fmt: skip
    """Compare the kernel with its reference on this device. Returns `name`, or "xla" if the kernel fails.

    name: from `named_implementation`. tokens: of the forward programs. Checks each program that uses the kernel. Logs a
    wrong result or a failed compile as an error, or raises ModelLoadError if the options name the kernel.
    """
    activation, largest = spec.activation.value, None
    try:
        for weight in _weights(spec, params, layout):
            for rows in sorted(set(tokens)):
                x = _rows(rows, weight)
                chosen = name or choose_implementation(device, x, weight, activation)
                if chosen != "xla":
                    error = check_gated_dot(x, weight, activation, implementation=chosen, device=device)
                    largest = max(largest or 0.0, error)
    except Exception as error:  # wrong results, or a kernel that does not compile or run on this device
        reason = f"{type(error).__name__}: {first_line(error)}"
        if name is not None:
            raise ModelLoadError(
                f"gated_dot_implementation={name!r} does not work on {device.device_kind}: {reason}; leave it out "
                "to use another"
            ) from error
        logger.error(
            "gated_dot does not work on %s, so XLA's matmuls are used: %s. `jpaged report` writes what is needed to "
            "find out why", device.device_kind, reason,
        )  # fmt: skip
        return "xla"
    if largest is not None:
        logger.info("gated_dot agrees with its reference: largest difference %.2g", largest)
    return name


def _weights(spec: DecoderSpec, params: Params, layout: WeightLayout) -> Iterator[Any]:
    """Distinct shapes of a model's `gated_dot` weights: [2, intermediate, hidden]."""
    seen = set()
    for layer in params["layers"]:
        if not takes_gated_dot(spec, layout, {**params, **layer}) or is_quantized(layer["gate_up"]):
            continue
        weight = jax.ShapeDtypeStruct(layer["gate_up"].shape, layer["gate_up"].dtype)
        if weight.shape not in seen:
            seen.add(weight.shape)
            yield weight


def _rows(count: int, weight: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, weight.shape[2]), np.dtype(weight.dtype))
