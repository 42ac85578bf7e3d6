"""Files of a folder that no other user can read or write. Each file has a checksum."""

import hashlib
import logging
import os
import pathlib
import stat
import tempfile

logger = logging.getLogger(__name__)


def private_folder(folder: pathlib.Path, purpose: str) -> pathlib.Path | None:
    """Make a folder of mode 0700. Returns None, after one warning, if another user could write it.

    purpose: what its files save, for the warning.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        logger.warning("%s cannot be used (%s), so it does not save %s", folder, error, purpose)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        logger.warning("%s is not a private folder of this user, so it does not save %s", folder, purpose)
        return None
    return folder


def read_file(path: pathlib.Path) -> bytes | None:
    """The data of a file. None if there is no file, and after one warning if it is not whole."""
    try:
        checksum, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s): it is made again", path, error)
        return None
    if checksum != hashlib.sha256(data).hexdigest().encode():
        logger.warning("%s is damaged: it is made again", path)
        return None
    return data


def write_file(path: pathlib.Path, data: bytes) -> None:
    """Store data, whole or not at all. An error is logged."""
    temporary: pathlib.Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = pathlib.Path(file.name)
            file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
