"""NVIDIA ModelOpt: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4 and W4A16_NVFP4.

fp8:   weight F8_E4M3[out, in] and weight_scale: one number, one for each output, or [out / 128, 1, in / 128, 1] for
       blocks. weight = code * weight_scale.
NVFP4: weight U8[out, in / 2], weight_scale F8_E4M3[out, in / 16] and weight_scale_2 F32, one number.
       weight = code * (weight_scale * weight_scale_2).

Activations are not rounded, so nothing reads input_scale. The config is hf_quant_config.json, or quantization_config
with quant_method modelopt. Source: nvidia-modelopt 0.47, torch/export/ and torch/quantization/qtensor/.
"""

import dataclasses
import fnmatch

import numpy as np

from jpaged.loading.quantized.config import Values
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.fp4 import NVFP4_GROUP, Nvfp4, unpacked
from jpaged.loading.quantized.fp8 import MATRIX, by_output, fp8_codes, output_shapes
from jpaged.loading.quantized.matrix_tensors import FLOATS, Header, Parts

_BLOCK = 128  # outputs and inputs
_BLOCKS = "fp8_pb_wo"
_FP4_ALGORITHMS = ("nvfp4", "w4a16_nvfp4")
_ALGORITHMS = ("fp8", "fp8_per_channel_per_token", _BLOCKS, *_FP4_ALGORITHMS)
_NVFP4 = Nvfp4(codes="weight", factor="weight_scale_2", divides=False)


class ModelOpt(Format):
    """ModelOpt's packed matrices."""

    parts = ("weight_scale", "weight_scale_2")

    def __init__(self, config: Values):
        config = config.inner("quantization") if "quantization" in config else config
        self._algorithm = config.choice("quant_algo", accepted=_ALGORITHMS)
        self._is_fp4 = self._algorithm in _FP4_ALGORITHMS
        if self._is_fp4:
            config.choice("group_size", accepted=(NVFP4_GROUP,), default=NVFP4_GROUP)
        self._excluded = config.names("exclude_modules", "ignore")

    def excluded(self, module: str) -> str | None:
        found = next((pattern for pattern in self._excluded if fnmatch.fnmatchcase(module, pattern)), None)
        return None if found is None else f"exclude_modules has {found!r}"

    def header(self, parts: Parts) -> Header:
        if self._is_fp4:
            return _NVFP4.header(parts, "a matrix of ModelOpt's NVFP4 has weight, weight_scale and weight_scale_2")
        because = "a matrix of ModelOpt's FP8 has weight and weight_scale"
        outputs, inputs = parts.matrix("weight", because, ("F8_E4M3",))
        if self._algorithm == "fp8":
            shapes, meaning = MATRIX, "the matrix"
        elif self._algorithm != _BLOCKS:
            shapes, meaning = output_shapes(outputs), "out"
        else:
            rows, columns = -(-outputs // _BLOCK), -(-inputs // _BLOCK)
            shapes, meaning = ((rows, columns), (rows, 1, columns, 1)), f"blocks of {_BLOCK} x {_BLOCK}"
        scales = parts.check("weight_scale", because, FLOATS, *shapes, meaning=meaning)
        return dataclasses.replace(self.declared(parts.module, (outputs, inputs)), scales=scales.dtype)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        if self._is_fp4:
            return _NVFP4.declared(shape)
        if self._algorithm != _BLOCKS:
            return Header("weight", shape, "fp8", 8, shape[1], "F32", None)
        return Header("weight", shape, "fp8", 8, min(_BLOCK, shape[1]), "F32", None, block=_BLOCK)

    def packs_outside_layers(self, module: str) -> bool:
        return module.rpartition(".")[2] == "lm_head"

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        return unpacked(parts.array("weight")) if self._is_fp4 else fp8_codes(parts)

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        return _NVFP4.scales(parts) if self._is_fp4 else by_output(parts.scales("weight_scale", is_fp8=True), header)

    def outer(self, parts: Parts, header: Header) -> np.ndarray | None:
        return _NVFP4.outer(parts, header) if self._is_fp4 else None

    def zeros(self, parts: Parts, header: Header) -> None:
        return None
