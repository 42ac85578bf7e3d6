"""compressed-tensors: pack-quantized (4 and 8 bits), int-quantized and float-quantized. Matrices stay [out, in].

pack-quantized:  weight_packed I32[out, in * bits / 32], a stream of bits along each row, of the signed codes plus
                 2^(bits - 1). weight_scale [out, groups]. weight_zero_point I32[out * bits / 32, groups], a stream down
                 each column, if not symmetric. weight_shape I64[2]. weight_g_idx I32[in] with actorder.
int-quantized:   weight I8[out, in], weight_scale, and weight_zero_point I8 of the same shape if not symmetric.
float-quantized: weight F8_E4M3[out, in], weight_scale.

weight = (code - zero) * scale. Source: compressed-tensors 0.20, compressors/ and quantization/.
"""

import dataclasses

import numpy as np

from jpaged.loading.quantized.config import Values, matches, refused
from jpaged.loading.quantized.formats import Format
from jpaged.loading.quantized.fp8 import by_output, fp8_codes, scalar_shapes
from jpaged.loading.quantized.group_index import check_group_index, order_of
from jpaged.loading.quantized.packing import WORD, unpack_columns, unpack_rows, words_of
from jpaged.loading.quantized.parts import FLOATS, Header, Parts

_PACKED, _INT, _FLOAT, _NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
_MIXED = "mixed-precision"  # every group names its own format
_FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE)
_STRATEGIES = ("tensor", "channel", "group", "block")
_STATUSES = ("compressed", "frozen")  # older releases wrote "frozen" for compressed files
# Files do not tell the class of a module. These are the embeddings of the families that jpaged has.
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "embed_positions")
_SIGN = 128  # of a code of 8 bits


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """One of config_groups."""

    name: str
    targets: tuple[str, ...]
    format: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    activations: str
    reorders: bool  # there is a weight_g_idx


class CompressedTensors(Format):
    """Packed matrices of compressed-tensors."""

    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    hidden = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")

    def __init__(self, config: Values):
        default = config.choice("format", accepted=(*_FORMATS, _MIXED), default=_MIXED)
        config.choice("quantization_status", accepted=_STATUSES, default=_STATUSES[0])
        for key in ("sparsity_config", "transform_config"):
            if (value := config.get(key)) and (not isinstance(value, dict) or value.get("format") != "dense"):
                raise refused(key, value, "must be empty: sparse and rotated matrices are not supported")
        self._ignore = config.names("ignore")
        self._schemes = [_scheme(name, values, default) for name, values in config.inner("config_groups").items()]
        for target in (*self._ignore, *(t for scheme in self._schemes for t in scheme.targets)):
            if target.startswith("re:"):
                matches(target[3:], "", "config_groups")  # raises for an invalid pattern

    def excluded(self, module: str) -> str | None:
        found = next((target for target in self._ignore if _is_target(target, module)), None)
        if found is not None:
            return f"ignore has {found!r}"
        return "no target of config_groups is this module" if self._scheme_of(module) is None else None

    def header(self, parts: Parts) -> Header:
        scheme = self._scheme_of(parts.module)
        assert scheme is not None  # `excluded` was asked first
        return _packed_header(parts, scheme) if scheme.format == _PACKED else _plain_header(parts, scheme)

    def declared(self, module: str, shape: tuple[int, int]) -> Header:
        scheme = self._scheme_of(module)
        assert scheme is not None  # `excluded` was asked first
        return _declared(scheme, shape)

    def reorders(self, module: str) -> bool:
        scheme = self._scheme_of(module)
        return scheme is not None and scheme.reorders

    def packs_outside_layers(self, module: str) -> bool:
        return True  # `excluded` asks for a target of config_groups

    def order(self, parts: Parts, header: Header) -> np.ndarray | None:
        return order_of(parts, "weight_g_idx", header)

    def codes(self, parts: Parts, header: Header) -> np.ndarray:
        if header.codes == "weight":
            return fp8_codes(parts) if header.kind == "fp8" else _integers(parts, header)
        if "weight_shape" in parts and (shape := tuple(parts.array("weight_shape").tolist())) != header.shape:
            raise parts.damaged("weight_shape", f"the shape {list(shape)}, but weight_packed has {list(header.shape)}")
        codes = unpack_rows(parts.array("weight_packed"), header.bits, header.shape[1])
        return (codes ^ _SIGN).view(np.int8) if header.bits == 8 else codes

    def scales(self, parts: Parts, header: Header) -> np.ndarray:
        return by_output(parts.scales("weight_scale"), header)

    def zeros(self, parts: Parts, header: Header) -> np.ndarray | None:
        if "weight_zero_point" not in parts:
            return None
        stored = parts.array("weight_zero_point")
        if stored.dtype == np.int32:
            stored = unpack_columns(stored, header.bits, header.shape[0]).T
            stored = (stored ^ _SIGN).view(np.int8) if header.bits == 8 else stored.astype(np.int8) - 8
        if header.zeros is None:  # older releases stored the zeros of symmetric codes, which are all 0
            if stored.astype(np.float32).any():
                raise parts.damaged("weight_zero_point", "a zero that is not 0, but the config says symmetric=true")
            return None
        signed = by_output(stored, header)
        return signed if header.kind == "int8" else (signed + 8).astype(header.zeros)

    def _scheme_of(self, module: str) -> _Scheme | None:
        """The scheme of the most specific target: a name, then a regular expression, then a class of modules."""
        found = [(_rank(t), s) for s in self._schemes for t in s.targets if _is_target(t, module)]
        return min(found, key=lambda item: item[0])[1] if found else None


