"""Reads the input of a custom tool from the arguments of a call, `{"input": "..."}`, while they are written."""

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_HEAD = 64  # characters; models write less white space
_TEXT = re.compile(r'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+')
_ALONE = re.compile("[\ud800-\udfff]")  # half a surrogate pair, which UTF-8 does not have
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")  # its other half follows


class CustomInput:
    """Streaming reader of one call's input. Arguments in another form are returned unchanged."""

    def __init__(self) -> None:
        self._waiting = ""
        self._in_text = False
        self._ended = False
        self._other = False

    def feed(self, arguments: str) -> str:
        """Append a piece of the arguments. Returns the new part of the input, without an incomplete escape."""
        if self._ended:
            return ""
        if self._other:
            return arguments
        self._waiting += arguments
        if not self._in_text:
            head = _HEAD.match(self._waiting)
            if head is None:
                self._other = len(self._waiting) > _MAX_HEAD
                return self.finish() if self._other else ""
            self._in_text, self._waiting = True, self._waiting[head.end() :]
        text = _TEXT.match(self._waiting)
        end = 0 if text is None else text.end()
        half = _HALF_PAIR.search(self._waiting, max(end - 6, 0), end)
        if half is not None and len(self._waiting) < end + 6 and not self._waiting.startswith('"', end):
            end = half.start()
        piece, self._waiting = self._waiting[:end], self._waiting[end:]
        self._ended = self._waiting.startswith('"')
        try:
            return _ALONE.sub("\ufffd", json.loads(f'"{piece}"', strict=False))
        except ValueError:  # an escape that JSON does not have
            return piece

    def finish(self) -> str:
        """Return the rest of the input: arguments in another form, or the beginning of an escape."""
        rest = "" if self._ended else self._waiting
        self._waiting = ""
        return rest
