"""One safetensors file, memory-mapped. Its header is checked against the file's size before any tensor is read.

Format: eight bytes of header length (little-endian), a JSON header of {name: {dtype, shape, data_offsets}}, the data.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError, shown
from jpaged.loading.mapped_file import MappedFile

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
# Limits of one file's header. The format allows 100 MB. Files of known models stay below 1 MB and 10,000 tensors.
_MAX_HEADER = 16 << 20  # bytes
_MAX_TENSORS = 100_000
_MAX_DIMENSIONS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Shape, dtype and position of a tensor. `begin` and `end` count bytes from the start of the file."""

    name: str
    dtype: str  # the file format's name of the dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(MappedFile):
    """A safetensors file open for reading. `array` returns views of the mapped file: drop them before `close`."""

    def __init__(self, path: Path):
        """Read and check the header. Raises ModelLoadError with the file, the tensor and the remedy."""
        super().__init__(path)
        try:
            self.entries = self._read_header()
            self._map_all()
        except BaseException:
            self._file.close()
            raise

    def array(self, name: str) -> np.ndarray:
        """Return the tensor as a read-only view of the mapped file. Raises ModelLoadError for a dtype not in DTYPES."""
        dtype, entry = self._dtype(name), self.entries[name]
        return np.frombuffer(self._map, dtype, math.prod(entry.shape), entry.begin).reshape(entry.shape)

    def read_array(self, name: str) -> np.ndarray:
        """Return a copy of the tensor. For a file that may be overwritten meanwhile.

        Where a mapped file has become shorter, a read of a view ends the process (SIGBUS). This raises ModelLoadError.
        """
        dtype, entry = self._dtype(name), self.entries[name]
        self._file.seek(entry.begin)
        data = self._file.read(entry.end - entry.begin)
        if len(data) < entry.end - entry.begin:
            raise ModelLoadError(f"{self.path}: it became shorter while it was read: load it after it is written")
        return np.frombuffer(data, dtype).reshape(entry.shape)

    def _dtype(self, name: str) -> np.dtype:
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ModelLoadError(
                f"{self.path}: tensor {name} is {entry.dtype}, which jpaged does not support; it supports "
                f"{', '.join(DTYPES)}: use another checkpoint of the model"
            )
        return np.dtype(DTYPES[entry.dtype])

    def header(self) -> bytes:
        """Return all bytes before the tensors."""
        return self._map[: 8 + int.from_bytes(self._map[:8], "little")]

    def data(self, name: str) -> bytes:
        """Return the tensor's bytes. Works for unknown dtypes too."""
        entry = self.entries[name]
        return self._map[entry.begin : entry.end]

    def release(self, name: str) -> None:
        """Release the memory pages of a tensor. A later read loads them again."""
        entry = self.entries[name]
        self.release_bytes(entry.begin, entry.end)

    def _read_header(self) -> dict[str, TensorEntry]:
        self._file.seek(0)
        length = int.from_bytes(self._file.read(8), "little")
        if self.size < 8 or length > _MAX_HEADER:
            raise self._damaged(f"it is not a safetensors file, or its header has more than {_MAX_HEADER >> 20} MiB")
        start = 8 + length
        if start > self.size:
            raise self._damaged(f"its header should end at byte {start:,}, the file ends at {self.size:,}: truncated")
        try:
            text = self._file.read(length)
            # Checked first, because parsing 500,000 tensors takes 1 s. A tensor's entry is one object with two lists.
            if text.count(b"{") > _MAX_TENSORS or text.count(b"[") > 2 * _MAX_TENSORS:
                raise self._damaged(f"its header has more than {_MAX_TENSORS:,} tensors")
            header = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header cannot be read ({error})") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, fields, start) for name, fields in header.items()}
        self._check_layout(entries, start)
        return entries

    def _entry(self, name: str, fields: Any, start: int) -> TensorEntry:
        try:
            dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise self._damaged(f"the header's entry of tensor {name} is not valid") from None
        numbers = (*shape, begin, end)
        if (
            not isinstance(dtype, str)
            or len(shape) > _MAX_DIMENSIONS
            or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers)
        ):
            raise self._damaged(f"the header's entry of tensor {name} is not valid")
        if dtype in DTYPES and end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
            raise self._damaged(
                f"tensor {name} has {end - begin:,} bytes, which does not match {dtype} of shape {list(shape)}"
            )
        return TensorEntry(name, dtype, shape, start + begin, start + end)

    def _check_layout(self, entries: dict[str, TensorEntry], start: int) -> None:
        """Check that tensors fill the file from the header to the end, without gap or overlap."""
        expected, before = start, "the header"
        for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
            if entry.begin != expected or entry.end < entry.begin:
                kind = "overlaps" if entry.begin < expected else "leaves a gap to"
                raise self._damaged(f"tensor {entry.name} {kind} {before}")
            if entry.end > self.size:
                raise self._damaged(
                    f"tensor {entry.name} should end at byte {entry.end:,}, the file ends at {self.size:,}: truncated"
                )
            expected, before = entry.end, f"tensor {entry.name}"
        if expected != self.size:
            raise self._damaged(f"{self.size - expected:,} bytes follow the last tensor")

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {what}; the file is damaged: fetch it again")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {shown(name)} occurs twice")
        values[name] = value
    return values
