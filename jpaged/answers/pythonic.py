"""Calls in Python's syntax: `[find(text="a", limit=3), now()]`, as Llama 3.2 and 4 and ToolACE write them.

Nothing is evaluated: strings, numbers, True, False, None, lists and dicts are read, and given as the JSON they mean.
"""

import json
import re

from jpaged.answers.answer import AnswerSink
from jpaged.answers.json_calls import Known
from jpaged.answers.json_text import MAX_DEPTH, MAX_SCALAR, Give, escape_breaks
from jpaged.answers.scanner import CALL_STEPS, Scanner, Steps

TAGS = ("<|python_start|>", "<|python_tag|>")
END_TAG = "<|python_end|>"
MAX_NAME = 256

_NAME = re.compile(r"[\w.\-]++")
_WORD = re.compile(r"[-+.\w]++")
_NUMBER = re.compile(r"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?+[0-9]++)?+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
# What means the same in a JSON string; the rest is translated one by one.
_PLAIN = re.compile(r"""(?:[^'"\\\x00-\x1f]++|\\[nrtbf"\\])++""")
_BREAKS = re.compile(r"[\n\t\r]++")
_HEX = {"x": 2, "u": 4, "U": 8}


def read(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
    """Read an answer to its end. Calls stand at its beginning, or behind one of TAGS."""
    begin: str | None = ""
    while begin is not None:
        scanner.hold(begin)
        tagged = bool(begin)
        for tag in TAGS if not begin else ():
            tagged = tagged or (yield from scanner.accept(tag))
        if (yield from _read_list(scanner, sink, known)):
            scanner.release()
            if tagged:
                scanner.hold()
                yield from scanner.space()
                if (yield from scanner.accept(END_TAG)):
                    scanner.release()
                else:
                    sink.content.give(scanner.release())
        else:
            sink.content.give(scanner.release())
        begin = (yield from scanner.until(TAGS, sink.content.give)) if scanner.step(CALL_STEPS) else None


def _read_list(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume a list of calls. False where there is none: then nothing was given, and the scanner holds it."""
    if (yield from scanner.space()) != "[":
        return False
    scanner.advance(scanner.pos + 1)
    given = False
    while True:
        yield from scanner.space()
        if not (yield from _read_call(scanner, sink, known)):
            if given:
                sink.content.give(scanner.release())
            return given
        given = True
        scanner.hold()
        char = yield from scanner.space()
        if char not in (",", "]") or not scanner.step(CALL_STEPS):
            sink.content.give(scanner.release())
            return True
        scanner.advance(scanner.pos + 1)
        if char == "]":
            scanner.release()
            return True


def _read_call(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume one call. From its first argument's name on it is one: if it breaks later, what follows is content."""
    name = yield from scanner.run(_NAME, MAX_NAME)
    if not name or not known(name) or (yield from scanner.space()) != "(":
        return False
    scanner.advance(scanner.pos + 1)
    first = True
    while True:
        char = yield from scanner.space()
        if char == ")":
            scanner.advance(scanner.pos + 1)
            if first:
                sink.start_call(name)
            sink.arguments("{}" if first else "}")
            sink.end_call()
            return True
        key = (yield from scanner.run(_NAME, MAX_NAME)) if scanner.step() else None
        if not key or not key.isidentifier() or (yield from scanner.space()) != "=":
            return not first
        scanner.advance(scanner.pos + 1)
        if first:
            sink.start_call(name)
            scanner.release()
        sink.arguments(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        first = False
        if not (yield from read_literal(scanner, sink.arguments)):
            return True
        char = yield from scanner.space()
        if char == ",":
            scanner.advance(scanner.pos + 1)
        elif char != ")":
            return True


def read_literal(scanner: Scanner, give: Give) -> Steps[bool]:
    """Consume one of Python's literals, giving it as JSON. False before the first character that is none of it."""
    closing: list[str] = []
    expected = "value"  # or first, first key, colon, comma, more, more keys: all but colon and this one may be an end
    while True:
        char = yield from scanner.space()
        if not char or not scanner.step():
            return False
        if expected == "colon":
            if char != ":":
                return False
            scanner.advance(scanner.pos + 1)
            give(": ")
            expected = "value"
            continue
        if expected == "comma" and char == ",":
            scanner.advance(scanner.pos + 1)
            expected = "more keys" if closing[-1] == "}" else "more"
            continue
        if closing and char == closing[-1] and expected != "value":
            give(scanner.advance(scanner.pos + 1))
            closing.pop()
        elif expected == "comma":
            return False
        else:
            if expected.startswith("more"):  # a comma before the end stands for nothing in Python
                give(", ")
            is_key = expected in ("first key", "more keys")
            if char in "\"'":
                if not (yield from _read_string(scanner, give)):
                    return False
                if is_key:
                    expected = "colon"
                    continue
            elif is_key:
                return False
            elif char in "{[":
                if len(closing) == MAX_DEPTH:
                    return False
                give(scanner.advance(scanner.pos + 1))
                closing.append("}" if char == "{" else "]")
                expected = "first key" if char == "{" else "first"
                continue
            elif not (yield from _read_word(scanner, give)):
                return False
        if not closing:
            return True
        expected = "comma"


def _read_word(scanner: Scanner, give: Give) -> Steps[bool]:
    while True:
        match = _WORD.match(scanner.text, scanner.pos)
        if not match or match.end() - scanner.pos > MAX_SCALAR:
            return False
        if match.end() < len(scanner.text) or scanner.ended:
            break
        yield
    word = match.group()
    if word not in _CONSTANTS and not _NUMBER.fullmatch(word):
        return False
    scanner.advance(match.end())
    give(_CONSTANTS.get(word, word))
    return True


def _read_string(scanner: Scanner, give: Give) -> Steps[bool]:
    quote = scanner.advance(scanner.pos + 1)
    give('"')
    while True:
        match = _PLAIN.match(scanner.text, scanner.pos)
        if match:
            give(scanner.advance(match.end()))
        char = yield from scanner.peek()
        if char == quote:
            scanner.advance(scanner.pos + 1)
            give('"')
            return True
        if char == "\\":
            if not (yield from _read_escape(scanner, give)):
                return False
        elif char in ("'", '"'):
            if not scanner.step():
                return False
            give(scanner.advance(scanner.pos + 1).replace('"', '\\"'))
        elif match := _BREAKS.match(scanner.text, scanner.pos):
            if not scanner.step():
                return False
            give(escape_breaks(scanner.advance(match.end())))
        elif char < " ":  # or the end
            return False


def _read_escape(scanner: Scanner, give: Give) -> Steps[bool]:
    """Consume an escape; one that Python does not know stands for itself, as in Python."""
    while len(scanner.text) - scanner.pos < 2:
        if scanner.ended:
            return False
        yield
    kind = scanner.text[scanner.pos + 1]
    if not scanner.step():
        return False
    if kind in 'nrtbf"\\':
        give(scanner.advance(scanner.pos + 2))
        return True
    digits = _HEX.get(kind)
    if digits is None:
        if kind < " " and kind not in "\n\t\r":
            return False
        scanner.advance(scanner.pos + 2)
        give("" if kind == "\n" else "'" if kind == "'" else "\\\\" + escape_breaks(kind))
        return True
    while len(scanner.text) - scanner.pos < 2 + digits:
        if scanner.ended:
            return False
        yield
    code = scanner.text[scanner.pos + 2 : scanner.pos + 2 + digits]
    if not re.fullmatch(r"[0-9a-fA-F]{2,8}", code) or int(code, 16) > 0x10FFFF:
        return False
    scanner.advance(scanner.pos + 2 + digits)
    give(json.dumps(chr(int(code, 16)))[1:-1])
    return True
