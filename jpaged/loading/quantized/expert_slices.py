"""Presents fp8 tensors of all experts of a layer as one matrix for each expert, as other fp8 checkpoints have them.

Mistral Small 4's release has NAME.gate_up_proj F8_E4M3[experts, gate and up, in], NAME.down_proj [experts, out, in] and
NAME.*_scale_inv: [experts, 1, 1], [experts, out, 1] or a scale for each block. The matrices here are
NAME.7.gate_proj.weight [out, in], with NAME.7.gate_proj.weight_scale_inv. Source: Transformers 5.24,
integrations/finegrained_fp8.py.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import Checkpoint, TensorSource
from jpaged.loading.safetensors_file import TensorEntry
from pallas_kernels import QuantizedWeight

_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SCALES = "_scale_inv"
_FURTHER = ("_activation_scale",)  # activations are not rounded


@dataclasses.dataclass(frozen=True)
class _Slice:
    name: str      # of the tensor of all experts
    expert: int
    part: int      # of the tensor's outputs: 0 or 1
    parts: int

    def of(self, array: np.ndarray) -> np.ndarray:
        """This expert's part of the tensor, or of its scales."""
        rows = array[self.expert]
        if rows.shape[0] < self.parts:  # one scale for all outputs
            return rows
        count = rows.shape[0] // self.parts
        return rows[self.part * count : (self.part + 1) * count]

    @property
    def is_last(self) -> bool:
        return self.part == self.parts - 1


class ExpertSlices:
    """A checkpoint whose fp8 tensors of all experts look like a matrix for each expert."""

    config_name = Checkpoint.config_name

    def __init__(self, checkpoint: TensorSource, block: int | None):
        """block: outputs that share a scale; None: all outputs of a tensor do, or none.

        Raises ModelLoadError for scales whose shape does not fit the tensor, and for a block of gate and up.
        """
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._block = block
        self._slices: dict[str, _Slice] = {}
        self._hidden: set[str] = set()
        for name in checkpoint.names:
            kind = name.rpartition(".")[2]
            if kind in _MATRICES and name + _SCALES in checkpoint:
                entry = checkpoint.entry(name)
                if entry.dtype == "F8_E4M3" and len(entry.shape) == 3:
                    self._add(name, _MATRICES[kind], entry)

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors. A tensor of all experts has the names of its slices."""
        return [*(name for name in self._checkpoint.names if name not in self._hidden), *self._slices]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._checkpoint.num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._slices or (name in self._checkpoint and name not in self._hidden)

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype and position of a tensor. A slice has the position of the tensor of all experts."""
        found = self._slices.get(name)
        if found is None:
            return self._checkpoint.entry(name)
        entry = self._checkpoint.entry(found.name)
        shape = found.of(np.broadcast_to(np.int8(0), entry.shape)).shape
        return dataclasses.replace(entry, name=name, shape=shape)

    def path(self, name: str) -> Path:
        """Path of the file that contains a tensor."""
        return self._checkpoint.path(self._stored(name))

    def label(self, name: str) -> str:
        """Name of a tensor in error messages."""
        return self._stored(name)

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as a view of the mapped file. Drop the view before the checkpoint is closed."""
        found = self._slices.get(name)
        return self._checkpoint.array(name) if found is None else found.of(self._checkpoint.array(found.name))

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Always None: `PackedCheckpoint` reads the codes."""
        return None

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """Always None: `PackedCheckpoint` reads the codes."""
        return None

    def release(self, name: str) -> None:
        """Release the memory pages of a tensor. Those of all experts are released after the last one's last part."""
        found = self._slices.get(name)
        if found is None:
            self._checkpoint.release(name)
        elif found.is_last and found.expert == self._checkpoint.entry(found.name).shape[0] - 1:
            self._checkpoint.release(found.name)

    def _stored(self, name: str) -> str:
        return self._slices[name].name if name in self._slices else name

    def _add(self, name: str, matrices: tuple[str, ...], entry: TensorEntry) -> None:
        scales, count = self._checkpoint.entry(name + _SCALES), len(matrices)
        experts, outputs, _ = entry.shape
        rows = (1, outputs) if self._block is None else (-(-outputs // self._block),)
        fits = len(scales.shape) == 3 and scales.shape[0] == experts and scales.shape[1] in rows
        whole = rows == (1,) or self._block is None or outputs // count % self._block == 0
        if not fits or not whole or outputs % count:
            raise ModelLoadError(
                f"{self.path(name)}: {scales.name} {list(scales.shape)} does not fit {name} {list(entry.shape)}: it "
                "must be [experts, 1, 1], [experts, out, 1], or have the blocks of weight_block_size, and no block may "
                "have outputs of both gate and up: use another quantization of the model"
            )
        head = name.rpartition(".")[0]
        for expert in range(entry.shape[0]):
            for part, matrix in enumerate(matrices):
                module = f"{head}.{expert}.{matrix}"
                self._slices[f"{module}.weight"] = _Slice(name, expert, part, count)
                self._slices[f"{module}.weight{_SCALES}"] = _Slice(name + _SCALES, expert, part, count)
        self._hidden.update((name, name + _SCALES, *(name + further for further in _FURTHER)))
