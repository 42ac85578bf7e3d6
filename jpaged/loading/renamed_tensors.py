"""`RenamedTensors`: some tensors of a checkpoint under other names. And the names of EAGLE-3 heads' tensors.

A draft head appears as a model of one layer. Its layer has the names of the family's layer 0. Its other tensors have
the names in `HEAD_RULES` of `drafters/head_weights.py`. `mtp_names.py` has the names of MTP layers.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.safetensors_file import TensorEntry
from pallas_kernels import QuantizedWeight

# (prefix in the checkpoint, prefix that it gets). The first pair that matches applies.
Prefixes = tuple[tuple[str, str], ...]
_OWN = (("embed_tokens.", "model.embed_tokens."), ("lm_head.", "lm_head."), ("norm.", "model.norm."))
_EAGLE3 = (("fc.", "head.fc."), ("input_norm.", "head.input_norm."), ("fc_norm.", "head.fc_norm."), *_OWN)


def eagle3_prefixes(names: Iterable[str]) -> Prefixes:
    """Prefixes of an EAGLE-3 head: its layer is `midlayer.`, or `layers.0.` in the speculators library."""
    layer = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    return ((f"{layer}hidden_norm.", "head.hidden_norm."), (layer, "model.layers.0."), *_EAGLE3)


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
