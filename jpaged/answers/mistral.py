"""Calls as Mistral's models write them: `[TOOL_CALLS] [{...}, {...}]`, and newer `[TOOL_CALLS]name[ARGS]{...}`."""

import re

from jpaged.answers.answer import AnswerSink
from jpaged.answers.json_calls import Known, read_calls
from jpaged.answers.json_text import read_value
from jpaged.answers.scanner import CALL_STEPS, Scanner, Steps

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 256

_NAME = re.compile(r"[\w.\-]++")


def read(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
    """Read an answer to its end."""
    while scanner.step(CALL_STEPS):
        if (yield from scanner.until((BEGIN,), sink.content.give)) is None:
            return
        scanner.hold(BEGIN)
        bare = (yield from scanner.space()) in ("[", "{")
        if (yield from read_calls(scanner, sink, known) if bare else _read_named(scanner, sink, known)):
            scanner.release()
        else:
            sink.content.give(scanner.release())


def _read_named(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[bool]:
    """Consume `name[ARGS]{...}`, with the model's own id of the call in it or not; False where it is none."""
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
