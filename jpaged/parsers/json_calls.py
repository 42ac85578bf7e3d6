"""Parses calls in JSON, `{"name": ..., "arguments": {...}}`: one, several or a list, between a format's tags."""

import dataclasses
from collections.abc import Callable

import msgspec

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_text import read_string, read_value
from jpaged.parsers.scanner import CALL_STEPS, Scanner, Steps
from jpaged.parsers.spelled_tags import HIDDEN

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
Known = Callable[[str], bool]  # returns True if the request has a tool with this name


@dataclasses.dataclass(frozen=True, slots=True)
class JsonTags:
    """A format with calls in JSON.

    begin, end: the tags around calls; the end tag may be missing.
    bare:       also accept calls without tags, at the beginning of the answer.
    others:     other begin tags that models write.
    """

    begin: str
    end: str = ""
    bare: bool = False
    others: tuple[str, ...] = ()

    def read(self, scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
        """Parse an answer to its end."""
        begin = ""
        if not self.bare:
            begin = yield from self._next(scanner, sink)
        while begin is not None:
            scanner.hold(begin)
            if (yield from read_calls(scanner, sink, known)):
                scanner.release()
                if begin and self.end:
                    yield from close(scanner, sink, self.end)
            else:
                sink.content.append(scanner.release())
            begin = yield from self._next(scanner, sink)

    def _next(self, scanner: Scanner, sink: AnswerSink) -> Steps[str | None]:
        if not scanner.step(CALL_STEPS):
            return None
        return (yield from scanner.until((self.begin, *self.others), sink.content.append))


def close(scanner: Scanner, sink: AnswerSink, end: str) -> Steps[None]:
    """Consume an end tag. Other text, and the white space before it, is content."""
    scanner.hold()
    yield from scanner.space()
    if (yield from scanner.accept(end)):
        scanner.release()
    else:
        sink.content.append(scanner.release())


def drop_brace(scanner: Scanner, sink: AnswerSink) -> Steps[None]:
    """Consume a brace too many after a complete call, which small models often write."""
    if sink.is_open:
        return
    scanner.hold()
    yield from scanner.space()
    if (yield from scanner.accept("}")):
        scanner.release()
    else:
        sink.content.append(scanner.release())


def read_calls(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume one call, several calls separated by commas or semicolons, or a list of calls.

    Returns False if there is no call. Then the sink received nothing, and the scanner holds the consumed text.
    """
    first = yield from scanner.space()
    in_list = first == "["
    if in_list:
        scanner.advance(scanner.pos + 1)
        first = yield from scanner.space()
    if first != "{" or not (yield from read_call(scanner, sink, known)):
        return False
    while True:
        yield from drop_brace(scanner, sink)
        scanner.hold()
        char = yield from scanner.space()
        if in_list and char == "]":
            scanner.advance(scanner.pos + 1)
            scanner.release()
            return True
        if char in (",", ";"):
            scanner.advance(scanner.pos + 1)
            char = yield from scanner.space()
        if char != "{" or not scanner.step(CALL_STEPS) or not (yield from read_call(scanner, sink, known)):
            sink.content.append(scanner.release())
            return True


def read_call(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume one call. The scanner is at its brace, and holds. Returns False like `read_calls`.

    It is a call once the name and the beginning of the arguments are read. Invalid text after that is content. A call
    of an unknown tool is read to its end, so that text in its arguments is no call.
    """
    scanner.advance(scanner.pos + 1)
    name: str | None = None
    refused = False  # the request has no tool with this name, or the arguments are not an object
    waiting: str | None = None  # arguments that came before the name
    complete = False  # the arguments are complete
    char = yield from scanner.space()
    while char == '"':
        key = yield from _text(scanner)
        if key is None or not scanner.step() or (yield from scanner.space()) != ":":
            return complete
        scanner.advance(scanner.pos + 1)
        char = yield from scanner.space()
        if key == NAME_KEY and name is None:
            name = (yield from _text(scanner)) if char == '"' else None
            if name is None:
                return False
            refused = refused or not known(name)
            if waiting is not None and not refused:
                emit_call(sink, name, waiting)
                complete = True
        elif key in ARGUMENT_KEYS and char in '{"n' and not (complete or refused or waiting is not None):
            if char == "{" and name is not None:
                sink.start_call(name)
                scanner.release()  # the call has begun, so its text cannot become content
                if not (yield from read_value(scanner, sink.arguments)):
                    return True  # the invalid rest is content
                sink.end_call()
                complete = True
            else:
                waiting = yield from _arguments(scanner, char)
                if waiting is None:
                    return False
                if name is not None:
                    emit_call(sink, name, waiting)
                    complete = True
        else:
            refused = refused or (key in ARGUMENT_KEYS and not complete and waiting is None)
            if not (yield from read_value(scanner, discard)):
                return complete
        char = yield from scanner.space()
        if char != ",":
            break
        scanner.advance(scanner.pos + 1)
        char = yield from scanner.space()
    if char != "}":
        return complete  # the last brace is missing, but the call may be complete
    if name is None:
        return False
    scanner.advance(scanner.pos + 1)
    if refused:
        return False
    if not complete:
        emit_call(sink, name, "{}")
    return True


def emit_call(sink: AnswerSink, name: str, arguments: str, call_id: str | None = None) -> None:
    """Append a complete call. call_id: the model's id."""
    sink.start_call(name, call_id)
    sink.arguments(arguments)
    sink.end_call()


def _arguments(scanner: Scanner, char: str) -> Steps[str | None]:
    """Consume arguments that cannot be streamed: before the name, null, or JSON in a string. None if invalid."""
    if char == "{":
        pieces: list[str] = []
        return "".join(pieces) if (yield from read_value(scanner, pieces.append)) else None
    if char == "n":
        return "{}" if (yield from read_value(scanner, discard)) else None
    text = (yield from _text(scanner)) if char == '"' else None
    if text is None:
        return None
    if not text.strip():
        return "{}"
    if not text.lstrip().startswith("{"):
        return None
    inner = Scanner()
    inner.feed(text)
    inner.ended = True
    inner.steps = scanner.steps
    pieces = []
    whole = yield from read_value(inner, pieces.append)  # never yields, because the text is complete
    scanner.steps = inner.steps
    return "".join(pieces) if whole and not inner.rest().strip() else None


def _text(scanner: Scanner) -> Steps[str | None]:
    """Consume a string, and return its value. None if it is not valid."""
    pieces: list[str] = []
    if not (yield from read_string(scanner, pieces.append)):
        return None
    try:
        return msgspec.json.decode("".join(pieces).replace(HIDDEN, ""), type=str)
    except (msgspec.DecodeError, UnicodeError):  # half a surrogate pair
        return None


def discard(piece: str) -> None:
    """Drop a piece of a value that is skipped."""
