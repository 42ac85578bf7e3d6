"""JSON as it comes: checked to the letter while it passes, so that whatever part was given on begins valid JSON."""

import re
from collections.abc import Callable

from jpaged.answers.scanner import SPACE, Scanner, Steps

MAX_DEPTH = 64      # objects and arrays inside each other; templates and clients that recurse stand more
MAX_SCALAR = 1_000  # characters of a number

# Possessive throughout (`++`): nothing that was matched is tried again, so time is linear.
_STRING = re.compile(r'(?:[^"\\\x00-\x08\x0b\x0c\x0e-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++')
_WORD = re.compile(r"[-+.0-9A-Za-z]++")
_SCALAR = re.compile(r"(?:-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?+[0-9]++)?+|true|false|null)")
_CUT = re.compile(r"[-+.0-9eE]++|t(?:ru?+)?+|f(?:a(?:ls?+)?+)?+|n(?:ul?+)?+")  # the beginning of a scalar
Give = Callable[[str], None]


def read_value(scanner: Scanner, give: Give) -> Steps[bool]:
    """Consume one value, giving it on token by token. False where it is none: before the first wrong token, or at the
    end of a text that breaks off, whose last token is given as far as it came.

    Tokens are given as they were written, spaced as `json.dumps` spaces them; line breaks and tabs in strings, which
    models do write, as escapes.
    """
    closing: list[str] = []  # of what is open
    expected = "value"
    while True:
        # Here without asking the scanner where it can be: once a token, a generator is what costs most.
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
            give(scanner.advance(scanner.pos + 1) + " ")
            expected = "value"
            continue
        if expected == "comma":
            if char == ",":
                give(scanner.advance(scanner.pos + 1) + " ")
                expected = "key" if closing[-1] == "}" else "value"
                continue
            if char != closing[-1]:
                return False
            give(scanner.advance(scanner.pos + 1))
            closing.pop()
        elif char == '"':
            if not (yield from read_string(scanner, give)):
                return False
            if expected in ("key", "first key"):
                expected = "colon"
                continue
        elif expected.startswith("first") and char == closing[-1]:
            give(scanner.advance(scanner.pos + 1))
            closing.pop()
        elif expected in ("key", "first key"):
            return False
        elif char in "{[":
            if len(closing) == MAX_DEPTH:
                return False
            give(scanner.advance(scanner.pos + 1))
            closing.append("}" if char == "{" else "]")
            expected = "first key" if char == "{" else "first value"
            continue
        elif not (yield from _read_scalar(scanner, give)):
            return False
        if not closing:
            return True
        expected = "comma"


def read_string(scanner: Scanner, give: Give) -> Steps[bool]:
    """Consume a string with its quotes; the scanner stands at the first of them."""
    give(scanner.advance(scanner.pos + 1))
    while True:
        match = _STRING.match(scanner.text, scanner.pos)
        if match:
            piece = scanner.advance(match.end())
            give(escape_breaks(piece))
        char = yield from scanner.peek()
        if char == '"':
            give(scanner.advance(scanner.pos + 1))
            return True
        if char == "\\":
            if not (yield from _whole_escape(scanner, give)):
                return False
        elif not char or (char < " " and char not in "\n\t\r"):
            return False


def escape_breaks(text: str) -> str:
    """Text of a JSON string with its line breaks and tabs as escapes."""
    for char, escape in (("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        text = text.replace(char, escape)
    return text


def _whole_escape(scanner: Scanner, give: Give) -> Steps[bool]:
    """Wait until the escape that comes next is there; it is consumed with what follows. False where it is none."""
    while True:
        escape = scanner.text[scanner.pos : scanner.pos + 6]
        if _STRING.match(escape):
            return True
        if not (len(escape) == 1 or (escape[1] == "u" and len(escape) < 6)):
            return False
        if scanner.ended:
            give(scanner.rest())
            return False
        yield


def _read_scalar(scanner: Scanner, give: Give) -> Steps[bool]:
    while True:
        match = _WORD.match(scanner.text, scanner.pos)
        if not match or match.end() - scanner.pos > MAX_SCALAR:
            return False
        if match.end() < len(scanner.text) or scanner.ended:
            break
        yield
    if not _SCALAR.fullmatch(match.group()):
        if match.end() == len(scanner.text) and _CUT.fullmatch(match.group()):
            give(scanner.advance(match.end()))
        return False
    give(scanner.advance(match.end()))
    return True
