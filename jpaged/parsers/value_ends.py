"""Finds the end of a value between tags, also where a model forgot the end tag.

A value may be text with tags in it. So a missing end tag is assumed in two places only. One is before the tag of
another parameter of the tool. The other is before the end tags of the call, if another call or the end of the answer
follows them.
"""

import functools
import re
from typing import TYPE_CHECKING

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_text import Emit
from jpaged.parsers.scanner import Scanner, Steps

if TYPE_CHECKING:
    from jpaged.parsers.xml_calls import XmlTags

ARGUMENT_STEPS = 5  # syntax tokens that an argument costs: its tags and its key
WINDOW = 400  # characters after which it is known whether tags end a value


class ValueEnds:
    """Ends of the values of one call. keys: parameters of the tool that the call has not written yet."""

    def __init__(self, tags: "XmlTags", keys: set[str]):
        self.keys = keys
        self._tags = tags

    def read(self, scanner: Scanner, emit: Emit) -> Steps[bool]:
        """Consume a value and its end tag, and emit the value. Returns False if the text ends before.

        A line break before the end tag is not emitted if the value is on lines of its own, or the end tag is missing.
        """
        tags = self._tags
        ends = tuple({tags.value_end, tags.key, tags.call_end, *filter(None, (tags.section.end,))})
        last = ""  # a line break that is not emitted yet

        def append(text: str) -> None:
            nonlocal last
            text = last + text
            last = "\n" if text.endswith("\n") else ""
            emit(text.removesuffix("\n"))

        while True:
            found = yield from scanner.until(ends, append, cut=False)
            if found == tags.value_end:
                emit("" if tags.lines else last)
                return True
            if found is None:
                emit("" if tags.lines else last)
                return False
            scanner.back(found)
            if (yield from self.value_ends(scanner)):
                return True
            append(scanner.advance(scanner.pos + len(found)))
            if not scanner.step():
                ends = (tags.value_end,)

    def value_ends(self, scanner: Scanner) -> Steps[bool]:
        """Return True if a value ends here without an end tag. Consumes nothing."""
        ahead = _ahead(self._tags)
        while scanner.step():
            window = scanner.text[scanner.pos : scanner.pos + WINDOW]
            match = ahead.match(window)
            if match is not None and match["key"]:
                return match["key"] in self.keys
            if match is not None and (match["next"] or (scanner.ended and match.end() == len(window) < WINDOW)):
                return True
            if len(window) == WINDOW or scanner.ended:
                return False
            yield
        return False

    def call_ends(self, scanner: Scanner, *, begun: bool) -> Steps[bool]:
        """Return True if a call ends here without an end tag. Consumes nothing. begun: the call has an argument."""
        section = self._tags.section
        tags = (section.end, section.begin, section.call) if begun else (section.end,)
        for tag in filter(None, tags):
            if (yield from scanner.is_next(tag)):
                return True
        return False


def skip_arguments(scanner: Scanner, sink: AnswerSink, key: str, value_end: str) -> Steps[None]:
    """Consume the arguments of an unknown tool as content, so that text in them is no call. The scanner holds.

    key, value_end: tags at the beginning and at the end of an argument.
    """
    yield from scanner.space()
    while scanner.step(ARGUMENT_STEPS) and (yield from scanner.accept(key)):
        sink.content.append(scanner.release())
        if (yield from scanner.until((value_end,), sink.content.append)) is None:
            return
        scanner.hold(value_end)
        yield from scanner.space()


@functools.cache
def _ahead(tags: "XmlTags") -> re.Pattern[str]:
    """Pattern of the text after a value without an end tag: another argument, or the end of the calls."""

    def any_of(texts: list[str]) -> str:
        return "|".join(re.escape(text) for text in texts if text)

    key = rf"{re.escape(tags.key)}(?P<key>[^<>\"\n]++)(?:{any_of([end for end, _ in tags.key_ends])})"
    section = tags.section
    end = re.escape(section.end)
    closing = rf"(?:{re.escape(tags.call_end)}\s*+)?+{end}" if end else re.escape(tags.call_end)
    following = any_of([section.begin, section.call])
    return re.compile(rf"{key}|{closing}\s*+(?P<next>{following})?+")
