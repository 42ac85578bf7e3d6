"""Parses JSON while it streams. Each token is validated before it is emitted, so the emitted text begins valid JSON."""

import re
from collections.abc import Callable

from jpaged.parsers.scanner import SPACE, Scanner, Steps

MAX_DEPTH = 64      # nested objects and arrays; templates and clients that recurse can handle more
MAX_SCALAR = 1_000  # characters of a number

# All quantifiers are possessive (`++`): no backtracking, so the time is linear.
_STRING = re.compile(r'(?:[^"\\\x00-\x08\x0b\x0c\x0e-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++')
_WORD = re.compile(r"[-+.0-9A-Za-z]++")
_SCALAR = re.compile(r"(?:-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?+[0-9]++)?+|true|false|null)")
_CUT = re.compile(r"[-+.0-9eE]++|t(?:ru?+)?+|f(?:a(?:ls?+)?+)?+|n(?:ul?+)?+")  # the beginning of a scalar
Emit = Callable[[str], None]


def read_value(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Consume one value and emit it token by token.

    Tokens are emitted as written, with the white space of `json.dumps`. Line breaks and tabs in strings, which models
    write, are emitted as escapes. Returns False before the first invalid token. Returns False too if the text ends
    inside the value; then the beginning of the last token is emitted.
    """
    closing: list[str] = []  # closing brackets of the open objects and arrays
    # Or "first value", "key", "first key", "colon", "comma". Values with "first", and "comma", allow a closing bracket.
    expected = "value"
    while True:
        # Skip white space without the scanner's generator if possible: a generator for each token costs the most time.
        space = SPACE.match(scanner.text, scanner.pos)
        if space is None or space.end() == len(scanner.text):
            char = yield from scanner.space()
        else:
            scanner.advance(space.end())
            char = scanner.text[scanner.pos]
        if not char or not scanner.step():
            return False
        if expected == "colon":
            if char != ":":
                return False
            emit(scanner.advance(scanner.pos + 1) + " ")
            expected = "value"
            continue
        if expected == "comma":
            if char == ",":
                emit(scanner.advance(scanner.pos + 1) + " ")
                expected = "key" if closing[-1] == "}" else "value"
                continue
            if char != closing[-1]:
                return False
            emit(scanner.advance(scanner.pos + 1))
            closing.pop()
        elif char == '"':
            if not (yield from read_string(scanner, emit)):
                return False
            if expected in ("key", "first key"):
                expected = "colon"
                continue
        elif expected.startswith("first") and char == closing[-1]:
            emit(scanner.advance(scanner.pos + 1))
            closing.pop()
        elif expected in ("key", "first key"):
            return False
        elif char in "{[":
            if len(closing) == MAX_DEPTH:
                return False
            emit(scanner.advance(scanner.pos + 1))
            closing.append("}" if char == "{" else "]")
            expected = "first key" if char == "{" else "first value"
            continue
        elif not (yield from _read_scalar(scanner, emit)):
            return False
        if not closing:
            return True
        expected = "comma"


def read_string(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Consume and emit a string with its quotes. The scanner is at the first quote. Returns False if it is invalid."""
    emit(scanner.advance(scanner.pos + 1))
    while True:
        match = _STRING.match(scanner.text, scanner.pos)
        if match:
            piece = scanner.advance(match.end())
            emit(escape_breaks(piece))
        char = yield from scanner.peek()
        if char == '"':
            emit(scanner.advance(scanner.pos + 1))
            return True
        if char == "\\":
            if not (yield from _whole_escape(scanner, emit)):
                return False
        elif not char or (char < " " and char not in "\n\t\r"):
            return False


def escape_breaks(text: str) -> str:
    """Replace line breaks and tabs in the text of a JSON string by escapes."""
    for char, escape in (("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        text = text.replace(char, escape)
    return text


def _whole_escape(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Wait until the next escape is complete, without consuming it. Returns False if it is not valid."""
    while True:
        escape = scanner.text[scanner.pos : scanner.pos + 6]
        if _STRING.match(escape):
            return True
        if not (len(escape) == 1 or (escape[1] == "u" and len(escape) < 6)):
            return False
        if scanner.ended:
            emit(scanner.rest())
            return False
        yield


def _read_scalar(scanner: Scanner, emit: Emit) -> Steps[bool]:
    while True:
        match = _WORD.match(scanner.text, scanner.pos)
        if not match or match.end() - scanner.pos > MAX_SCALAR:
            return False
        if match.end() < len(scanner.text) or scanner.ended:
            break
        yield
    if not _SCALAR.fullmatch(match.group()):
        if match.end() == len(scanner.text) and _CUT.fullmatch(match.group()):
            emit(scanner.advance(match.end()))
        return False
    emit(scanner.advance(match.end()))
    return True
