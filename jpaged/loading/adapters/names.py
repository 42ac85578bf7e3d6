"""Pairs of the tensors of an adapter, by PEFT's names.

A module has PATH.lora_A.weight [rank, in] and PATH.lora_B.weight [out, rank]. The embedding has PATH.lora_embedding_A
[rank, vocab] and PATH.lora_embedding_B [width, rank]. PATH starts with "base_model.model.". State dictionaries have
the adapter's name, too: PATH.lora_A.NAME.weight. An adapter of a multimodal model has the prefixes of its text model.
"""

import dataclasses
import re
from collections.abc import Iterable

from jpaged.errors import ModelLoadError
from jpaged.models.families.wrappers import TEXT_PREFIXES

_PEFT = "base_model.model."
_LINEAR = re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_EMBEDDING = re.compile(r"(.+)\.lora_embedding_([AB])(?:\.[^.]+)?")
# PEFT saves the base model's embedding and lm_head next to an adapter that changes them.
_COPY = re.compile(r"(.+)\.base_layer\.weight")
_WRAPPED = re.compile(r"(\.base_layer)+$")  # a module that PEFT wraps once for each of its parameters
_SEVERAL = 3  # names that a message lists
_UNSUPPORTED = (
    ("lora_magnitude_vector", "DoRA is not supported: train with use_dora=False"),
    ("modules_to_save", "weights that are trained in full are not supported: train without modules_to_save"),
    ("trainable_tokens", "trained token embeddings are not supported: train without trainable_token_indices"),
    (".bias", "trained biases are not supported: train with bias='none' and lora_bias=False"),
)


@dataclasses.dataclass(frozen=True)
class TensorPair:
    """The two tensors of a module."""

    path: str      # of the module, without "base_model.model." and ".base_layer"
    a: str         # name of the tensor
    b: str
    is_embedding: bool


@dataclasses.dataclass(frozen=True)
class AdapterNames:
    """All tensors of an adapter."""

    pairs: tuple[TensorPair, ...]
    copies: tuple[tuple[str, str], ...]  # (module path, tensor): copies of the base model's weights
    others: tuple[tuple[str, str], ...]  # (name without "base_model.model.", tensor)


def _in_text_model(name: str) -> str:
    """The name in the text model of a wrapper's tensor; other names unchanged."""
    for stored, known in TEXT_PREFIXES:
        if name.startswith(stored):
            return known + name.removeprefix(stored)
    return name


def pair_names(names: Iterable[str], label: str) -> AdapterNames:
    """Pair the tensors. Raises ModelLoadError for an A without B, for two As of a module, and for other methods."""
    found: dict[tuple[str, bool], dict[str, str]] = {}
    copies, others = [], []
    for name in names:
        short = _in_text_model(name.removeprefix(_PEFT))
        for mark, reason in _UNSUPPORTED:
            if mark in name:
                raise ModelLoadError(f"{label}: tensor {name}: {reason}")
        match = _LINEAR.fullmatch(short) or _EMBEDDING.fullmatch(short)
        if match is not None:
            sides = found.setdefault((match[1], match.re is _EMBEDDING), {})
            if match[2] in sides:
                raise ModelLoadError(
                    f"{label}: tensors {sides[match[2]]} and {name} are for the same matrix: keep one adapter only"
                )
            sides[match[2]] = name
        elif match := _COPY.fullmatch(short):
            copies.append((match[1], name))
        else:
            others.append((short, name))
    for sides in found.values():
        if len(sides) == 1:
            side, name = next(iter(sides.items()))
            raise ModelLoadError(
                f"{label}: tensor {name} has no lora_{'B' if side == 'A' else 'A'}: the adapter is incomplete, fetch "
                "or save it again"
            )
    pairs = tuple(
        TensorPair(_WRAPPED.sub("", path), sides["A"], sides["B"], is_embedding)
        for (path, is_embedding), sides in found.items()
    )
    return AdapterNames(pairs, tuple(copies), tuple(others))


def ends_of(path: str) -> set[str]:
    """All ends of a module path, as `target_modules` may name it: a.b.c -> a.b.c, b.c and c."""
    parts = path.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def listed(names: list[str]) -> str:
    """Return 'tensor x' or 'tensors x, y, z and 7 others'."""
    if len(names) == 1:
        return f"tensor {names[0]}"
    others = f" and {len(names) - _SEVERAL} others" if len(names) > _SEVERAL else ""
    return f"tensors {', '.join(names[:_SEVERAL])}{others}"
