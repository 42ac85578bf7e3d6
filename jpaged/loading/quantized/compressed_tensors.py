"""compressed-tensors: matrices of integers, of fp8 and of fp4. They stay [out, in].

pack-quantized:       weight_packed I32[out, in * bits / 32]: each row is a stream of codes + 2^(bits - 1).
                      weight_scale [out, groups]. weight_shape I64[2]. weight_g_idx I32[in] with actorder. Not
                      symmetric: weight_zero_point I32[out * bits / 32, groups], a stream down each column, or
                      I8[out, groups].
int-quantized:        weight I8[out, in], weight_scale. Not symmetric: weight_zero_point I8, shaped like weight_scale.
float-quantized:      weight F8_E4M3[out, in], weight_scale.
nvfp4-pack-quantized: weight_packed U8[out, in / 2], weight_scale F8_E4M3[out, in / 16], weight_global_scale F32[1].
mxfp4-pack-quantized: weight_packed U8[out, in / 2], weight_scale U8[out, in / 32].

weight = (code - zero) * scale. In NVFP4, scale = weight_scale / weight_global_scale.
In memory, pack-quantized codes of up to 4 bits and fp4 codes take 4 bits. All other codes take 8. Activations are not
rounded to fp8 or fp4, even if the config says so: this is more exact. Source: compressed-tensors 0.20, compressors/ and
quantization/.
"""

import dataclasses

import numpy as np

from jpaged.loading.quantized import fp4
from jpaged.loading.quantized.config import Matcher, Values, in_text_model, refused
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.fp8 import MATRIX, by_output, fp8_codes, output_shapes
from jpaged.loading.quantized.group_index import check_group_index, order_of
from jpaged.loading.quantized.matrix_tensors import FLOATS, Header, Parts
from jpaged.loading.quantized.packing import WORD, unpack_columns, unpack_rows, words_of
from jpaged.loading.quantized.schemes import FLOAT, FORMATS, MIXED, MXFP4, NVFP4, PACKED, Scheme, read_groups

_STATUSES = ("compressed", "frozen")  # older releases wrote "frozen" for compressed files
# Files do not name a module's class. These modules are embeddings in the families that jpaged supports.
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "embed_positions")
_MIDDLE = 8  # the default zero of int4
_NVFP4 = fp4.Nvfp4(codes="weight_packed", factor="weight_global_scale", divides=True)


