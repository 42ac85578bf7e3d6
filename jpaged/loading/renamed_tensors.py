"""`RenamedTensors`: some tensors of a checkpoint under other names. And the names of tensors of draft heads.

A draft head appears as a model of one layer. Its layer has the names of the family's layer 0. Its other tensors have
the names in `HEAD_RULES` of `drafters/head_weights.py`. The published kinds of MTP layers:

| Format   | Tensors                          | Families |
|----------|----------------------------------|----------|
| DEEPSEEK | `model.layers.{N}.`              | DeepSeek-V3 and V3.2; GLM-4.5 to 4.7, GLM-4.7 Flash, GLM-5 |
| HUNYUAN  | `model.layers.{N}.`              | Hunyuan 3 |
| QWEN     | `mtp.`                           | Qwen3-Next, Qwen3.5 |
| ERNIE    | `model.mtp_block.0.` and three   | Ernie 4.5 with experts |
| NEMOTRON | `mtp.layers.0.`, `mtp.layers.1.` | Nemotron 3 |

N is the number of the model's layers. The names of the tensors decide, so that other families may have any format.
"""

import dataclasses
import re
from collections.abc import Iterable, Set
from pathlib import Path

import numpy as np

from jpaged.loading.checkpoint import TensorSource
from jpaged.loading.safetensors_file import TensorEntry
from jpaged.models.families.base import TensorRule
from pallas_kernels import QuantizedWeight

# (prefix in the checkpoint, prefix that it gets). The first pair that matches applies.
Prefixes = tuple[tuple[str, str], ...]
_OWN = (("embed_tokens.", "model.embed_tokens."), ("lm_head.", "lm_head."), ("norm.", "model.norm."))
_EAGLE3 = (("fc.", "head.fc."), ("input_norm.", "head.input_norm."), ("fc_norm.", "head.fc_norm."), *_OWN)
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")
_MTP = ("mtp.", "model.mtp_")  # of the names of tensors that no layer of a model has


def eagle3_prefixes(names: Iterable[str]) -> Prefixes:
    """Prefixes of an EAGLE-3 head: its layer is `midlayer.`, or `layers.0.` in the speculators library."""
    layer = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    return ((f"{layer}hidden_norm.", "head.hidden_norm."), (layer, "model.layers.0."), *_EAGLE3)


@dataclasses.dataclass(frozen=True)
class MTPFormat:
    """Names of the first MTP layer's tensors in one format, and the layer's options."""

    first: str               # prefix of all its tensors, with {layer} for the number of the model's layers
    renamed: Prefixes        # (prefix after `first`, prefix in `RenamedTensors`); the first pair that matches applies
    markers: tuple[str, ...]  # tensors after `first` by which the format is recognised
    norm_output: bool = True  # the next pass reads the output after the final norm
    own_norm: bool = True    # False: the layer uses the model's final norm
    dense: bool = False      # its feed-forward network has no experts
    hidden: tuple[str, ...] = ()  # prefixes after `first` of tensors that are not read
    rules: tuple[TensorRule, ...] = ()  # of tensors that the family's layers do not have
    # Keys of config.json with the only values that are supported
    refused: tuple[tuple[str, object], ...] = ()

    def prefixes(self, num_layers: int) -> Prefixes:
        """Prefixes for `RenamedTensors`, in a model with `num_layers` layers."""
        first = self.first.format(layer=num_layers)
        return tuple((first + old, new) for old, new in self.renamed)

    def hidden_prefixes(self, num_layers: int) -> tuple[str, ...]:
        """Prefixes in the checkpoint of tensors that are not read."""
        return tuple(self.first.format(layer=num_layers) + old for old in self.hidden)

    def is_in(self, names: Set[str], num_layers: int) -> bool:
        """True if a checkpoint has an MTP layer of this format."""
        return all(self.first.format(layer=num_layers) + marker in names for marker in self.markers)


