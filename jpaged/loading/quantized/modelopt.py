"""NVIDIA ModelOpt in fp8: FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO.

weight F8_E4M3[out, in] and weight_scale: one number, one for each output, or [out / 128, 1, in / 128, 1] for blocks.
weight = code * weight_scale. The config is hf_quant_config.json, or quantization_config with quant_method modelopt.
"""

import dataclasses
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
            shapes, meaning = scalar_shapes(outputs), "the matrix, or its outputs"
        else:
            rows, columns = -(-outputs // _BLOCK), -(-inputs // _BLOCK)
            shapes, meaning = ((rows, columns), (rows, 1, columns, 1)), f"blocks of {_BLOCK} x {_BLOCK}"
        scales = parts.check("weight_scale", because, FLOATS, *shapes, meaning=meaning)
        return dataclasses.replace(self.declared(parts.module, (outputs, inputs)), scales=scales.dtype)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        if self._algorithm != _BLOCKS:
            return Header("weight", shape, "fp8", 8, shape[1], "F32", None)
        return Header("weight", shape, "fp8", 8, min(_BLOCK, shape[1]), "F32", None, block=_BLOCK)

    def packs_outside_layers(self, module: str) -> bool:
        return module.rpartition(".")[2] == "lm_head"

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        return fp8_codes(parts)

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        return by_output(parts.scales("weight_scale"), header)

    def zeros(self, parts: Parts, header: Header) -> None:
        return None
