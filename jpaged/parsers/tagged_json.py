"""Parses calls with tags around a name and around arguments in JSON, as Kimi and DeepSeek V3 and V3.1 write them."""

import dataclasses
import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import Known, discard, drop_brace, emit_call
from jpaged.parsers.json_text import read_value
from jpaged.parsers.scanner import Scanner, Steps
from jpaged.parsers.sections import Section

MAX_NAME = 256

_NAME = re.compile(r"[\w.\-:]++")
_KIMI_ID = re.compile(r"(?:functions\.)?+(?P<name>.+):[0-9]++")  # the template has this id in the call's result


@dataclasses.dataclass(frozen=True, slots=True)
class TaggedJson:
    """The tags of a dialect. A call is `kind NAME separator ARGUMENTS fence call_end`, with white space between them.

    kind:  text before the name; may be missing.
    fence: end of the Markdown block that `separator` begins; "" if there is none.
    is_id: the name is part of the call's id, `functions.NAME:NUMBER`.
    """

    section: Section
    separator: str
    call_end: str
    kind: str = ""
    fence: str = ""
    is_id: bool = False

    def read(self, scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
        """Parse an answer to its end."""
        yield from self.section.read(scanner, sink, lambda tag: self._read_call(scanner, sink, known, tag))

    def _read_call(self, scanner: Scanner, sink: AnswerSink, known: Known, tag: str) -> Steps[bool]:
        yield from scanner.space()
        if not (yield from scanner.accept(tag)):
            return False
        yield from scanner.space()
        yield from scanner.accept(self.kind)
        name = yield from scanner.run(_NAME, MAX_NAME)
        call_id = None
        if name and self.is_id and (match := _KIMI_ID.fullmatch(name)):
            name, call_id = match["name"], name
        if not name:
            return False
        yield from scanner.space()
        separated = yield from scanner.accept(self.separator)
        following = yield from scanner.space()
        if separated and following == "{" and not known(name):
            yield from read_value(scanner, discard)  # text in the arguments of an unknown tool is no call
        if not known(name):
            return False
        if not (separated and following == "{"):
            fenced = separated and self.fence != "" and (yield from scanner.accept(self.fence))
            if not fenced and not (yield from scanner.accept(self.call_end)):
                return False
            emit_call(sink, name, "{}", call_id)
            yield from self._close(scanner, sink)
            return True
        sink.start_call(name, call_id)
        scanner.release()  # the call has begun, so its text cannot become content
        if not (yield from read_value(scanner, sink.arguments)):
            return False
        sink.end_call()
        yield from drop_brace(scanner, sink)
        yield from self._close(scanner, sink)
        return True

    def _close(self, scanner: Scanner, sink: AnswerSink) -> Steps[None]:
        """Consume the tags at the end of a call, which may be missing."""
        scanner.hold()
        for tag in (self.fence, self.call_end):
            yield from scanner.space()
            if (yield from scanner.accept(tag)):
                scanner.hold()
        sink.content.append(scanner.release())


def _deepseek(separator: str, kind: str = "", fence: str = "") -> TaggedJson:
    section = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", loose=True)
    return TaggedJson(section, separator, "<｜tool▁call▁end｜>", kind, fence)


DIALECTS = {
    "kimi_k2": TaggedJson(
        Section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", loose=True),
        "<|tool_call_argument_begin|>", "<|tool_call_end|>", is_id=True,
    ),
    "deepseek_v3": _deepseek("```json", "function<｜tool▁sep｜>", "```"),
    "deepseek_v31": _deepseek("<｜tool▁sep｜>"),
}  # fmt: skip
