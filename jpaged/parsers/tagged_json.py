"""Parses calls with tags around a name and around arguments in JSON, as Kimi and DeepSeek V3 and V3.1 write them."""

import dataclasses
import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import Known
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
        if not name or not known(name):
            return False
        yield from scanner.space()
        if not (yield from scanner.accept(self.separator)):
            return False
        empty = False
        if (yield from scanner.space()) != "{":
            empty = yield from scanner.accept(self.call_end)
            if not empty:
                return False
        sink.start_call(name, call_id)
        scanner.release()  # the call has begun, so its text cannot become content
        if empty:
            sink.arguments("{}")
        elif not (yield from read_value(scanner, sink.arguments)):
            return False
        sink.end_call()
        scanner.hold()
        for tag_after in (self.fence, self.call_end) if not empty else ():
            yield from scanner.space()
            if (yield from scanner.accept(tag_after)):
                scanner.hold()
        sink.content.append(scanner.release())
        return True


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
