"""Tensors that a config.json calls for, as a `TensorSource` without files, for `jpaged plan`.

A config.json does not list the quantised matrices. As in the quantisation libraries, these are the matrices of the
layers, except routers and the modules that quantization_config excludes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.packed_checkpoint import described_weight, format_of
from jpaged.loading.quantized import fp4
from jpaged.loading.quantized.config import MXFP4, method_of
from jpaged.loading.quantized.matrix_tensors import Header
from jpaged.loading.safetensors_file import TensorEntry
from jpaged.models.families.base import Family, LeafTensors, NamedRule
from jpaged.models.quantization import EXPERTS, LEAVES
from jpaged.models.spec import HASHED, DecoderSpec, param_shapes
from pallas_kernels import QuantizedWeight


class DeclaredCheckpoint:
    """A `TensorSource` of shapes. `array` and `quantized` raise: there is no data."""

    config_name = Checkpoint.config_name
    num_bytes = 0

    def __init__(self, folder: Path, values: Mapping[str, Any], family: Family, spec: DecoderSpec):
        """values: config.json's. Raises ModelLoadError for a quantization_config that is not supported."""
        self.folder = folder
        method = method_of(values)
        self._is_mxfp4 = method == MXFP4
        self._format = None if method is None or self._is_mxfp4 else format_of(values)
        self._entries: dict[str, TensorEntry] = {}
        self._headers: dict[str, Header] = {}
        self._fp4: dict[str, QuantizedWeight] = {}
        tree = param_shapes(spec, np.float32)
        for leaf in family.tensors(tree):
            shape = (tree["layers"][leaf.layer] if leaf.layer is not None else tree)[leaf.leaf].shape
            if self._format is not None:  # these formats have a tensor for each expert
                leaf = leaf.of_single_experts(shape[0])
            blank = np.broadcast_to(np.float32(0), shape)  # gives views their shapes; needs no memory
            for tensor in leaf.tensors:
                self._add(leaf, tensor, tensor.rule.shape(leaf.block(blank, tensor)))

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._entries.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Shape of a tensor. Its dtype is one that loading accepts, and its position has no meaning."""
        return self._entries[name]

    def path(self, name: str) -> Path:
        """The folder: there is no file."""
        return self.folder

    def label(self, name: str) -> str:
        """Name of a tensor in error messages."""
        return name

    def array(self, name: str) -> np.ndarray:
        """Raises ModelLoadError: there is no data."""
        raise ModelLoadError(f"{self.folder} has a {self.config_name}, but no weights: {name} cannot be read")

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Raises ModelLoadError: there is no data."""
        self.array(name)
        return None

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """The packed tensor, with ShapeDtypeStructs; None: it is not packed."""
        if name in self._fp4:
            return self._fp4[name]
        header = self._headers.get(name)
        if header is None or self._format is None:
            return None
        return described_weight(header, has_order=self._format.reorders(name.removesuffix(".weight")))

    def release(self, name: str) -> None:
        """There is nothing to release."""

    def _add(self, leaf: LeafTensors, tensor: NamedRule, shape: tuple[int, ...]) -> None:
        name = tensor.name
        self._entries[name] = TensorEntry(name, "I32" if leaf.leaf == HASHED else "BF16", shape, 0, 0)
        if leaf.leaf not in LEAVES:
            return
        if self._is_mxfp4 and leaf.leaf in EXPERTS and tensor.rule.all_experts:
            experts, inputs, outputs = shape
            _check_groups(name, inputs, fp4.MXFP4_GROUP)
            self._fp4[name] = fp4.mxfp4_shape((experts, outputs, inputs // 2))
        elif self._format is not None and len(shape) == 2 and not tensor.rule.transposed:
            module = name.removesuffix(".weight")
            in_place = leaf.layer is not None or self._format.packs_outside_layers(module)
            if in_place and self._format.excluded(module) is None:
                header = self._headers[name] = self._format.declared(module, shape)
                if header.kind == "fp4":
                    _check_groups(name, shape[1], header.stored_group)


def _check_groups(name: str, inputs: int, group: int) -> None:
    """Refuse a matrix in fp4 if its inputs do not fill whole groups. Loading its file would fail too."""
    if inputs % group:
        raise ModelLoadError(
            f"{Checkpoint.config_name} calls for {name} with {inputs} inputs, and its quantization_config for groups "
            f"of {group} inputs in fp4: inputs must be a multiple of {group}. The two are from different models"
        )
