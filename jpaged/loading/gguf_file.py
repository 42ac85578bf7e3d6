"""One GGUF file, memory-mapped. Its header is checked against the file's size before any tensor is read.

Format (ggml's docs/gguf.md, versions 2 and 3), all little-endian:
1. "GGUF", u32 version, u64 number of tensors, u64 number of keys.
2. The keys with typed values.
3. For every tensor its name, dimensions (the fastest first), type and offset.
4. Padding, then the data.

`gguf.GGUFReader` makes a numpy array of every string. For 150,000 tokens and 150,000 merges it took 5.9 s, and the
parser in this file 0.08 s (docs/decisions.md).

Imported late: gguf, which only .gguf files need.
"""

import functools
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.mapped_file import MappedFile
from jpaged.loading.safetensors_file import TensorEntry

_VERSIONS = (2, 3)
_SCALARS = {
    0: np.uint8, 1: np.int8, 2: np.uint16, 3: np.int16, 4: np.uint32, 5: np.int32, 6: np.float32, 7: np.bool_,
    10: np.uint64, 11: np.int64, 12: np.float64,
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_STRINGS = 4_000_000  # in all arrays of a header. Gemma 3 has 262,144 tokens and 514,906 merges
_ALIGNMENT = 32  # bytes, without a key general.alignment
_CHUNK = 1 << 16  # elements dequantised at once: the temporaries of gguf.quants then fit into the CPU's cache

PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class GgufFile(MappedFile):
    """A GGUF file open for reading: `metadata` by key, `entries` by tensor name.

    Entries have ggml's name of the dtype and numpy's order of dimensions. `raw` returns views of the mapped file: drop
    them before `close`.
    """

    def __init__(self, path: Path):
        """Read and check the header. Raises ModelLoadError with the file, the tensor or key, and the remedy."""
        super().__init__(path)
        try:
            if self.size < 24:
                raise self._damaged("it is too short")
            self._map_all()
            self.metadata: dict[str, Any] = {}
            self.entries = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def raw(self, name: str, part: int = 0, parts: int = 1) -> np.ndarray:
        """Return a view of a tensor's bytes, uint8[rows, bytes per row], or of one of `parts` equal shares of rows."""
        entry = self.entries[name]
        rows = math.prod(entry.shape[:-1])
        data = np.frombuffer(self._map, np.uint8, entry.end - entry.begin, entry.begin).reshape(rows, -1)
        share = rows // parts
        return data[part * share : (part + 1) * share]

    def _read_header(self) -> dict[str, TensorEntry]:
        if self._map[:4] != b"GGUF":
            raise self._damaged('it does not start with "GGUF"')
        version = int.from_bytes(self._map[4:8], "little")
        if version not in _VERSIONS:
            kind = "written for a big-endian machine" if version and version % 65536 == 0 else f"of version {version}"
            raise ModelLoadError(f"{self.path}: the GGUF file is {kind}; supported are versions 2 and 3, little-endian")
        self._at, self._num_strings = 8, 0
        try:
            count, keys = self._number("<Q"), self._number("<Q")
            for _ in range(keys):
                key = self._string()
                if key in self.metadata:
                    raise self._damaged(f"key {key} occurs twice")
                self.metadata[key] = self._value(key, self._number("<I"))
            entries = [self._entry() for _ in range(count)]
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"its header cannot be read at byte {self._at:,} ({error}): truncated") from None
        return self._placed(entries)

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from(code, self._map, self._at)
        self._at += struct.calcsize(code)
        return value

    def _bytes(self, count: int) -> bytes:
        data = self._map[self._at : self._at + count]
        if len(data) != count:
            raise struct.error(f"{count:,} bytes wanted, {len(data):,} left")
        self._at += count
        return data

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8")

    def _value(self, key: str, kind: int) -> Any:
        """Read a value as a Python object; an array of numbers as a numpy array."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner == _STRING:
                return list(self._strings(count))
            if inner in _SCALARS:
                return self._numbers(inner, count)
            raise self._damaged(f"key {key} is an array of type {inner}, which GGUF does not define")
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0].item()
        raise self._damaged(f"key {key} has a value of type {kind}, which GGUF does not define")

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> Iterator[str]:
        self._num_strings += count
        if self._num_strings > _MAX_STRINGS:
            raise self._damaged(f"its header has more than {_MAX_STRINGS:,} strings")
        data, at, length = self._map, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            (size,) = length(data, at)
            text = data[at + 8 : at + 8 + size]
            if len(text) != size:
                raise struct.error(f"{size:,} bytes wanted, {len(text):,} left")
            at += 8 + size
            yield text.decode("utf-8")
        self._at = at

    def _entry(self) -> TensorEntry:
        """Read a tensor's entry in the header. Its `begin` and `end` count from the start of the data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._string(), self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        number, begin = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._unsupported(name, f"type {number}") from None
        if kind.name not in supported_types():
            raise self._unsupported(name, kind.name)
        block, size = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % block:
            raise self._damaged(f"tensor {name} has shape {list(shape)}, which {kind.name} cannot have")
        return TensorEntry(name, kind.name, shape, begin, begin + math.prod(shape) // block * size)

    def _placed(self, entries: list[TensorEntry]) -> dict[str, TensorEntry]:
        """Convert the entries' offsets to positions in the file, and check them.

        As in ggml, each tensor must begin where the previous one ends, rounded up to the alignment. Other offsets would
        read another tensor's numbers.
        """
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment={alignment!r} is not a power of two")
        start = -(-self._at // alignment) * alignment
        placed: dict[str, TensorEntry] = {}
        expected, before = start, "the header"
        for entry in entries:
            begin, end = start + entry.begin, start + entry.end
            if entry.name in placed:
                raise self._damaged(f"tensor {entry.name} occurs twice")
            if begin != expected:
                raise self._damaged(
                    f"tensor {entry.name} begins at byte {begin:,}, not at {expected:,}, where {before} ends"
                )
            if end > self.size:
                raise self._damaged(
                    f"tensor {entry.name} should end at byte {end:,}, the file ends at {self.size:,}: truncated"
                )
            placed[entry.name] = TensorEntry(entry.name, entry.dtype, entry.shape, begin, end)
            expected, before = -(-end // alignment) * alignment, f"tensor {entry.name}"
        if self.size > expected:
            raise self._damaged(f"{self.size - expected:,} bytes follow {before}")
        return placed

    def _unsupported(self, name: str, kind: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: tensor {name} is quantized as {kind}, which is not supported (only "
            f"{', '.join(supported_types())}): use another quantization of the model"
        )

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {what}; the file is damaged or not a GGUF file: fetch it again")


@functools.cache
def supported_types() -> tuple[str, ...]:
    """Names of the types that `numbers` reads: plain types, and the types that gguf.quants dequantises."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    found = []
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        if kind.name not in PLAIN:
            try:
                dequantize(np.zeros((1, size), np.uint8), kind)
            except NotImplementedError:
                continue
        found.append(kind.name)
    return tuple(found)


def numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """Decode rows of bytes, uint8[rows, bytes], to [rows, columns]: float32, or the type itself if it is plain.

    Raises ValueError if a number that is not of a plain type is NaN or infinite.
    """
    if kind in PLAIN:
        return raw.view(PLAIN[kind])
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    columns = raw.shape[1] // size * block
    out = np.empty((len(raw), columns), np.float32)
    step = max(1, _CHUNK // columns)
    with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite or NaN
        for start in range(0, len(raw), step):
            some = dequantize(raw[start : start + step], GGMLQuantizationType[kind])
            if not np.isfinite(some.sum()):  # while the chunk is in the CPU's cache
                raise ValueError("a weight that is NaN or infinite")
            out[start : start + step] = some
    return out
