"""Matrices in fp8 (e4m3fn) that stay [out, in]: scales for blocks, for outputs or for the whole matrix.

Method fp8 (Transformers, DeepSeek, Qwen): weight F8_E4M3[out, in] and weight_scale_inv [out / 128, in / 128], or
weight_scale of one number or of [out, 1]. In spite of the name, weight = code * weight_scale_inv.

DeepSeek V4's release names it scale, and stores powers of two (E8M0). With expert_dtype fp4, its routed experts are in
MXFP4: weight I8[out, in / 2] and scale F8_E8M0[out, in / 32]. Source: fine-grained fp8 of Transformers 5.24.
"""

import dataclasses
import re

import ml_dtypes
import numpy as np

from jpaged.loading.quantized import fp4
from jpaged.loading.quantized.config import Values, in_text_model, part_of, refused
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.matrix_tensors import FLOATS, Header, Parts

_E8M0 = "F8_E8M0"
_SCALES = (*FLOATS, _E8M0)
_OF_EXPERT = re.compile(r"(.*\.)?experts\.\d+\..*")  # modules of routed experts


MATRIX = ((), (1,), (1, 1))  # shapes of the scale of a whole matrix


def output_shapes(outputs: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of one scale for each output."""
    return (outputs,), (outputs, 1)


def fp8_codes(parts: Parts) -> np.ndarray:
    """The part "weight". Raises ModelLoadError if a code is NaN."""
    codes = parts.array("weight")
    if ((codes.view(np.uint8) & 0x7F) == 0x7F).any():
        raise parts.damaged("weight", "a code that means NaN")
    return codes


def by_output(scales: np.ndarray, header: Header) -> np.ndarray:
    """Return scales of blocks, of outputs or of the matrix as [out, groups in the file]."""
    outputs = header.shape[0]
    if scales.size == 1:
        return np.full((outputs, 1), scales.reshape(()))
    if scales.size == outputs and header.stored_groups == 1 and header.block == 1:
        return scales.reshape(outputs, 1)
    rows = scales.reshape(-1, header.stored_groups)
    return rows[np.arange(outputs) // header.block]


class Fp8(Format):
    """Packed matrices of the method fp8."""

    parts = ("weight_scale_inv", "weight_scale")
    hidden = ("input_scale", "activation_scale", "scale")  # scale: a part if there is no other one

    def __init__(self, config: Values):
        config.choice("activation_scheme", accepted=("dynamic", "static"), default="dynamic")
        config.choice("fmt", accepted=("e4m3", "float8_e4m3fn"), default="e4m3")
        self._fp4_experts = config.choice("expert_dtype", accepted=("fp8", "fp4"), default="fp8") == "fp4"
        self._block = config.get("weight_block_size")
        valid = isinstance(self._block, (list, tuple)) and len(self._block) == 2
        if self._block is not None and not (valid and all(type(n) is int and 0 < n < 2**31 for n in self._block)):
            raise refused("weight_block_size", self._block, "must be [outputs, inputs] of a block, or null")
        self._excluded = frozenset(map(in_text_model, config.names("modules_to_not_convert", "ignored_layers")))

    def excluded(self, module: str) -> str | None:
        found = part_of(self._excluded, in_text_model(module))
        return None if found is None else f"modules_to_not_convert has {found!r}"

    def header(self, parts: Parts) -> Header:
        part = self._scales_of(parts)
        because = f"a matrix of the method fp8 has weight and {part}"
        in_fp4 = _OF_EXPERT.fullmatch(parts.module) and parts.entry("weight", because).dtype == "I8"
        if in_fp4:
            return fp4.mxfp4_in_bytes(parts, "weight", part, because)
        outputs, inputs = parts.matrix("weight", because, ("F8_E4M3",))
        header = self._of_fp8((outputs, inputs))
        if self._block is None:
            scales = parts.check(
                part, because, _SCALES, *MATRIX, *output_shapes(outputs), meaning="the matrix, or its outputs"
            )  # fmt: skip
        else:
            rows, columns = self._block
            meaning = f"blocks of {rows} outputs and {columns} inputs"
            scales = parts.check(part, because, _SCALES, (-(-outputs // rows), -(-inputs // columns)), meaning=meaning)
        parts.refuse_more(("scale",))
        # as for MXFP4, bfloat16 has all powers of two, and every back end converts it
        return dataclasses.replace(header, scales="BF16" if scales.dtype == _E8M0 else scales.dtype)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        if self._fp4_experts and _OF_EXPERT.fullmatch(module):
            return fp4.mxfp4_declared(shape, codes="weight")
        return self._of_fp8(shape)

    def _of_fp8(self, shape: tuple[int, int]) -> Header:
        rows, columns = self._block or (1, shape[1])
        scales = "BF16" if self._fp4_experts else "F32"  # checkpoints with experts in fp4 have scales in E8M0
        return Header("weight", shape, "fp8", 8, min(columns, shape[1]), scales, None, block=rows)

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        return fp8_codes(parts) if header.kind == "fp8" else fp4.unpacked(parts.array("weight").view(np.uint8))

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        part = self._scales_of(parts)
        if header.kind == "fp4":
            return fp4.mxfp4_scales(parts, part)
        scales = parts.scales(part, is_fp8=True)
        if scales.dtype == ml_dtypes.float8_e8m0fnu:
            scales = scales.astype(ml_dtypes.bfloat16)
        return by_output(scales, header)

    def zeros(self, parts: Parts, header: Header) -> None:
        return None

    def _scales_of(self, parts: Parts) -> str:
        if "scale" in parts and not any(part in parts for part in self.parts):
            return "scale"
        if "weight_scale" in parts and "weight_scale_inv" not in parts:
            return "weight_scale"
        return "weight_scale" if self._block is None and "weight_scale_inv" not in parts else "weight_scale_inv"
