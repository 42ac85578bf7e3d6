"""`RenamedTensors`: some tensors of a checkpoint under other names. And the names of tensors of draft heads.

A draft head appears as a model of one layer. Its layer has the names of the family's layer 0. Its other tensors have
the names in `HEAD_RULES` of `drafters/head_weights.py`.
"""

import re
from collections.abc import Container, Iterable
from pathlib import Path

import numpy as np

from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.safetensors_file import TensorEntry
from pallas_kernels import QuantizedWeight

# (prefix in the checkpoint, prefix that it gets). The first pair that matches applies.
Prefixes = tuple[tuple[str, str], ...]
_OWN = (("embed_tokens.", "model.embed_tokens."), ("lm_head.", "lm_head."), ("norm.", "model.norm."))
_EAGLE3 = (("fc.", "head.fc."), ("input_norm.", "head.input_norm."), ("fc_norm.", "head.fc_norm."), *_OWN)
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")
_MTP = "mtp."


def eagle3_prefixes(names: Iterable[str]) -> Prefixes:
    """Prefixes of an EAGLE-3 head: its layer is `midlayer.`, or `layers.0.` in the speculators library."""
    layer = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    return ((f"{layer}hidden_norm.", "head.hidden_norm."), (layer, "model.layers.0."), *_EAGLE3)


def mtp_prefixes(names: Iterable[str], num_layers: int) -> Prefixes | None:
    """Prefixes of the first MTP layer of a model with `num_layers` layers; None if it has none.

    DeepSeek-V3's is `model.layers.{num_layers}.`, Qwen3-Next's is `mtp.`.
    """
    names = set(names)
    if _has_mtp(names, num_layers):
        return deepseek_prefixes(num_layers)
    if f"{_MTP}fc.weight" not in names:
        return None
    return (
        ("mtp.pre_fc_norm_embedding.", "head.embedding_norm."), ("mtp.pre_fc_norm_hidden.", "head.hidden_norm."),
        ("mtp.fc.", "head.fc."), ("mtp.layers.0.", "model.layers.0."),
        *((f"{_MTP}{old}", new) for old, new in _OWN),
    )  # fmt: skip


def deepseek_prefixes(layer: int) -> Prefixes:
    """Prefixes of DeepSeek-V3's MTP layer."""
    first = f"model.layers.{layer}."
    parts = (
        ("enorm.", "head.embedding_norm."), ("hnorm.", "head.hidden_norm."), ("eh_proj.", "head.fc."),
        ("shared_head.norm.", "model.norm."), ("shared_head.head.", "lm_head."),
        ("embed_tokens.", "model.embed_tokens."), ("", "model.layers.0."),
    )  # fmt: skip
    return tuple((first + old, new) for old, new in parts)


def mtp_tensors(names: Iterable[str], num_layers: int) -> set[str]:
    """The tensors of all MTP layers, which a model of `num_layers` layers does not read to decode."""
    names = set(names)
    found = {name for name in names if name.startswith(_MTP)} if f"{_MTP}fc.weight" in names else set()
    layers = {name: int(match[1]) for name in names if (match := _LAYER.fullmatch(name))}
    of_mtp = {layer for layer in set(layers.values()) if layer >= num_layers and _has_mtp(names, layer)}
    return found | {name for name, layer in layers.items() if layer in of_mtp}


def may_be_of_mtp(name: str, num_layers: int) -> bool:
    """True if the name alone can be that of a tensor of an MTP layer, next to a model of `num_layers` layers."""
    match = _LAYER.fullmatch(name)
    return name.startswith(_MTP) or (match is not None and int(match[1]) >= num_layers)


def _has_mtp(names: Container[str], layer: int) -> bool:
    """True if layer `layer` is an MTP layer with DeepSeek's names."""
    return f"model.layers.{layer}.eh_proj.weight" in names


class RenamedTensors:
    """The tensors of a `TensorSource` that have one of the prefixes, under their new names."""

    def __init__(self, source: TensorSource, prefixes: Prefixes, without: tuple[str, ...] = ()):
        """without: old prefixes of tensors to hide."""
        self.folder, self.config_name = source.folder, source.config_name
        self._source, self._prefixes = source, prefixes
        names = (name for name in source.names if not name.startswith(without))
        self._names = {new: old for old in names if (new := self._renamed(old)) is not None}

    @property
    def names(self) -> Iterable[str]:
        """New names of all tensors."""
        return self._names.keys()

    @property
    def originals(self) -> Iterable[str]:
        """Names of the same tensors in the source."""
        return self._names.values()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without the headers of the files."""
        entries = map(self._source.entry, self._names.values())
        return sum(entry.end - entry.begin for entry in entries)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def label(self, name: str) -> str:
        """Name of a tensor in error messages: the source's. Also for a tensor that is missing."""
        if name in self._names:
            return self._source.label(self._names[name])
        found = ((old, new) for old, new in self._prefixes if name.startswith(new))
        old, new = next(found, ("", ""))
        return old + name.removeprefix(new)

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype and position of a tensor."""
        return self._source.entry(self._names[name])

    def path(self, name: str) -> Path:
        """Path of the file that contains a tensor."""
        return self._source.path(self._names[name])

    def array(self, name: str) -> np.ndarray:
        """Return a tensor."""
        return self._source.array(self._names[name])

    def quantized(self, name: str) -> QuantizedWeight | None:
        """A packed tensor; None if it is not quantised."""
        return self._source.quantized(self._names[name])

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """As `quantized`, with ShapeDtypeStructs."""
        return self._source.quantized_shape(self._names[name])

    def release(self, name: str) -> None:
        """Release the memory pages of a tensor."""
        self._source.release(self._names[name])

    def _renamed(self, name: str) -> str | None:
        pairs = ((old, new) for old, new in self._prefixes if name.startswith(old))
        old, new = next(pairs, (None, ""))
        return None if old is None else new + name.removeprefix(old)
