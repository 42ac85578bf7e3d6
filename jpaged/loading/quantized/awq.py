"""AWQ, version gemm: 4 bits, zeros for each group.

Files are [in, out]. qweight I32[in, out / 8] and qzeros I32[groups, out / 8] hold eight neighbouring outputs a word;
bits 4 * i to 4 * i + 3 of a word are its output _ORDER[i]. scales [groups, out].
weight = (code - zero) * scale. Source: AutoAWQ 0.2.9, awq/utils/packing_utils.py.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, UInt8

from jpaged.loading.quantized.config import Values, in_text_model, part_of, refused
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.matrix_tensors import FLOATS, Header, Parts

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS, _IN_WORD = 4, 8


class Awq(Format):
    """AWQ's packed matrices."""

    parts = ("qweight", "qzeros", "scales")

    def __init__(self, config: Values):
        config.choice(
            "version", "format", accepted=("gemm",), default="gemm",
            remedy="convert it with AutoAWQ to version gemm, or use a gemm checkpoint of the model",
        )  # fmt: skip
        config.choice("bits", "w_bit", accepted=(_BITS,), default=_BITS)
        config.choice("zero_point", accepted=(True,), default=True)
        self._group_size = config.group_size("group_size", "q_group_size", default=128)
        self._excluded = frozenset(map(in_text_model, config.names("modules_to_not_convert")))

    def excluded(self, module: str) -> str | None:
        found = part_of(self._excluded, in_text_model(module))
        return None if found is None else f"modules_to_not_convert has {found!r}"

    def header(self, parts: Parts) -> Header:
        because = "an AWQ matrix has qweight, qzeros and scales"
        inputs, words = parts.matrix("qweight", because, ("I32",))
        header = self.declared(parts.module, (words * _IN_WORD, inputs))
        groups = header.stored_groups
        parts.check("qzeros", because, ("I32",), (groups, words), meaning="groups, out / 8")
        scales = parts.check("scales", because, FLOATS, (groups, header.shape[0]), meaning="groups, out").dtype
        return dataclasses.replace(header, scales=scales)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        group = self._group_size or shape[1]
        if shape[1] % group:
            raise refused("group_size", group, f"must divide the {shape[1]} inputs of {module}.qweight")
        return Header("qweight", shape, "int4", _BITS, group, "F16", np.dtype(np.uint8))

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        return _unpack(parts.array("qweight"))

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        return parts.scales("scales").T

    def zeros(self, parts: Parts, header: Header) -> np.ndarray:
        return _unpack(parts.array("qzeros"))


def _unpack(words: Int[np.ndarray, "rows words"]) -> UInt8[np.ndarray, "out rows"]:
    by_word = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((len(by_word), _IN_WORD, by_word.shape[1]), np.uint8)
    for i, output in enumerate(_ORDER):
        codes[:, output] = by_word >> np.uint32(_BITS * i) & np.uint32(2**_BITS - 1)
    return codes.reshape(-1, by_word.shape[1])
