"""The folder of machine code: private to its user, read and written whole, one process at a time.

Nothing here raises an error: without the folder kernels compile at every start.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import stat
import tempfile
import time
from collections.abc import Iterator

import platformdirs

logger = logging.getLogger(__name__)

LOCK_SECONDS, LOOK_SECONDS = 120.0, 0.02  # longest wait for another process, and time between two looks


@functools.cache  # one line, not one for each kernel and each attempt
def _warn(text: str) -> None:
    logger.warning("%s", text)


@functools.cache
def folder() -> pathlib.Path | None:
    """The folder of machine code, which only this user can write; None if there is no such folder.

    Machine code of another user would run with this user's rights.
    """
    path = pathlib.Path(platformdirs.user_cache_dir("pallas_kernels")) / "native"
    if not path.is_absolute():  # a user without a home
        _warn(f"{path} is not an absolute path: native kernels compile at every start. Set HOME")
        return None
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
    except OSError as error:
        _warn(f"{path} cannot be used ({error}): native kernels compile at every start")
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        _warn(f"{path} is not a private folder of this user: native kernels compile at every start")
        return None
    return path


def read(path: pathlib.Path | None) -> bytes | None:
    """The machine code in a file; None if there is no whole one."""
    if path is None:
        return None
    try:
        checksum, _, code = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"{path} cannot be read ({error}): the native kernel compiles again")
        return None
    if checksum != hashlib.sha256(code).hexdigest().encode():
        _warn(f"{path} is damaged: the native kernel compiles again")
        return None
    return code


def write(path: pathlib.Path | None, code: bytes) -> None:
    """Store machine code, whole or not at all."""
    if path is None:
        return
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as temporary:
            part = pathlib.Path(temporary) / path.name
            part.write_bytes(hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
            part.replace(path)
    except OSError as error:
        _warn(f"{path.parent} cannot be written ({error.strerror}): native kernels compile at every start")


@contextlib.contextmanager
def only_one(path: pathlib.Path | None) -> Iterator[None]:
    """Let one process at a time compile the kernel that is stored at `path`. The others wait, and then find its code.

    The lock ends with its process. A process that waits longer than `LOCK_SECONDS`, or has no lock, compiles as well.
    """
    with contextlib.ExitStack() as stack:
        if path is not None:
            _lock(stack, path.with_suffix(".lock"))
        yield


def _lock(stack: contextlib.ExitStack, path: pathlib.Path) -> None:
    """Lock a file until the stack closes it."""
    import fcntl  # Windows has none, and no native kernels

    with contextlib.suppress(OSError):  # a folder that cannot be written, or a file system without locks
        file = stack.enter_context(path.open("ab"))
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    _warn(f"another process has held {path} for {LOCK_SECONDS:g} s: compiling the kernel as well")
                    return
                time.sleep(LOOK_SECONDS)
