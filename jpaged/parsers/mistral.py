"""Parses calls of Mistral's models: `[TOOL_CALLS] [{...}, {...}]`, and of newer ones `[TOOL_CALLS]name[ARGS]{...}`."""

import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import Known, read_calls
from jpaged.parsers.json_text import read_value
from jpaged.parsers.scanner import CALL_STEPS, Scanner, Steps

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 256

_NAME = re.compile(r"[\w.\-]++")


def read(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
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


def _read_named(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume `name[ARGS]{...}`, with or without the model's id of the call. Returns False if it is not a call."""
    name = yield from scanner.run(_NAME, MAX_NAME)
    if not name or not known(name):
        return False
    yield from scanner.space()
    if (yield from scanner.accept(CALL_ID)):
        yield from scanner.run(_NAME, MAX_NAME)
    yield from scanner.space()
    yield from scanner.accept(ARGUMENTS)
    if (yield from scanner.space()) != "{":
        return False
    sink.start_call(name)
    scanner.release()
    if (yield from read_value(scanner, sink.arguments)):
        sink.end_call()
    return True