def _rank(target: str) -> int:
    return 1 if target.startswith("re:") else 0 if "." in target else 2


def _is_target(target: str, module: str) -> bool:
    """Return True if a name, "re:" and a regular expression, or a class of modules names the module."""
    if target.startswith("re:"):
        return matches(target[3:], module, "config_groups")
    is_embedding = module.rpartition(".")[2] in _EMBEDDINGS
    return target == module or target == ("Embedding" if is_embedding else "Linear")


def _scheme(name: str, values: Values, default: str) -> _Scheme:
    weights = values.inner("weights")
    form = values.choice("format", accepted=_FORMATS, default=default)
    kind = weights.choice("type", accepted=("int", "float"), default="int")
    if form == _NAIVE:
        form = _INT if kind == "int" else _FLOAT
    if (kind == "float") != (form == _FLOAT):
        raise refused(f"config_groups.{name}.format", form, f"does not fit weights of the type {kind}")
    bits = weights.choice("num_bits", accepted=(8,) if kind == "float" else (4, 8), default=8)
    size = weights.group_size("group_size", default=-1)
    strategy = weights.choice("strategy", accepted=_STRATEGIES, default=_inferred_strategy(weights, size))
    block = weights.get("block_structure")
    if strategy == "block":
        valid = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        if not valid or form == _PACKED:
            key = f"config_groups.{name}.weights.block_structure"
            raise refused(key, block, "must be [outputs, inputs] of a block of int-quantized or float-quantized")
    if strategy == "group" and size is None:
        raise refused(f"config_groups.{name}.weights.group_size", size, "must be a number with the strategy group")
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise refused(f"config_groups.{name}.weights.symmetric", symmetric, "must be true with the type float")
    return _Scheme(
        name, values.names("targets"), form, bits, strategy, size, tuple(block) if strategy == "block" else None,
        symmetric, _activations(values, kind), weights.get("actorder") in (True, "group"),
    )  # fmt: skip


def _inferred_strategy(weights: Values, size: int | None) -> str:
    if "block_structure" in weights:
        return "block"
    if size is not None:
        return "group"
    return "channel" if "group_size" in weights else "tensor"


def _activations(values: Values, weights: str) -> str:
    """`QuantizedWeight.activations`. Activations that are fp8 or not symmetric stay floats, which is more exact."""
    if "input_activations" not in values:
        return "float"
    inputs = values.inner("input_activations")
    kind = inputs.choice("type", accepted=("int", "float"), default="int")
    inputs.choice("num_bits", accepted=(8,), default=8)
    symmetric = inputs.flag("symmetric", True)
    return "int8" if kind == "int" and weights == "int" and symmetric else "float"


def _packed_header(parts: Parts, scheme: _Scheme) -> Header:
    because = "a pack-quantized matrix has weight_packed, weight_scale and weight_shape"
    outputs, words = parts.matrix("weight_packed", because, ("I32",))
    parts.check("weight_shape", because, ("I64", "I32"), (2,), meaning="out, in")
    inputs = words * WORD // scheme.bits
    if scheme.strategy == "group":
        _, groups = parts.matrix("weight_scale", because, FLOATS)
        inputs = min(inputs, groups * (scheme.group_size or inputs))
        if words_of(inputs, scheme.bits) != words:
            raise parts.wrong("weight_scale", f"{' or '.join(FLOATS)}[out, in / {scheme.group_size}]")
    header = _header(parts, scheme, because, (outputs, inputs))
    shape = (words_of(outputs, scheme.bits), header.stored_groups)
    _check_zeros(parts, scheme, {"I32": (shape,), "I8": ((outputs, header.stored_groups),)})
    check_group_index(parts, "weight_g_idx", because, inputs)
    return header


def _plain_header(parts: Parts, scheme: _Scheme) -> Header:
    because = f"a {scheme.format} matrix has weight and weight_scale"
    is_float = scheme.format == _FLOAT
    shape = parts.matrix("weight", because, ("F8_E4M3",) if is_float else ("I8",))
    header = _header(parts, scheme, because, shape)
    dtype = "F8_E4M3" if is_float else "I8"
    _check_zeros(parts, scheme, {dtype: (parts.entry("weight_scale", because).shape,)})
    check_group_index(parts, "weight_g_idx", because, shape[1])
    return header


def _declared(scheme: _Scheme, shape: tuple[int, int]) -> Header:
    kind = "fp8" if scheme.format == _FLOAT else "int8" if scheme.format == _INT else f"int{scheme.bits}"
    group, block = shape[1], 1
    if scheme.strategy == "group":
        group = min(scheme.group_size or group, group)
    elif scheme.block is not None:
        block, group = scheme.block[0], min(scheme.block[1], group)
    zeros = None if scheme.symmetric else np.dtype(np.uint8 if kind == "int4" else np.int8)
    codes = "weight_packed" if scheme.format == _PACKED else "weight"
    return Header(codes, shape, kind, scheme.bits, group, "BF16", zeros, scheme.activations, block)


def _header(parts: Parts, scheme: _Scheme, because: str, shape: tuple[int, int]) -> Header:
    header, outputs = _declared(scheme, shape), shape[0]
    shapes: tuple[tuple[int, ...], ...] = scalar_shapes(outputs)
    if scheme.strategy in ("group", "block"):
        shapes = ((-(-outputs // header.block), header.stored_groups),)
    elif scheme.strategy == "tensor":
        shapes = shapes[:3]
    scales = parts.check("weight_scale", because, FLOATS, *shapes, meaning=f"strategy {scheme.strategy}").dtype
    return dataclasses.replace(header, scales=scales)


def _check_zeros(parts: Parts, scheme: _Scheme, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> None:
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
