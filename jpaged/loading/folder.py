"""Writes a model's folder: checks its path and disk space, fills a temporary folder, and renames it when complete."""

import contextlib
import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import RequestError
from jpaged.loading.hub import MODEL_FILES, PARTIAL, TOKENIZER_FILES
from jpaged.loading.safetensors_file import DTYPES, SafetensorsFile

SPARE = 1 << 20  # bytes for files other than arrays
_CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}


def check_out(out: Path, source: Path) -> None:
    """Raise RequestError unless `out` is new or an empty folder, and outside the model's own folder `source`."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        kind = "a folder that is not empty" if out.is_dir() else "a file"
        raise RequestError("out", str(out), f"there is {kind}: name a new folder, or remove it first")
    if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise RequestError("out", str(out), f"is inside the model's folder {source}: name a folder elsewhere")


def check_space(out: Path, needed: int) -> None:
    """Raise RequestError if the file system of `out` has fewer free bytes than `needed`."""
    there = next(path for path in out.absolute().parents if path.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise RequestError("out", str(out), f"needs {needed:,} bytes, and {there} has {free:,} free")


@contextlib.contextmanager
def complete_or_gone(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. It is renamed to `out` at the end, or removed after an error.

    If `out` is a symbolic link, its target is written.
    """
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=PARTIAL, dir=out.parent))
    except OSError as error:
        raise RequestError("out", str(out), f"cannot be written: {error.strerror}") from None
    try:
        yield work
        work.chmod(0o777 & ~_umask())
        work.rename(out)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def copy_small_files(folder: Path, out: Path) -> None:
    """Copy config and tokenizer files unchanged."""
    patterns = [p for p in (*MODEL_FILES, *TOKENIZER_FILES) if ".safetensors" not in p]
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
            shutil.copyfile(path, out / path.name)
    for path in folder.glob("*Pooling/config.json"):
        copied = out / path.relative_to(folder)
        copied.parent.mkdir()
        shutil.copyfile(path, copied)


def create_safetensors(path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Create a file with its header and space for all tensors. tensors: dtype and shape by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * kind.itemsize
        header[name] = {"dtype": _CODES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


class TensorWriter:
    """Writes tensors to the safetensors files of a folder, which have their headers already."""

    def __init__(self, folder: Path):
        self._place = {}
        self._open = contextlib.ExitStack()
        for path in sorted(folder.glob("*.safetensors")):
            file = SafetensorsFile(path)
            writer = self._open.enter_context(path.open("r+b"))
            self._place |= {name: (writer, entry) for name, entry in file.entries.items()}
            file.close()

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a tensor. The array has the dtype and shape of the header."""
        writer, entry = self._place[name]
        writer.seek(entry.begin)
        writer.write(np.ascontiguousarray(array).view(np.uint8).data)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def size_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
