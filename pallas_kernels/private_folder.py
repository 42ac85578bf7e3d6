"""Files in a folder that no other user can read or write. Each file has a checksum.

Nothing here raises: data that cannot be stored or read is made again. Each warning is logged once.
"""

import functools
import hashlib
import logging
import os
import pathlib
import stat
import tempfile

logger = logging.getLogger(__name__)


@functools.cache  # once, not for each file and each attempt
def warn(text: str) -> None:
    logger.warning("%s", text)


def private_folder(path: pathlib.Path, without: str) -> pathlib.Path | None:
    """Create a folder of mode 0700. Returns None, after a warning, if that fails or if other users have access.

    without: what happens without the folder, for the warning.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
    except OSError as error:
        warn(f"{path} cannot be used ({error}): {without}")
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        warn(f"{path} is not a private folder of this user: {without}")
        return None
    return path


def read_file(path: pathlib.Path) -> bytes | None:
    """The data of a file; None if it is missing, damaged or unreadable."""
    try:
        checksum, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        warn(f"{path} cannot be read ({error}): it is made again")
        return None
    if checksum != hashlib.sha256(data).hexdigest().encode():
        warn(f"{path} is damaged: it is made again")
        return None
    return data


def write_file(path: pathlib.Path, data: bytes, without: str) -> None:
    """Store data, whole or not at all. without: what happens without the file, for the warning."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as temporary:
            part = pathlib.Path(temporary) / path.name
            part.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
            part.replace(path)
    except OSError as error:
        warn(f"{path.parent} cannot be written ({error.strerror}): {without}")
