"""The folder of machine code, private to its user. Nothing here raises: without it, kernels compile at every start."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Iterator

import platformdirs

from pallas_kernels.private_folder import private_folder, read_file, warn, write_file

LOCK_SECONDS, LOOK_SECONDS = 120.0, 0.02  # longest wait for another process, and time between attempts
WITHOUT = "native kernels compile at every start"


@functools.cache
def folder() -> pathlib.Path | None:
    """The private folder of machine code, or None. Machine code of other users would run with this user's rights."""
    path = pathlib.Path(platformdirs.user_cache_dir("pallas_kernels")) / "native"
    if not path.is_absolute():  # a user without a home
        warn(f"{path} is not an absolute path: {WITHOUT}. Set HOME")
        return None
    return private_folder(path, WITHOUT)


def read(path: pathlib.Path | None) -> bytes | None:
    """The machine code in a file; None if it is missing or damaged."""
    return None if path is None else read_file(path)


def write(path: pathlib.Path | None, code: bytes) -> None:
    """Store machine code, whole or not at all."""
    if path is not None:
        write_file(path, code, WITHOUT)


@contextlib.contextmanager
def only_one(path: pathlib.Path | None) -> Iterator[None]:
    """Let one process at a time compile the kernel for `path`. Other processes wait, and then find the code on disk.

    The lock ends with its process. A process that waits longer than `LOCK_SECONDS`, or gets no lock, compiles as well.
    """
    with contextlib.ExitStack() as stack:
        if path is not None:
            _lock(stack, path.with_suffix(".lock"))
        yield


def _lock(stack: contextlib.ExitStack, path: pathlib.Path) -> None:
    """Lock a file until the stack closes it."""
    import fcntl  # Windows has none, and no native kernels

    with contextlib.suppress(OSError):  # a read-only folder, or a file system without locks
        file = stack.enter_context(path.open("ab"))
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    warn(f"another process has held {path} for {LOCK_SECONDS:g} s: compiling the kernel as well")
                    return
                time.sleep(LOOK_SECONDS)