class CompressedTensors(Format):
    """Packed matrices of compressed-tensors."""

    parts = (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"
    )  # fmt: skip
    hidden = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")

    def __init__(self, config: Values):
        default = config.choice("format", accepted=(*FORMATS, MIXED), default=MIXED)
        config.choice("quantization_status", accepted=_STATUSES, default=_STATUSES[0])
        for key in ("sparsity_config", "transform_config"):
            if (value := config.get(key)) and (not isinstance(value, dict) or value.get("format") != "dense"):
                raise refused(key, value, "must be empty: sparse and rotated matrices are not supported")
        self._ignore = config.names("ignore")
        self._groups = read_groups(config, default)
        self._matches = Matcher()
        for key, targets in (("ignore", self._ignore), ("config_groups", self._targets())):
            for target in targets:
                if target.startswith("re:"):
                    self._matches(target[3:], "", key)  # raises for an invalid pattern

    def excluded(self, module: str) -> str | None:
        found = next((target for target in self._ignore if self._is_target(target, module, "ignore")), None)
        if found is not None:
            return f"ignore has {found!r}"
        return "no target of config_groups is this module" if self._scheme_of(module) is None else None

    def header(self, parts: Parts) -> Header:
        scheme = self._scheme_of(parts.module)
        assert scheme is not None  # `excluded` was asked first
        if scheme.format == PACKED:
            return _packed_header(parts, scheme)
        if scheme.format == NVFP4:
            return _NVFP4.header(parts, f"a matrix in {NVFP4} has weight_packed, weight_scale and weight_global_scale")
        if scheme.format == MXFP4:
            return fp4.mxfp4_header(parts, f"a matrix in {MXFP4} has weight_packed and weight_scale")
        return _plain_header(parts, scheme)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        scheme = self._scheme_of(module)
        assert scheme is not None  # `excluded` was asked first
        if scheme.format == NVFP4:
            return _NVFP4.declared(shape)
        return fp4.mxfp4_declared(shape) if scheme.format == MXFP4 else _declared(scheme, shape)

    def reorders(self, module: str) -> bool:
        scheme = self._scheme_of(module)
        return scheme is not None and scheme.reorders

    def packs_outside_layers(self, module: str) -> bool:
        return True  # `excluded` asks for a target of config_groups

    def order(self, parts: Parts, header: Header) -> np.ndarray | None:
        return order_of(parts, "weight_g_idx", header)

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        if header.kind == "fp4":
            return fp4.unpacked(parts.array("weight_packed"))
        if header.codes == "weight":
            return fp8_codes(parts) if header.kind == "fp8" else _integers(parts, header)
        if "weight_shape" in parts and (shape := tuple(parts.array("weight_shape").tolist())) != header.shape:
            raise parts.damaged("weight_shape", f"the shape {list(shape)}, but weight_packed has {list(header.shape)}")
        codes = unpack_rows(parts.array("weight_packed"), header.bits, header.shape[1])
        if header.kind == "int4":
            return codes + np.uint8(_MIDDLE - _middle(header))
        return (codes - np.uint8(_middle(header))).view(np.int8)

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        if header.kind == "fp4":
            return _NVFP4.scales(parts) if header.has_outer else fp4.mxfp4_scales(parts)
        return by_output(parts.scales("weight_scale", is_fp8=header.kind == "fp8"), header)

    def outer(self, parts: Parts, header: Header) -> np.ndarray | None:
        return _NVFP4.outer(parts, header) if header.has_outer else None

    def zeros(self, parts: Parts, header: Header) -> np.ndarray | None:
        if "weight_zero_point" not in parts:
            return None
        stored = parts.array("weight_zero_point")
        if stored.dtype == np.int32:
            codes = unpack_columns(stored, header.bits, header.shape[0]).T
            stored = (codes - np.uint8(_middle(header))).view(np.int8)
        elif stored.dtype == np.int8 and (bad := (stored < -_middle(header)) | (stored >= _middle(header))).any():
            raise parts.damaged("weight_zero_point", f"a zero of {stored[bad][0]}, beyond {header.bits} bits")
        if header.zeros is None:  # older releases stored the zeros of symmetric codes, all of them 0
            if stored.astype(np.float32).any():
                raise parts.damaged("weight_zero_point", "a zero that is not 0, but the config says symmetric=true")
            return None
        signed = by_output(stored, header)
        return signed if header.kind == "int8" else (signed + np.int8(_MIDDLE)).astype(header.zeros)

    def _targets(self) -> list[str]:
        return [target for group in self._groups for target in group.targets]

    def _scheme_of(self, module: str) -> Scheme | None:
        """The scheme of the most specific target: a name, then a regular expression, then a class of modules."""
        found = [
            (_rank(target), group.scheme)
            for group in self._groups for target in group.targets if self._is_target(target, module, "config_groups")
        ]  # fmt: skip
        return min(found, key=lambda item: item[0])[1] if found else None

    def _is_target(self, target: str, module: str, key: str) -> bool:
        """Return True if a name, "re:" and a regular expression, or a class of modules names the module."""
        if target.startswith("re:"):
            return self._matches(target[3:], module, key)
        is_embedding = module.rpartition(".")[2] in _EMBEDDINGS
        return in_text_model(target) == in_text_model(module) or target == ("Embedding" if is_embedding else "Linear")


def _rank(target: str) -> int:
    return 1 if target.startswith("re:") else 0 if "." in target else 2


def _middle(header: Header) -> int:
    """The stored code of the signed code 0."""
    return 2 ** (header.bits - 1)


