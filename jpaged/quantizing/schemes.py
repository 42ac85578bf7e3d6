"""Schemes of `jpaged quantize`, and their compressed-tensors description in config.json."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

GROUP_SIZES = (128, 64, 32)  # default: the first that divides the inputs of all matrices


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Formats of weights and activations."""

    kind: str           # `QuantizedWeight.kind`: int4, int8 or fp8
    grouped: bool       # True: a scale for each group of inputs; False: one scale for each output
    activations: str    # int8 or fp8: engines round each token's activations to it. none: no rounding
    format: str         # `format` of compressed-tensors


# All are symmetric, because Transformers 5.24 refuses packed zero points unless `dequantize=True`.
SCHEMES = {
    "w4a16": Scheme("int4", True, "none", "pack-quantized"),
    "w8a8": Scheme("int8", False, "int8", "int-quantized"),
    "w4a8": Scheme("int4", True, "int8", "pack-quantized"),
    "fp8": Scheme("fp8", False, "fp8", "float-quantized"),
}


def quantization_config(scheme: Scheme, group_size: int | None, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. ignore: names of modules that are not quantised."""
    weights = _arguments(scheme.kind, "group" if scheme.grouped else "channel", dynamic=False)
    weights["group_size"] = group_size
    inputs = None if scheme.activations == "none" else _arguments(scheme.activations, "token", dynamic=True)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": scheme.format}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def scale_dtype(tensor: np.dtype) -> np.dtype:
    """dtype of a tensor's scales: the tensor's dtype, as Transformers expects; float32 for float64."""
    return np.dtype(np.float32) if tensor == np.float64 else tensor


def _arguments(kind: str, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 4 if kind == "int4" else 8,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
    }
