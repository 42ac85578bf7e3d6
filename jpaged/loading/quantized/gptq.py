"""GPTQ, formats gptq (v1) and gptq_v2, with 2, 3, 4 and 8 bits.

Files are [in, out]. qweight I32[in * bits / 32, out] is a stream of bits down each column, qzeros
I32[groups, out * bits / 32] one along each row, scales [groups, out], g_idx I32[in] the group of each input.
weight = (code - zero) * scale. v1 stores zero - 1. Source: GPTQModel 7.7, nn_modules/qlinear/__init__.py.

In memory, codes of 2 and 3 bits have 4 bits. Codes of 8 bits become signed: code and zero are reduced by 128.
"""

import dataclasses

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.quantized.config import Matcher, Values, refused
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.group_index import check_group_index, order_of
from jpaged.loading.quantized.matrix_tensors import FLOATS, Header, Parts
from jpaged.loading.quantized.packing import WORD, unpack_columns, unpack_rows, words_of

_HEAD = "lm_head"
_BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class _Scheme:
    bits: int
    group_size: int | None
    symmetric: bool


class Gptq(Format):
    """GPTQ's packed matrices."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Values):
        version = config.choice(
            "checkpoint_format", "format", accepted=("gptq", "gptq_v2"), default="gptq",
            remedy="save it in the format gptq with GPTQModel, or use another checkpoint of the model",
        )  # fmt: skip
        self._offset = int(version == "gptq")
        config.choice("pack_dtype", accepted=("int32",), default="int32")
        if config.flag("is_marlin_format", False):
            raise refused("is_marlin_format", True, "must be false", "use a checkpoint in the format gptq")
        self._scheme = _scheme(config, _Scheme(0, 128, True))
        self._reorders = config.flag("desc_act", False)
        self._has_head = config.flag(_HEAD, False)
        self._matches = Matcher()
        self._overrides: list[tuple[str, _Scheme | None]] = []  # pattern; None: not packed
        for pattern, values in config.inner("dynamic").items():
            excludes = pattern.startswith("-:")
            plain = pattern[2:] if pattern.startswith(("-:", "+:")) else pattern
            self._matches(plain, "", "dynamic")  # raises for an invalid pattern
            self._overrides.append((plain, None if excludes else _scheme(values, self._scheme)))

    def excluded(self, module: str) -> str | None:
        found = self._override(module)
        if found is not None and found[1] is None:
            return f"dynamic has '-:{found[0]}'"
        is_head = module.rpartition(".")[2] == _HEAD
        return f"{_HEAD} is false" if is_head and not self._has_head and found is None else None

    def header(self, parts: Parts) -> Header:
        because = "a GPTQ matrix has qweight, qzeros and scales"
        scheme = self._scheme_of(parts.module)
        rows, outputs = parts.matrix("qweight", because, ("I32",))
        if rows * WORD % scheme.bits:
            raise parts.wrong("qweight", f"I32[in * {scheme.bits} / {WORD}, out]")
        inputs = rows * WORD // scheme.bits
        header = self.declared(parts.module, (outputs, inputs))
        groups = header.stored_groups
        words = words_of(outputs, scheme.bits)
        parts.check("qzeros", because, ("I32",), (groups, words), meaning=f"groups, out * {scheme.bits} / {WORD}")
        scales = parts.check("scales", because, FLOATS, (groups, outputs), meaning="groups, out").dtype
        check_group_index(parts, "g_idx", header, "desc_act is true" if self._reorders else None)
        return dataclasses.replace(header, scales=scales)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        scheme = self._scheme_of(module)
        kind = "int8" if scheme.bits == 8 else "int4"
        # Symmetric codes have the kinds' default zero, in the middle of the range: 8 with 4 bits, and 0 with 8 bits.
        if scheme.symmetric and scheme.bits in (4, 8):
            zeros = None
        elif scheme.bits == 8:
            zeros = np.dtype(np.int16 if self._offset else np.int8)  # v1 has zeros up to 255 + 1 - 128
        else:
            zeros = np.dtype(np.uint8)
        group = min(scheme.group_size or shape[1], shape[1])
        return Header("qweight", shape, kind, scheme.bits, group, "F16", zeros)

    def reorders(self, module: str) -> bool:
        return self._reorders and self._scheme_of(module).group_size is not None

    def packs_outside_layers(self, module: str) -> bool:
        return module.rpartition(".")[2] == _HEAD

    def order(self, parts: Parts, header: Header) -> np.ndarray | None:
        return order_of(parts, "g_idx", header)

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        codes = unpack_columns(parts.array("qweight"), header.bits, header.shape[1])
        return (codes ^ 128).view(np.int8) if header.bits == 8 else codes

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        return parts.scales("scales").T

    def zeros(self, parts: Parts, header: Header) -> np.ndarray | None:
        stored = unpack_rows(parts.array("qzeros"), header.bits, header.shape[0]).T
        zeros = stored.astype(np.int16) + self._offset
        if header.zeros is not None:
            return (zeros - 128 if header.bits == 8 else zeros).astype(header.zeros)
        middle = 2 ** (header.bits - 1)
        if (bad := zeros != middle).any():
            raise ModelLoadError(
                f"{parts.path()}: {parts.name('qzeros')} has a zero of {zeros[bad][0]}, but quantization_config says "
                f"sym=true, where every zero is {middle}: set sym to false in config.json"
            )
        return None

    def _scheme_of(self, module: str) -> _Scheme:
        found = self._override(module)
        return self._scheme if found is None or found[1] is None else found[1]

    def _override(self, module: str) -> tuple[str, _Scheme | None] | None:
        return next((item for item in self._overrides if self._matches(item[0], module, "dynamic")), None)


def _scheme(values: Values, default: _Scheme) -> _Scheme:
    bits = values.choice("bits", accepted=_BITS, default=default.bits or None)
    size = values.group_size("group_size", default=default.group_size or -1)
    return _Scheme(bits, size, values.flag("sym", default.symmetric))
