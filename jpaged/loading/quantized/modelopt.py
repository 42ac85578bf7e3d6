"""NVIDIA ModelOpt in fp8: FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO.

weight F8_E4M3[out, in] and weight_scale: one number, one for each output, or [out / 128, 1, in / 128, 1] for blocks.
weight = code * weight_scale. The config is hf_quant_config.json, or quantization_config with quant_method modelopt.
"""

import fnmatch

import numpy as np

from jpaged.loading.quantized.config import Values
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.fp8 import by_output, fp8_codes, scalar_shapes
from jpaged.loading.quantized.parts import FLOATS, Header, Parts

_BLOCK = 128  # outputs and inputs
_BLOCKS = "fp8_pb_wo"
_ALGORITHMS = ("fp8", "fp8_per_channel_per_token", _BLOCKS)


class ModelOpt(Format):
    """ModelOpt's packed matrices in fp8."""

    parts = ("weight_scale", "weight_scale_2")

    def __init__(self, config: Values):
        config = config.inner("quantization") if "quantization" in config else config
        self._algorithm = config.choice("quant_algo", accepted=_ALGORITHMS)
        self._excluded = config.names("exclude_modules", "ignore")

    def excluded(self, module: str) -> str | None:
        found = next((pattern for pattern in self._excluded if fnmatch.fnmatchcase(module, pattern)), None)
        return None if found is None else f"exclude_modules has {found!r}"

    def header(self, parts: Parts) -> Header:
        because = "a matrix of ModelOpt's FP8 has weight and weight_scale"
        outputs, inputs = parts.matrix("weight", because, ("F8_E4M3",))
        if self._algorithm != _BLOCKS:
            shapes = scalar_shapes(outputs)
            scales = parts.check("weight_scale", because, FLOATS, *shapes, meaning="the matrix, or its outputs")
            return Header("weight", (outputs, inputs), "fp8", 8, inputs, scales.dtype, None)
        rows, columns = -(-outputs // _BLOCK), -(-inputs // _BLOCK)
        shapes = ((rows, columns), (rows, 1, columns, 1))
        scales = parts.check("weight_scale", because, FLOATS, *shapes, meaning=f"blocks of {_BLOCK} x {_BLOCK}")
        group = min(_BLOCK, inputs)
        return Header("weight", (outputs, inputs), "fp8", 8, group, scales.dtype, None, block=_BLOCK)

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        return fp8_codes(parts)

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        return by_output(parts.scales("weight_scale"), header)

    def zeros(self, parts: Parts, header: Header) -> None:
        return None
