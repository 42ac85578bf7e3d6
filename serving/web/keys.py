"""Reads keys: from flags, files and the environment. Errors and warnings never contain a key."""

import logging
import os
import pathlib
import stat
from collections.abc import Mapping, Sequence

from jpaged.errors import RequestError

logger = logging.getLogger("jpaged.serving")

API_VARIABLES = ("JPAGED_API_KEY", "VLLM_API_KEY")
ADMIN_VARIABLES = ("JPAGED_ADMIN_KEY",)
MAX_FILE_BYTES = 2**20


def read_keys(
    name: str,
    given: Sequence[str],
    file: pathlib.Path | None,
    variables: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[str, ...]:
    """Return all keys, each once: from the flag, the file and the environment variables.

    name: of the flag, such as api_key. Raises RequestError for a bad key, and for a source without a key: the server
    would then require none.
    """
    keys = [_checked(name, key) for key in given]
    if file is not None:
        keys += read_key_file(f"{name}_file", file)
    keys += [_checked(variable, environment[variable]) for variable in variables if variable in environment]
    return tuple(dict.fromkeys(keys))


def read_key_file(name: str, path: pathlib.Path) -> list[str]:
    """Return the keys of a file: one a line. Empty lines are ignored. Warns if other users can read the file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(name, str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise RequestError(name, str(path), f"must have at most {MAX_FILE_BYTES:,} bytes")
    warn_if_others_read(name, path, mode)
    keys = [_checked(name, line) for line in text.splitlines() if line.strip()]
    if not keys:
        raise RequestError(name, str(path), "has no key: write one a line")
    return keys


def warn_if_others_read(name: str, path: pathlib.Path, mode: int) -> None:
    """Warn if other users can read a file with keys. name: of the flag for the file. mode: of the file."""
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s: other users can read the keys in %s. Run: chmod 600 %s", name, path, path)


def warn_of_visible_keys(args: Sequence[str]) -> None:
    """Warn if a command line has keys. args: as typed, without the flags of a file."""
    flags = {word.partition("=")[0].replace("_", "-") for word in args}
    for name, variables in (("api_key", API_VARIABLES), ("admin_key", ADMIN_VARIABLES)):
        if (flag := "--" + name.replace("_", "-")) in flags:
            logger.warning(
                "%s: every user of this machine can read keys on the command line. Use %s-file or %s", flag, flag,
                variables[0],
            )  # fmt: skip


def check_apart(api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
    """Raise RequestError if a key is both an API key and an admin key."""
    if not set(api_keys).isdisjoint(admin_keys):
        raise RequestError("admin_key", "...", "one key is also an API key: every client could use the admin routes")


def _checked(name: str, key: str) -> str:
    """Return a key without the spaces around it. Raises RequestError for one that no header can carry."""
    key = key.strip()
    if not key:
        raise RequestError(name, "", "must not be empty: anyone could send an empty key")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise RequestError(name, "...", "a key must be printable ASCII characters without spaces")
    return key
