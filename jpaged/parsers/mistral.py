"""Parses calls of Mistral's models: `[TOOL_CALLS] [{...}, {...}]`, and of newer ones `[TOOL_CALLS]name[ARGS]{...}`."""

import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import discard, drop_brace, emit_call, read_calls
from jpaged.parsers.json_text import read_value
from jpaged.parsers.known_tools import KnownTools
from jpaged.parsers.scanner import CALL_STEPS, Scanner, Steps

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 256

_NAME = re.compile(r"[\w.\-]++")


def read(scanner: Scanner, sink: AnswerSink, known: KnownTools) -> Steps[None]:
    """Parse an answer to its end."""
    while scanner.step(CALL_STEPS):
        if (yield from scanner.until((BEGIN,), sink.content.append)) is None:
            return
        scanner.hold(BEGIN)
        bare = (yield from scanner.space()) in ("[", "{")
        if (yield from read_calls(scanner, sink, known) if bare else _read_named(scanner, sink, known)):
            scanner.release()
        else:
            sink.content.append(scanner.release())


def _read_named(scanner: Scanner, sink: AnswerSink, known: KnownTools) -> Steps[bool]:
    """Consume `name[ARGS]{...}`, with or without the model's id of the call. Returns False if it is not a call.

    The arguments may be missing if another call follows, or if the tool has no parameters.
    """
    name = yield from scanner.run(_NAME, MAX_NAME)
    if not name:
        return False
    yield from scanner.space()
    if (yield from scanner.accept(CALL_ID)):
        yield from scanner.run(_NAME, MAX_NAME)
    yield from scanner.space()
    tagged = yield from scanner.accept(ARGUMENTS)
    following = yield from scanner.space()
    if not known(name):
        if following == "{":
            yield from read_value(scanner, discard)  # text in the arguments of an unknown tool is no call
        return False
    if following != "{":
        at_end = following == "" and not known.keys(name)  # otherwise the answer may be cut off before the arguments
        if not tagged or not (at_end or (yield from scanner.is_next(BEGIN))):
            return False
        emit_call(sink, name, "{}")
        return True
    sink.start_call(name)
    scanner.release()
    if (yield from read_value(scanner, sink.arguments)):
        sink.end_call()
        yield from drop_brace(scanner, sink)
    return True
