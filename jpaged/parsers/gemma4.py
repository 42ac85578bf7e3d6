"""Parses calls of Gemma 4: `<|tool_call>call:find{text:<|"|>a b<|"|>,limit:3}<tool_call|>`."""

import json
import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import Known, discard, drop_brace, emit_call
from jpaged.parsers.json_text import MAX_DEPTH, MAX_SCALAR, Emit
from jpaged.parsers.known_tools import json_value
from jpaged.parsers.scanner import Scanner, Steps
from jpaged.parsers.sections import Section

BEGIN, END, QUOTE, RESULT = "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"
SECTION = Section(BEGIN, "", "call:")
MAX_NAME = 256

_NAME = re.compile(r"[\w.\-]++")
_KEY = re.compile(r"[^:,<>{}\[\]]++")
_BARE = re.compile(r"[^,<>{}\[\]]++")  # a number, a constant, or a string whose quotes the model forgot


def read(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
    """Parse an answer to its end."""
    yield from SECTION.read(scanner, sink, lambda tag: _read_call(scanner, sink, known, tag))


def _read_call(scanner: Scanner, sink: AnswerSink, known: Known, tag: str) -> Steps[bool]:
    yield from scanner.space()
    if not (yield from scanner.accept(tag)):
        return False
    name = yield from scanner.run(_NAME, MAX_NAME)
    following = (yield from scanner.space()) if name else ""
    if not name or not known(name):
        if following == "{":
            yield from _read_value(scanner, discard)  # text in the arguments of an unknown tool is no call
        return False
    if following == "{":
        sink.start_call(name)
        scanner.release()  # the call has begun, so its text cannot become content
        if not (yield from _read_value(scanner, sink.arguments)):
            return False
        sink.end_call()
        yield from drop_brace(scanner, sink)
    elif (yield from scanner.accept("()")) or (yield from scanner.is_next(END)):
        emit_call(sink, name, "{}")
    else:
        return False
    scanner.hold()
    for tag_after in (END, RESULT):  # a model that does not stop goes on with a tag of the call's result
        yield from scanner.space()
        if (yield from scanner.accept(tag_after)):
            scanner.hold()
    sink.content.append(scanner.release())
    return True


def _read_value(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Consume a value, and emit it as JSON. Returns False before the first invalid character."""
    closing: list[str] = []  # closing brackets of the open objects and arrays
    # Or "key", "comma", or with "first" or "more" (after a comma) before it: then a closing bracket may come instead.
    expected = "value"
    while True:
        char = yield from scanner.space()
        if not char or not scanner.step():
            return False
        if expected == "comma" and char == ",":
            scanner.advance(scanner.pos + 1)
            expected = "more key" if closing[-1] == "}" else "more value"
            continue
        if closing and char == closing[-1] and expected != "value":
            emit(scanner.advance(scanner.pos + 1))
            closing.pop()
            if not closing:
                return True
            expected = "comma"
            continue
        if expected == "comma":
            return False
        if expected.startswith("more"):
            emit(", ")
        if expected.endswith("key"):
            if not (yield from _read_key(scanner, emit)):
                return False
            expected = "value"
            continue
        if char in "{[":
            if len(closing) == MAX_DEPTH:
                return False
            emit(scanner.advance(scanner.pos + 1))
            closing.append("}" if char == "{" else "]")
            expected = "first key" if char == "{" else "first value"
            continue
        elif (yield from scanner.accept(QUOTE)):
            emit('"')
            if (yield from scanner.until((QUOTE,), lambda text: emit(_escaped(text)), cut=False)) is None:
                return False
            emit('"')
        else:
            word = yield from scanner.run(_BARE, MAX_SCALAR)
            if not word or not (yield from scanner.peek()):
                return False
            emit(json_value(word.strip(), frozenset(), scanner))
        if not closing:
            return True
        expected = "comma"


def _read_key(scanner: Scanner, emit: Emit) -> Steps[bool]:
    quoted = yield from scanner.accept(QUOTE)
    key = yield from scanner.run(_KEY, MAX_NAME)
    if not key or (quoted and not (yield from scanner.accept(QUOTE))) or (yield from scanner.space()) != ":":
        return False
    scanner.advance(scanner.pos + 1)
    emit(f'"{_escaped(key.strip())}": ')
    return True


def _escaped(text: str) -> str:
    """Return a text as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