DEEPSEEK = MTPFormat(
    "model.layers.{layer}.",
    (
        ("enorm.", "head.embedding_norm."), ("hnorm.", "head.hidden_norm."), ("eh_proj.", "head.fc."),
        ("shared_head.norm.", "model.norm."), ("shared_head.head.", "lm_head."),
        ("embed_tokens.", "model.embed_tokens."), ("", "model.layers.0."),
    ),
    ("eh_proj.weight",), norm_output=False,
)  # fmt: skip
HUNYUAN = dataclasses.replace(
    DEEPSEEK, renamed=(("final_layernorm.", "model.norm."), *DEEPSEEK.renamed), norm_output=True,
    markers=("eh_proj.weight", "final_layernorm.weight"), hidden=("shared_head.", "embed_tokens."),
)  # fmt: skip
QWEN = MTPFormat(
    "mtp.",
    (
        ("pre_fc_norm_embedding.", "head.embedding_norm."), ("pre_fc_norm_hidden.", "head.hidden_norm."),
        ("fc.", "head.fc."), ("layers.0.", "model.layers.0."), ("embed_tokens.", "model.embed_tokens."),
        ("lm_head.", "lm_head."), ("norm.", "model.norm."),
    ),
    ("fc.weight",),
)  # fmt: skip
# Two layers of one block each, which are one layer of attention and experts
NEMOTRON = MTPFormat(
    "mtp.layers.",
    (
        ("0.enorm.", "head.embedding_norm."), ("0.hnorm.", "head.hidden_norm."), ("0.eh_proj.", "head.fc."),
        ("1.final_layernorm.", "model.norm_f."), ("1.norm.", "head.mlp_norm.0."),
        ("1.mixer.", "model.layers.0.mixer."), ("0.", "model.layers.0."),
    ),
    ("0.eh_proj.weight", "1.final_layernorm.weight"),
    rules=(TensorRule("head.mlp_norm.{layer}.weight", "mlp_norm"),),
    refused=(("mtp_hybrid_override_pattern", "*E"), ("mtp_layers_block_type", ["attention", "moe"])),
)  # fmt: skip
ERNIE = MTPFormat(
    "model.mtp_",
    (
        ("emb_norm.0.", "head.embedding_norm."), ("hidden_norm.0.", "head.hidden_norm."),
        ("linear_proj.0.", "head.fc."), ("block.0.", "model.layers.0."),
    ),
    ("linear_proj.0.weight",), own_norm=False, dense=True,
)  # fmt: skip
FORMATS = (HUNYUAN, DEEPSEEK, QWEN, NEMOTRON, ERNIE)  # the first one that a checkpoint has applies
_BY_TYPE = {
    "hy_v3": HUNYUAN, "qwen3_next": QWEN, "qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN, "nemotron_h": NEMOTRON,
    "ernie4_5_moe": ERNIE,
}  # fmt: skip


def format_of_type(model_type: str) -> MTPFormat:
    """Format of a model that has no weights, by its family's `model_type`."""
    return _BY_TYPE.get(model_type, DEEPSEEK)


def format_of_names(names: Iterable[str], num_layers: int) -> MTPFormat | None:
    """Format of a checkpoint of a model with `num_layers` layers; None: it has no MTP layer."""
    names = set(names)
    return next((each for each in FORMATS if each.is_in(names, num_layers)), None)


def mtp_tensors(names: Iterable[str], num_layers: int) -> set[str]:
    """The tensors of all MTP layers, which a model of `num_layers` layers does not read to decode."""
    names = set(names)
    starts = tuple(each.first for each in FORMATS if "{layer}" not in each.first and each.is_in(names, num_layers))
    layers = {name: int(match[1]) for name in names if (match := _LAYER.fullmatch(name))}
    of_mtp = {layer for layer in set(layers.values()) if layer >= num_layers and DEEPSEEK.is_in(names, layer)}
    return {name for name in names if name.startswith(starts)} | {n for n, layer in layers.items() if layer in of_mtp}


def may_be_of_mtp(name: str, num_layers: int) -> bool:
    """True if the name alone can be that of a tensor of an MTP layer, next to a model of `num_layers` layers."""
    match = _LAYER.fullmatch(name)
    return name.startswith(_MTP) or (match is not None and int(match[1]) >= num_layers)


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
