"""Presents the MXFP4 tensors of a checkpoint (gpt-oss's experts) as bfloat16 tensors, or as 4-bit codes.

Format (OCP Microscaling Formats 1.0): blocks of 32 numbers with 4 bits each (E2M1), two per byte, the lower half first.
Each block has a power of two in one byte (E8M0, bias 127). A tensor NAME [experts, in, out] is stored transposed, as
NAME_blocks uint8[experts, out, in / 32, 16] and NAME_scales uint8[experts, out, in / 32].
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.quantized import fp4
from jpaged.loading.safetensors_file import TensorEntry
from pallas_kernels import QuantizedWeight

_BLOCKS, _SCALES = "_blocks", "_scales"
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], -1)  # float32[256, 2], by byte
_BIAS, _NAN = 127, 255


class Mxfp4Checkpoint:
    """A checkpoint whose MXFP4 tensors look like bfloat16 tensors. bfloat16 represents their values exactly."""

    config_name = Checkpoint.config_name

    def __init__(self, checkpoint: Checkpoint):
        """Raises ModelLoadError for blocks without scales, and for blocks and scales of unmatched shapes."""
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        names = set(checkpoint.names)
        self._packed = {n.removesuffix(_BLOCKS) for n in names if n.endswith(_BLOCKS)}
        for name in sorted(self._packed):
            if name + _SCALES not in names:
                raise ModelLoadError(f"{checkpoint.path(name + _BLOCKS)}: {name}{_BLOCKS} has no {name}{_SCALES}")
            if name in names:
                raise ModelLoadError(f"{checkpoint.path(name)}: has both {name} and {name}{_BLOCKS}, of one tensor")
            self._check(name)

    @property
    def is_packed(self) -> bool:
        """True if there is any MXFP4 tensor."""
        return bool(self._packed)

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors. A packed tensor has the name of its unpacked form."""
        parts = {name + part for name in self._packed for part in (_BLOCKS, _SCALES)}
        return [*(name for name in self._checkpoint.names if name not in parts), *sorted(self._packed)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._checkpoint.num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._packed or name in self._checkpoint

    def label(self, name: str) -> str:
        """Name of a tensor in error messages."""
        return name + _BLOCKS if name in self._packed else name

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype and position of a tensor. A packed one has its unpacked shape and the position of its blocks."""
        if name not in self._packed:
            return self._checkpoint.entry(name)
        blocks = self._checkpoint.entry(name + _BLOCKS)
        experts, out, count, size = blocks.shape
        return dataclasses.replace(blocks, name=name, dtype="BF16", shape=(experts, 2 * count * size, out))

    def path(self, name: str) -> Path:
        """Path of the file that contains a tensor."""
        return self._checkpoint.path(name + _BLOCKS if name in self._packed else name)

    def array(self, name: str) -> np.ndarray:
        """Return a tensor. A packed one is unpacked to bfloat16[experts, in, out], one expert at a time."""
        if name not in self._packed:
            return self._checkpoint.array(name)
        blocks, scales = (self._checkpoint.array(name + part) for part in (_BLOCKS, _SCALES))
        experts, out, count, size = blocks.shape
        unpacked = np.empty((experts, out, count * size * 2), ml_dtypes.bfloat16)
        if (scales == _NAN).any():
            raise ModelLoadError(f"{self.path(name)}: {name}{_SCALES} has a byte {_NAN}, which means NaN")
        for values, block, scale in zip(unpacked, blocks, scales, strict=True):
            wide = _PAIRS[block].reshape(out, count, 2 * size)
            values[...] = np.ldexp(wide, scale[..., None].astype(np.int32) - _BIAS).reshape(out, -1)
        return unpacked.swapaxes(1, 2)

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Return a packed tensor's codes, uint8[experts, out, in], and scales, bfloat16[experts, out, in / 32].

        The axes are in the file's order, which `QuantizedWeight` needs. `entry` and `array` have [experts, in, out], so
        a caller that transposes `array` must not transpose this. None: the tensor is not packed. Raises ModelLoadError
        for a scale that is NaN.
        """
        if name not in self._packed:
            return None
        blocks, scales = (self._checkpoint.array(name + part) for part in (_BLOCKS, _SCALES))
        try:
            return fp4.mxfp4(blocks.reshape(*blocks.shape[:2], -1), scales)
        except ValueError as error:
            raise ModelLoadError(f"{self.path(name)}: {name}{_SCALES}: {error}") from None

    def quantized_shape(self, name: str) -> QuantizedWeight | None:
        """As `quantized`, with a jax.ShapeDtypeStruct in place of each array. It reads the header only."""
        if name not in self._packed:
            return None
        experts, out, count, size = self._checkpoint.entry(name + _BLOCKS).shape
        return fp4.mxfp4_shape((experts, out, count * size))

    def release(self, name: str) -> None:
        """Release the memory pages of a tensor. A later read loads them again."""
        parts = (_BLOCKS, _SCALES) if name in self._packed else ("",)
        for part in parts:
            self._checkpoint.release(name + part)

    def _check(self, name: str) -> None:
        blocks, scales = (self._checkpoint.entry(name + part) for part in (_BLOCKS, _SCALES))
        right = blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4 and blocks.shape[3] == 16
        if not right or scales.shape != blocks.shape[:3]:
            raise ModelLoadError(
                f"{self._checkpoint.path(blocks.name)}: {blocks.name} {blocks.dtype}{list(blocks.shape)} and "
                f"{scales.name} {scales.dtype}{list(scales.shape)} are not MXFP4: they must be "
                "U8[experts, out, in / 32, 16] and U8[experts, out, in / 32]"
            )
