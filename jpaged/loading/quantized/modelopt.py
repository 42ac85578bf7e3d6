"""NVIDIA ModelOpt: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, and MIXED_PRECISION of these.

fp8:   weight F8_E4M3[out, in] and weight_scale: one number, one for each output, or [out / 128, 1, in / 128, 1] for
       blocks. weight = code * weight_scale.
NVFP4: weight U8[out, in / 2], weight_scale F8_E4M3[out, in / 16] and weight_scale_2 F32, one number.
       weight = code * (weight_scale * weight_scale_2).

MIXED_PRECISION: `quantized_layers` has the algorithm of each packed module, or of all modules below a name.

Activations are not rounded, so nothing reads input_scale. The config is hf_quant_config.json, or quantization_config
with quant_method modelopt. Source: nvidia-modelopt 0.47, torch/export/ and torch/quantization/qtensor/.
"""

import dataclasses
import fnmatch

import numpy as np

from jpaged.loading.quantized.config import Values, in_text_model, refused
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.fp4 import NVFP4_GROUP, Nvfp4, unpacked
from jpaged.loading.quantized.fp8 import MATRIX, by_output, fp8_codes, output_shapes
from jpaged.loading.quantized.matrix_tensors import FLOATS, Header, Parts

_BLOCK = 128  # outputs and inputs
_BLOCKS = "fp8_pb_wo"
_FP4_ALGORITHMS = ("nvfp4", "w4a16_nvfp4")
_ALGORITHMS = ("fp8", "fp8_per_channel_per_token", _BLOCKS, *_FP4_ALGORITHMS)
_MIXED, _LAYERS = "mixed_precision", "quantized_layers"
_NVFP4 = Nvfp4(codes="weight", factor="weight_scale_2", divides=False)


class ModelOpt(Format):
    """ModelOpt's packed matrices."""

    parts = ("weight_scale", "weight_scale_2")

    def __init__(self, config: Values):
        config = config.inner("quantization") if "quantization" in config else config
        whole = config.choice("quant_algo", accepted=(*_ALGORITHMS, _MIXED))
        if whole != _MIXED:
            self._by_module = {"": _algorithm(config)}
        elif _LAYERS in config:
            named = config.inner(_LAYERS).items()
            self._by_module = {in_text_model(name): _algorithm(values) for name, values in named}
        else:
            raise refused(_LAYERS, None, "must have the quant_algo of each packed module in MIXED_PRECISION")
        self._excluded = tuple(map(in_text_model, config.names("exclude_modules", "ignore")))

    def excluded(self, module: str) -> str | None:
        name = in_text_model(module)
        found = next((pattern for pattern in self._excluded if fnmatch.fnmatchcase(name, pattern)), None)
        if found is not None:
            return f"exclude_modules has {found!r}"
        return None if self._algorithm_of(module) is not None else f"{_LAYERS} does not name it"

    def header(self, parts: Parts) -> Header:
        algorithm = self._algorithm_of(parts.module)
        if algorithm in _FP4_ALGORITHMS:
            return _NVFP4.header(parts, "a matrix of ModelOpt's NVFP4 has weight, weight_scale and weight_scale_2")
        because = "a matrix of ModelOpt's FP8 has weight and weight_scale"
        outputs, inputs = parts.matrix("weight", because, ("F8_E4M3",))
        if algorithm == "fp8":
            shapes, meaning = MATRIX, "the matrix"
        elif algorithm != _BLOCKS:
            shapes, meaning = output_shapes(outputs), "out"
        else:
            rows, columns = -(-outputs // _BLOCK), -(-inputs // _BLOCK)
            shapes, meaning = ((rows, columns), (rows, 1, columns, 1)), f"blocks of {_BLOCK} x {_BLOCK}"
        scales = parts.check("weight_scale", because, FLOATS, *shapes, meaning=meaning)
        return dataclasses.replace(self.declared(parts.module, (outputs, inputs)), scales=scales.dtype)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        algorithm = self._algorithm_of(module)
        if algorithm in _FP4_ALGORITHMS:
            return _NVFP4.declared(shape)
        if algorithm != _BLOCKS:
            return Header("weight", shape, "fp8", 8, shape[1], "F32", None)
        return Header("weight", shape, "fp8", 8, min(_BLOCK, shape[1]), "F32", None, block=_BLOCK)

    def packs_outside_layers(self, module: str) -> bool:
        return module.rpartition(".")[2] == "lm_head"

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        return unpacked(parts.array("weight")) if header.kind == "fp4" else fp8_codes(parts)

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        if header.kind == "fp4":
            return _NVFP4.scales(parts)
        return by_output(parts.scales("weight_scale", is_fp8=True), header)

    def outer(self, parts: Parts, header: Header) -> np.ndarray | None:
        return _NVFP4.outer(parts, header) if header.kind == "fp4" else None

    def zeros(self, parts: Parts, header: Header) -> None:
        return None

    def _algorithm_of(self, module: str) -> str | None:
        """The algorithm of a module, or of the nearest module around it; None: it is not packed."""
        name = in_text_model(module)
        while name and name not in self._by_module:
            name = name.rpartition(".")[0]
        return self._by_module.get(name)


def _algorithm(config: Values) -> str:
    """The algorithm in a part of the config. Raises ModelLoadError for others, and for other groups."""
    found = config.choice("quant_algo", accepted=_ALGORITHMS)
    if found in _FP4_ALGORITHMS:
        config.choice("group_size", accepted=(NVFP4_GROUP,), default=NVFP4_GROUP)
    return found
