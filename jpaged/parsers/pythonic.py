"""Parses calls in Python's syntax: `[find(text="a", limit=3), now()]`, as Llama 3.2, Llama 4 and ToolACE write them.

Nothing is evaluated. Strings, numbers, True, False, None, lists and dicts are parsed and emitted as JSON.
"""

import json
import math
import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import Known, discard, emit_call
from jpaged.parsers.json_text import MAX_DEPTH, MAX_SCALAR, Emit, escape_breaks
from jpaged.parsers.scanner import CALL_STEPS, Scanner, Steps

TAGS = ("<|python_start|>", "<|python_tag|>")
END_TAG = "<|python_end|>"
MAX_NAME = 256

_NAME = re.compile(r"[\w.\-]++")
_WORD = re.compile(r"[-+.\w]++")
_NUMBER = re.compile(r"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?+[0-9]++)?+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
# Text with the same meaning in a JSON string. All other characters are translated one at a time.
_PLAIN = re.compile(r"""(?:[^'"\\\x00-\x1f]++|\\[nrtbf"\\])++""")
_BREAKS = re.compile(r"[\n\t\r]++")
_HEX = {"x": 2, "u": 4, "U": 8}
_BELL = {"a": "\\u0007", "v": "\\u000b"}  # escapes that JSON does not have
_OCTAL = re.compile(r"\\[0-7]{1,3}+")


def read(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
    """Parse an answer to its end. Calls are at its beginning, or after one of TAGS."""
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
                    sink.content.append(scanner.release())
        else:
            sink.content.append(scanner.release())
        begin = (yield from scanner.until(TAGS, sink.content.append)) if scanner.step(CALL_STEPS) else None


def _read_list(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume a list of calls. If there is none, returns False: the sink is empty, and the scanner holds the text."""
    if (yield from scanner.space()) != "[":
        return False
    scanner.advance(scanner.pos + 1)
    found = False
    while True:
        yield from scanner.space()
        if not (yield from _read_call(scanner, sink, known)):
            if found:
                sink.content.append(scanner.release())
            return found
        found = True
        scanner.hold()
        char = yield from scanner.space()
        if char not in (",", "]") or not scanner.step(CALL_STEPS):
            sink.content.append(scanner.release())
            return True
        scanner.advance(scanner.pos + 1)
        if char == "]":
            scanner.release()
            return True


def _read_call(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume one call. Returns False if it is not a call: the sink received nothing, and the scanner holds the text.

    The sink receives a call when it is complete. Python has more literals than JSON, such as tuples and sums, so only a
    complete call is known to be translatable. A call of an unknown tool is read too, so that text in its arguments is
    no call.
    """
    name = yield from scanner.run(_NAME, MAX_NAME)
    if not name or (yield from scanner.space()) != "(":
        return False
    is_call = known(name)
    scanner.advance(scanner.pos + 1)
    arguments: list[str] = []
    while True:
        char = yield from scanner.space()
        if char == ")":
            scanner.advance(scanner.pos + 1)
            if is_call:
                scanner.release()
                emit_call(sink, name, "".join(arguments) + "}" if arguments else "{}")
            return is_call
        if char and char in "\"'[{":  # an argument without a name, which no tool has
            is_call = False
            if not scanner.step() or not (yield from read_literal(scanner, discard)):
                return False
            if (yield from scanner.space()) == ",":
                scanner.advance(scanner.pos + 1)
            continue
        key = (yield from scanner.run(_NAME, MAX_NAME)) if scanner.step() else None
        if not key or not key.isidentifier() or (yield from scanner.space()) != "=":
            return False
        scanner.advance(scanner.pos + 1)
        arguments.append((", " if arguments else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        if not (yield from read_literal(scanner, arguments.append)):
            return False
        char = yield from scanner.space()
        if char == ",":
            scanner.advance(scanner.pos + 1)
        elif char != ")":
            return False


def read_literal(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Consume a literal of Python and emit it as JSON. Returns False before the first invalid character."""
    closing: list[str] = []  # closing brackets of the open lists and dicts
    # Or "first", "first key", "colon", "comma", "more", "more keys". "value" and "colon" forbid a closing bracket.
    expected = "value"
    while True:
        char = yield from scanner.space()
        if not char or not scanner.step():
            return False
        if expected == "colon":
            if char != ":":
                return False
            scanner.advance(scanner.pos + 1)
            emit(": ")
            expected = "value"
            continue
        if expected == "comma" and char == ",":
            scanner.advance(scanner.pos + 1)
            expected = "more keys" if closing[-1] == "}" else "more"
            continue
        if closing and char == closing[-1] and expected != "value":
            emit(scanner.advance(scanner.pos + 1))
            closing.pop()
        elif expected == "comma":
            return False
        else:
            if expected.startswith("more"):  # emitted only now: JSON has no comma before a closing bracket
                emit(", ")
            is_key = expected in ("first key", "more keys")
            if char in "\"'":
                if not (yield from _read_string(scanner, emit)):
                    return False
                if is_key:
                    expected = "colon"
                    continue
            elif is_key:
                return False
            elif char in "{[":
                if len(closing) == MAX_DEPTH:
                    return False
                emit(scanner.advance(scanner.pos + 1))
                closing.append("}" if char == "{" else "]")
                expected = "first key" if char == "{" else "first"
                continue
            elif not (yield from _read_word(scanner, emit)):
                return False
        if not closing:
            return True
        expected = "comma"


def _read_word(scanner: Scanner, emit: Emit) -> Steps[bool]:
    while True:
        match = _WORD.match(scanner.text, scanner.pos)
        if not match or match.end() - scanner.pos > MAX_SCALAR:
            return False
        if match.end() < len(scanner.text) or scanner.ended:
            break
        yield
    word = match.group()
    number = _CONSTANTS.get(word) or python_number(word)
    if number is None:
        return False
    scanner.advance(match.end())
    emit(number)
    return True


def python_number(word: str) -> str | None:
    """Return a number as Python reads it (`+3`, `1_000`, `.5`, `0x10`, `007`), as JSON. None if it is not one."""
    if len(word) > MAX_SCALAR or not word.isascii():
        return None
    if _NUMBER.fullmatch(word):
        return word
    for base in (0, 10):
        try:
            return str(int(word, base))
        except ValueError:
            pass
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None


def _read_string(scanner: Scanner, emit: Emit) -> Steps[bool]:
    quote = scanner.advance(scanner.pos + 1)
    emit('"')
    while True:
        match = _PLAIN.match(scanner.text, scanner.pos)
        if match:
            emit(scanner.advance(match.end()))
        char = yield from scanner.peek()
        if char == quote:
            scanner.advance(scanner.pos + 1)
            emit('"')
            return True
        if char == "\\":
            if not (yield from _read_escape(scanner, emit)):
                return False
        elif char in ("'", '"'):
            if not scanner.step():
                return False
            emit(scanner.advance(scanner.pos + 1).replace('"', '\\"'))
        elif match := _BREAKS.match(scanner.text, scanner.pos):
            if not scanner.step():
                return False
            emit(escape_breaks(scanner.advance(match.end())))
        elif char < " ":  # or the end
            return False


def _read_escape(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Consume an escape. As in Python, an unknown escape stands for itself. Returns False if it is not valid.

    `\\/` is a slash, as in JSON: no model means Python's two characters.
    """
    while len(scanner.text) - scanner.pos < 2:
        if scanner.ended:
            return False
        yield
    kind = scanner.text[scanner.pos + 1]
    if not scanner.step():
        return False
    if kind in 'nrtbf"\\/':
        emit(scanner.advance(scanner.pos + 2))
        return True
    if kind in _BELL:
        scanner.advance(scanner.pos + 2)
        emit(_BELL[kind])
        return True
    if kind in "01234567":
        while len(scanner.text) - scanner.pos < 4 and not scanner.ended:
            yield
        match = _OCTAL.match(scanner.text, scanner.pos)
        if match is None:
            return False
        scanner.advance(match.end())
        emit(json.dumps(chr(int(match.group()[1:], 8)))[1:-1])
        return True
    digits = _HEX.get(kind)
    if digits is None:
        if kind < " " and kind not in "\n\t\r":
            return False
        scanner.advance(scanner.pos + 2)
        emit("" if kind == "\n" else "'" if kind == "'" else "\\\\" + escape_breaks(kind))
        return True
    while len(scanner.text) - scanner.pos < 2 + digits:
        if scanner.ended:
            return False
        yield
    code = scanner.text[scanner.pos + 2 : scanner.pos + 2 + digits]
    if not re.fullmatch(r"[0-9a-fA-F]{2,8}", code) or int(code, 16) > 0x10FFFF:
        return False
    scanner.advance(scanner.pos + 2 + digits)
    emit(json.dumps(chr(int(code, 16)))[1:-1])
    return True