def _packed_header(parts: Parts, scheme: Scheme) -> Header:
    because = "a pack-quantized matrix has weight_packed, weight_scale and weight_shape"
    outputs, words = parts.matrix("weight_packed", because, ("I32",))
    parts.check("weight_shape", because, ("I64", "I32"), (2,), meaning="out, in")
    inputs = words * WORD // scheme.bits
    if scheme.strategy == "group":
        _, groups = parts.matrix("weight_scale", because, FLOATS)
        inputs = min(inputs, groups * (scheme.group_size or inputs))
        if words_of(inputs, scheme.bits) != words:
            raise parts.wrong(
                "weight_scale",
                f"{' or '.join(FLOATS)}[out, in / {scheme.group_size}], to fit weight_packed I32[out, {words}], whose "
                f"codes of {scheme.bits} bits have no padding between them",
            )
    header = _header(parts, scheme, because, (outputs, inputs))
    shape = (words_of(outputs, scheme.bits), header.stored_groups)
    _check_zeros(parts, scheme, {"I32": (shape,), "I8": ((outputs, header.stored_groups),)})
    _check_order(parts, scheme, header)
    return header


def _plain_header(parts: Parts, scheme: Scheme) -> Header:
    because = f"a {scheme.format} matrix has weight and weight_scale"
    is_float = scheme.format == FLOAT
    shape = parts.matrix("weight", because, ("F8_E4M3",) if is_float else ("I8",))
    header = _header(parts, scheme, because, shape)
    dtype = "F8_E4M3" if is_float else "I8"
    _check_zeros(parts, scheme, {dtype: (parts.entry("weight_scale", because).shape,)})
    _check_order(parts, scheme, header)
    return header


def _declared(scheme: Scheme, shape: tuple[int, int]) -> Header:
    kind = "fp8" if scheme.format == FLOAT else "int4" if scheme.format == PACKED and scheme.bits <= 4 else "int8"
    group, block = shape[1], 1
    if scheme.strategy == "group":
        group = min(scheme.group_size or group, group)
    elif scheme.block is not None:
        block, group = scheme.block[0], min(scheme.block[1], group)
    zeros = None if scheme.symmetric else np.dtype(np.uint8 if kind == "int4" else np.int8)
    codes = "weight_packed" if scheme.format == PACKED else "weight"
    return Header(codes, shape, kind, scheme.bits, group, "BF16", zeros, scheme.activations, block)


def _header(parts: Parts, scheme: Scheme, because: str, shape: tuple[int, int]) -> Header:
    header, outputs = _declared(scheme, shape), shape[0]
    shapes = MATRIX if scheme.strategy == "tensor" else output_shapes(outputs)
    if scheme.strategy in ("group", "block"):
        shapes = ((-(-outputs // header.block), header.stored_groups),)
    scales = parts.check("weight_scale", because, FLOATS, *shapes, meaning=f"strategy {scheme.strategy}").dtype
    return dataclasses.replace(header, scales=scales)


def _check_order(parts: Parts, scheme: Scheme, header: Header) -> None:
    check_group_index(parts, "weight_g_idx", header, "actorder is group" if scheme.reorders else None)


def _check_zeros(parts: Parts, scheme: Scheme, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    """Check the header of the zeros. They are optional if the codes are symmetric."""
    if scheme.symmetric and "weight_zero_point" not in parts:
        return
    because = "its config group says symmetric=false"
    entry = parts.entry("weight_zero_point", because)
    options = [(dtype, shape) for dtype, found in shapes.items() for shape in found]
    if (entry.dtype, entry.shape) not in options:
        raise parts.wrong("weight_zero_point", " or ".join(f"{dtype}{list(shape)}" for dtype, shape in options))


def _integers(parts: Parts, header: Header) -> np.ndarray:
    """The part "weight". Raises ModelLoadError if a code has more bits than the config says."""
    codes = parts.array("weight")
    low, high = -(2 ** (header.bits - 1)), 2 ** (header.bits - 1) - 1
    if header.bits < 8 and (bad := (codes < low) | (codes > high)).any():
        raise parts.damaged("weight", f"a code of {codes[bad][0]} (num_bits {header.bits} goes from {low} to {high})")
    return codes
