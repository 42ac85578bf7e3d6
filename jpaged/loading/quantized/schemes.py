"""config_groups of compressed-tensors: which modules are quantised, and how. A group may be the name of a preset.

Source: compressed-tensors 0.20, quantization/quant_scheme.py and compressors/format.py.
"""

import dataclasses
import re
from typing import Any

from jpaged.loading.quantized.config import Values, refused
from jpaged.loading.quantized.fp4 import MXFP4_GROUP, NVFP4_GROUP

PACKED, INT, FLOAT, NVFP4, MXFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
)  # fmt: skip
MIXED = "mixed-precision"  # every group names its own format
_NAIVE = "naive-quantized"  # int-quantized or float-quantized, by the type of the weights
FORMATS = (PACKED, INT, FLOAT, NVFP4, MXFP4, _NAIVE)
_FP4 = {NVFP4: ("tensor_group", NVFP4_GROUP), MXFP4: ("group", MXFP4_GROUP)}  # their strategy and group size
_STRATEGIES = ("tensor", "channel", "group", "block")
_ACTIVATIONS = (4, 8)  # bits of float activations; integer activations must have 8


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Quantisation of a group's weights."""

    format: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    activations: str
    reorders: bool = False  # there is a weight_g_idx


@dataclasses.dataclass(frozen=True)
class Group:
    """One of config_groups."""

    targets: tuple[str, ...]
    scheme: Scheme | None  # None: the weights are not quantised


def read_groups(config: Values, default: str) -> list[Group]:
    """Read config_groups. default: format of groups that name none. Raises ModelLoadError that names the key."""
    groups = []
    for name, value in config.inner("config_groups").raw.items():
        values = Values(_preset(name, value) if isinstance(value, list) else value, f"config_groups.{name}.")
        groups.append(Group(values.names("targets"), _scheme(name, values, default) if "weights" in values else None))
    return groups


# -- Presets --------------------------------------------------------------------------------------------------------

_INTEGERS = re.compile(r"W([2-8])A(4|8|16)")  # symmetric weights in groups of 128
_EIGHT = {"num_bits": 8, "type": "float"}


def _integers(bits: int, **changes: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128} | changes


def _fp4(form: str) -> dict[str, Any]:
    strategy, size = _FP4[form]
    return {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size}


_INT8 = {
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int"},
}
_PRESETS: dict[str, dict[str, Any]] = {
    "UNQUANTIZED": {},
    "W8A8": _INT8,
    "INT8": _INT8,
    "W4A16_ASYM": {"weights": _integers(4, symmetric=False)},
    "W4AFP8": {"weights": _integers(4), "input_activations": _EIGHT},
    "FP8": {"weights": _EIGHT | {"strategy": "tensor"}, "input_activations": _EIGHT},
    "FP8_DYNAMIC": {"weights": _EIGHT | {"strategy": "channel"}, "input_activations": _EIGHT},
    "FP8_BLOCK": {
        "weights": _EIGHT | {"strategy": "block", "block_structure": [128, 128]}, "input_activations": _EIGHT
    },
    "NVFP4A16": {"weights": _fp4(NVFP4)},
    "NVFP4": {"weights": _fp4(NVFP4), "input_activations": _fp4(NVFP4)},
    "MXFP4A16": {"weights": _fp4(MXFP4)},
    "MXFP4": {"weights": _fp4(MXFP4), "input_activations": _fp4(MXFP4)},
    "MXFP4XFP8": {"weights": _fp4(MXFP4), "input_activations": _EIGHT},
}  # fmt: skip


def _preset(name: str, targets: list[Any]) -> dict[str, Any]:
    """Return the group of a preset's name and its targets."""
    found = _PRESETS.get(name.upper())
    if found is None and (match := _INTEGERS.fullmatch(name.upper())) and int(match[1]) <= int(match[2]):
        found = {"weights": _integers(int(match[1]))}
        if match[2] != "16":
            found["input_activations"] = {"num_bits": int(match[2]), "type": "int"}
    if found is None:
        known = ", ".join((*_PRESETS, "W2A16 to W8A16", "W2A8 to W7A8"))
        raise refused(f"config_groups.{name}", targets, f"must be an object, or its name one of {known}")
    return found | {"targets": targets}


# -- Groups ---------------------------------------------------------------------------------------------------------


def _scheme(name: str, values: Values, default: str) -> Scheme:
    weights = values.inner("weights")
    kind = weights.choice("type", accepted=("int", "float"), default="int")
    size = weights.group_size("group_size", default=-1)
    form = _format(name, values, default, kind, size)
    bits = weights.choice("num_bits", accepted=_bits(form, kind), default=8)
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise refused(f"config_groups.{name}.weights.symmetric", symmetric, "must be true with the type float")
    activations = _activations(values, kind)
    if form in _FP4:
        strategy, group = _FP4[form]
        weights.choice("group_size", accepted=(group,))
        weights.choice("strategy", accepted=(strategy, "group"), default=strategy)
        return Scheme(form, bits, "group", group, None, True, activations)
    strategy = weights.choice("strategy", accepted=_STRATEGIES, default=_inferred_strategy(weights, size))
    block = weights.get("block_structure")
    if strategy == "block":
        valid = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        if not valid or form == PACKED:
            key = f"config_groups.{name}.weights.block_structure"
            raise refused(key, block, "must be [outputs, inputs] of a block of int-quantized or float-quantized")
    if strategy == "group" and size is None:
        raise refused(f"config_groups.{name}.weights.group_size", size, "must be a number with the strategy group")
    return Scheme(
        form, bits, strategy, size, tuple(block) if strategy == "block" else None, symmetric, activations,
        weights.get("actorder") in (True, "group"),
    )  # fmt: skip


def _format(name: str, values: Values, default: str, kind: str, size: int | None) -> str:
    """Return the group's own format, else the checkpoint's, else the format that the library infers."""
    form = values.choice("format", accepted=(*FORMATS, MIXED), default=default)
    if form == MIXED:
        bits = values.inner("weights").get("num_bits", default=8)
        if kind == "int":
            return INT if "input_activations" in values else PACKED
        return FLOAT if bits == 8 else MXFP4 if size == MXFP4_GROUP else NVFP4
    if form == _NAIVE:
        return INT if kind == "int" else FLOAT
    if (kind == "float") != (form in (FLOAT, NVFP4, MXFP4)):
        raise refused(f"config_groups.{name}.format", form, f"does not fit weights of the type {kind}")
    return form


def _bits(form: str, kind: str) -> tuple[int, ...]:
    if kind == "int":
        return tuple(range(1, 9))
    return (4,) if form in _FP4 else (8,)


def _inferred_strategy(weights: Values, size: int | None) -> str:
    if "block_structure" in weights:
        return "block"
    if size is not None:
        return "group"
    return "channel" if "group_size" in weights else "tensor"


def _activations(values: Values, weights: str) -> str:
    """`QuantizedWeight.activations`. fp8, fp4 and asymmetric activations are not rounded, which is more exact."""
    if "input_activations" not in values:
        return "float"
    inputs = values.inner("input_activations")
    kind = inputs.choice("type", accepted=("int", "float"), default="int")
    inputs.choice("num_bits", accepted=(8,) if kind == "int" or weights == "int" else _ACTIVATIONS, default=8)
    symmetric = inputs.flag("symmetric", True)
    return "int8" if kind == "int" and weights == "int" and symmetric else "float"
