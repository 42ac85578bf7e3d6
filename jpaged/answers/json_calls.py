"""Calls that are JSON: `{"name": ..., "arguments": {...}}`, alone, in a row or in a list, between a format's tags."""

import dataclasses
from collections.abc import Callable

import msgspec

from jpaged.answers.answer import AnswerSink
from jpaged.answers.json_text import read_string, read_value
from jpaged.answers.scanner import CALL_STEPS, Scanner, Steps

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
Known = Callable[[str], bool]  # whether a tool of this name was offered


@dataclasses.dataclass(frozen=True, slots=True)
class JsonTags:
    """Where JSON calls stand.

    begin, end: the tags around them; an end that the model forgets is not missed.
    bare:       whether calls without tags are taken at the beginning of the answer.
    """

    begin: str | None
    end: str = ""
    bare: bool = False

    def read(self, scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
        """Read an answer to its end."""
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
                sink.content.give(scanner.release())
            begin = yield from self._next(scanner, sink)

    def _next(self, scanner: Scanner, sink: AnswerSink) -> Steps[str | None]:
        if self.begin is None or not scanner.step(CALL_STEPS):
            return None
        return (yield from scanner.until((self.begin,), sink.content.give))


def close(scanner: Scanner, sink: AnswerSink, end: str) -> Steps[None]:
    """Consume an end tag, and a brace too many before it, which small models like to write."""
    scanner.hold()
    yield from scanner.space()
    yield from scanner.accept("}")
    yield from scanner.space()
    if (yield from scanner.accept(end)):
        scanner.release()
    else:
        sink.content.give(scanner.release())


def read_calls(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume one call, several with commas or semicolons between them, or a list of them.

    False where there is none: nothing was given to the sink then, what was consumed is what the scanner holds.
    """
    first = yield from scanner.space()
    in_list = first == "["
    if in_list:
        scanner.advance(scanner.pos + 1)
        first = yield from scanner.space()
    if first != "{" or not (yield from read_call(scanner, sink, known)):
        return False
    while True:
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
            sink.content.give(scanner.release())
            return True


def read_call(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume one call; the scanner stands at its brace, and holds. False where it is none, as of `read_calls`.

    From the moment on that name and arguments have begun it is a call: if it breaks later, what follows is content.
    """
    scanner.advance(scanner.pos + 1)
    name: str | None = None
    waiting: str | None = None  # arguments that came before the name
    complete = False            # the arguments
    char = yield from scanner.space()
    while char == '"':
        key = yield from _text(scanner)
        if key is None or not scanner.step() or (yield from scanner.space()) != ":":
            return complete
        scanner.advance(scanner.pos + 1)
        char = yield from scanner.space()
        if key == NAME_KEY and name is None:
            name = (yield from _text(scanner)) if char == '"' else None
            if name is None or not known(name):
                return False
            if waiting is not None:
                _give_call(sink, name, waiting)
                complete = True
        elif key in ARGUMENT_KEYS and not complete and waiting is None:
            if char == "{" and name is not None:
                sink.start_call(name)
                scanner.release()  # it has begun: nothing of it will be content
                if not (yield from read_value(scanner, sink.arguments)):
                    return True  # what is wrong with it is content
                sink.end_call()
                complete = True
            else:
                waiting = yield from _arguments(scanner, char)
                if waiting is None:
                    return False
                if name is not None:
                    _give_call(sink, name, waiting)
                    complete = True
        elif not (yield from read_value(scanner, _nowhere)):
            return complete
        char = yield from scanner.space()
        if char != ",":
            break
        scanner.advance(scanner.pos + 1)
        char = yield from scanner.space()
    if char != "}":
        return complete  # a brace is missing: the call itself is there
    if name is None:
        return False
    scanner.advance(scanner.pos + 1)
    if not complete:
        _give_call(sink, name, "{}")
    return True


def _give_call(sink: AnswerSink, name: str, arguments: str) -> None:
    sink.start_call(name)
    sink.arguments(arguments)
    sink.end_call()


def _arguments(scanner: Scanner, char: str) -> Steps[str | None]:
    """Arguments that cannot be given while they come: they wait for the name, are null, or JSON inside a string."""
    if char == "{":
        pieces: list[str] = []
        return "".join(pieces) if (yield from read_value(scanner, pieces.append)) else None
    if char == "n":
        return "{}" if (yield from read_value(scanner, _nowhere)) else None
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
    whole = yield from read_value(inner, pieces.append)  # never yields: all its text is there
    scanner.steps = inner.steps
    return "".join(pieces) if whole and not inner.rest().strip() else None


def _text(scanner: Scanner) -> Steps[str | None]:
    """Consume a string, and return what it says."""
    pieces: list[str] = []
    if not (yield from read_string(scanner, pieces.append)):
        return None
    try:
        return msgspec.json.decode("".join(pieces), type=str)
    except (msgspec.DecodeError, UnicodeError):  # half a surrogate pair
        return None


def _nowhere(piece: str) -> None:
    """For values that are read over."""
