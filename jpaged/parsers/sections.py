"""Finds sections of calls in an answer: a tag, one or several calls, an end tag."""

import dataclasses
from collections.abc import Callable

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.scanner import CALL_STEPS, Scanner, Steps

# Consumes one call after a given tag; the scanner holds. Returns False if there is no call, or where it breaks off.
ReadCall = Callable[[str], Steps[bool]]


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Tags around calls: `begin (call ...)+ end`, with white space between them.

    call:  tag before each call; "" if the calls have none.
    end:   may be missing. "": a section has one call, and its reader consumes the end tag.
    loose: calls may lack `begin`.
    """

    begin: str
    end: str
    call: str
    loose: bool = False

    def read(self, scanner: Scanner, sink: AnswerSink, read_call: ReadCall) -> Steps[None]:
        """Parse an answer to its end. Text outside calls is content."""
        begins = (self.begin, self.call) if self.loose else (self.begin,)
        while scanner.step(CALL_STEPS):
            found = yield from scanner.until(begins, sink.content.append)
            if found is None:
                return
            scanner.hold(found)
            tag = self.call if found == self.begin else ""
            while scanner.step() and (yield from read_call(tag)):
                scanner.hold()
                yield from scanner.space()
                if (yield from scanner.accept(self.end)):
                    scanner.release()
                    break
                tag = self.call
                scanner.step(CALL_STEPS)
            else:
                sink.content.append(scanner.release())
