"""Folders that the operator names, such as --lora-dirs, and paths in request bodies that must be below them."""

import os
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from jpaged.errors import RequestError, shown
from jpaged.serving.web.error_responses import APIError


class OperatorFolders:
    """The folders of one flag."""

    def __init__(self, option: str, folders: Sequence[Path]):
        """option: name of the flag, such as lora_dirs. Raises RequestError for a path that is not a folder."""
        self._flag = "--" + option.replace("_", "-")
        self._folders = [folder.expanduser().resolve() for folder in folders]
        for folder in self._folders:
            if not folder.is_dir():
                raise RequestError(option, str(folder), "is not a folder")

    def find(self, field: str, path: str, *, is_wanted: Callable[[Path], bool], closed: str) -> Path | None:
        """Return the absolute path of a file or folder below one of the folders; None: there is none. Reads the disk.

        path: absolute, or below one of the folders. field: of the body, for errors. is_wanted: whether the file or
        folder is of the right kind. closed: reason for the error if the operator has named no folder.
        Raises APIError 403 if the path, or a link at or below it, leads out of the folders.
        """
        if not self._folders:
            message = f"{field}: {closed}: start it with {self._flag} FOLDER"
            raise APIError(HTTPStatus.FORBIDDEN, message, param=field)
        is_inside = False
        try:
            for allowed in self._folders:
                found = (allowed / path).resolve()  # an absolute path replaces `allowed`
                if found.is_relative_to(allowed):
                    is_inside = True
                    if is_wanted(found):
                        self._check_links(field, found)
                        return found
        except (OSError, ValueError):  # a name that no file can have
            is_inside = True
        if not is_inside:
            raise self._outside(field, path)
        return None

    def _check_links(self, field: str, found: Path) -> None:
        """Raise APIError if a file below a folder is a link to a place outside."""
        for parent, folders, files in os.walk(found):
            for entry in (Path(parent, name) for name in (*folders, *files)):
                if entry.is_symlink() and not any(entry.resolve().is_relative_to(each) for each in self._folders):
                    raise self._outside(field, str(entry))

    def _outside(self, field: str, path: str) -> APIError:
        folders = ", ".join(map(str, self._folders))
        message = f"{field}: {shown(path)} is not below a folder of {self._flag} ({folders})"
        return APIError(HTTPStatus.FORBIDDEN, message, param=field)
