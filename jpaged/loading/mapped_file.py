"""Base class of memory-mapped files with weights."""

import mmap
from pathlib import Path

from jpaged.errors import ModelLoadError


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise ModelLoadError if a path is not a regular file, or larger than `max_bytes`."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path}: is not a regular file")  # opening a FIFO would wait for a writer
    if max_bytes is not None and path.stat().st_size > max_bytes:
        raise ModelLoadError(f"{path} is larger than {max_bytes >> 20} MiB: fetch the model again")


class MappedFile:
    """A file open for reading. Subclasses check its size, then map it."""

    _map: mmap.mmap

    def __init__(self, path: Path):
        """Open the file. Raises ModelLoadError."""
        self.path = path
        check_file(path)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
        self.size = self._file.seek(0, 2)

    def release_bytes(self, begin: int, end: int) -> None:
        """Release the memory pages of these bytes. A later access reads them from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap and close the file."""
        self._map.close()
        self._file.close()

    def _map_all(self) -> None:
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
