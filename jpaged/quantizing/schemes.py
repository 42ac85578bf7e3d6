"""Schemes of `jpaged quantize`, and their description in config.json as compressed-tensors defines it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

GROUP_SIZES = (128, 64, 32)  # the first that divides all matrices' inputs is the default


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How weights and activations are stored and computed."""

    kind: str           # of `QuantizedWeight`: int4, int8 or fp8
    grouped: bool       # scales for groups of inputs; False: one scale for each output
    activations: str    # int8 or fp8: engines round each token's activations to it; none: they do not
    format: str         # of compressed-tensors


# All are symmetric. Transformers 5.24 refuses packed zero points unless `dequantize=True`.
SCHEMES = {
    "w4a16": Scheme("int4", True, "none", "pack-quantized"),
    "w8a8": Scheme("int8", False, "int8", "int-quantized"),
    "w4a8": Scheme("int4", True, "int8", "pack-quantized"),
    "fp8": Scheme("fp8", False, "fp8", "float-quantized"),
}


def quantization_config(scheme: Scheme, group_size: int | None, ignore: Sequence[str]) -> dict[str, Any]:
    """The value of quantization_config in config.json. ignore: names of modules that are not quantised."""
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
    """dtype of the scales of a tensor with this dtype: the same, as Transformers expects it."""
    return np.dtype(np.float32) if tensor == np.float64 else tensor


def _arguments(kind: str, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 4 if kind == "int4" else 8,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
    }
