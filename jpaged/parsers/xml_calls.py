"""Parses calls with a tag around each argument. The dialects are in `xml_dialects`.

Values have no quotes: the tool's schema says whether `5` is a number or a string. Strings stream as they come, and so
do lists and objects, which are JSON. Other values follow when they are complete.
"""

import dataclasses
import json
import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_text import Emit
from jpaged.parsers.known_tools import CONTAINERS, STRING, KnownTools, json_value
from jpaged.parsers.pythonic import read_literal
from jpaged.parsers.scanner import Scanner, Steps
from jpaged.parsers.sections import Section
from jpaged.parsers.value_ends import ARGUMENT_STEPS, ValueEnds, skip_arguments

MAX_NAME = 256

_NAME = re.compile(r"[\w.\-]++")
_KEY = re.compile(r"[^<>\"\n]++")


@dataclasses.dataclass(frozen=True, slots=True)
class XmlTags:
    """The tags of a dialect. White space may be between tags.

    A call is `NAME name_end (key KEY key_end value VALUE value_end)* call_end`, after the section's tag of a call.
    key_ends:   the texts after a key, each with the types that it says the value has; None: the schema's types.
    value:      tag before a value; "" if there is none. Then `key_end` may be missing.
    lines:      the value is on lines of its own, so a line break around it is not part of it.
    """

    section: Section
    name_end: str
    call_end: str
    key: str
    key_ends: tuple[tuple[str, frozenset[str] | None], ...]
    value_end: str
    value: str = ""
    lines: bool = False

    def read(self, scanner: Scanner, sink: AnswerSink, known: KnownTools) -> Steps[None]:
        """Parse an answer to its end."""
        yield from self.section.read(scanner, sink, lambda tag: self._read_call(scanner, sink, known, tag))

    def _read_call(self, scanner: Scanner, sink: AnswerSink, known: KnownTools, tag: str) -> Steps[bool]:
        """Consume one call, after its `tag`. The scanner holds. Returns False if there is none, or where it breaks."""
        yield from scanner.space()
        if not (yield from scanner.accept(tag)):
            return False
        name = yield from scanner.run(_NAME, MAX_NAME)
        if not name or not (yield from scanner.accept(self.name_end)):
            return False
        if not known(name):
            yield from skip_arguments(scanner, sink, self.key, self.value_end)
            return False
        yield from scanner.space()
        begun, opening, ends = False, "{", ValueEnds(self, known.keys(name))
        while True:
            ended = (yield from scanner.accept(self.call_end)) or (yield from ends.call_ends(scanner, begun=begun))
            if not ended and not (scanner.step(ARGUMENT_STEPS) and (yield from scanner.accept(self.key))):
                return False
            if not begun:
                begun = True
                sink.start_call(name)
                scanner.release()  # the call has begun, so its text cannot become content
            if ended:
                break
            key = yield from scanner.run(_KEY, MAX_NAME)
            types, found = (yield from self._read_key_end(scanner)) if key else (None, False)
            if not key or not found:
                return False
            sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            ends.keys.discard(key)
            types = known.types(name, key) if types is None else types
            if not (yield from self._read_value(scanner, sink.arguments, types, ends)):
                return False
            yield from scanner.space()
        sink.arguments("{}" if opening == "{" else "}")
        sink.end_call()
        return True

    def _read_key_end(self, scanner: Scanner) -> Steps[tuple[frozenset[str] | None, bool]]:
        """Consume the tags between a key and its value. Returns the types that they say; False if a tag is missing."""
        types, found = None, False
        for key_end, said in self.key_ends:
            if not found and (yield from scanner.accept(key_end)):
                types, found = said, True
        if self.value:
            yield from scanner.space()
            found = yield from scanner.accept(self.value)
        return types, found

    def _read_value(self, scanner: Scanner, emit: Emit, types: frozenset[str], ends: ValueEnds) -> Steps[bool]:
        """Consume a value and its end tag, and emit it as JSON. Returns False if it breaks off."""
        if self.lines:
            yield from scanner.accept("\n")
        if types <= {"string", "null"} and types & STRING:
            closing = ("\n" + self.value_end, self.value_end) if self.lines else (self.value_end,)
            for null in ("null", "None") if "null" in types else ():
                for end in closing:
                    if (yield from scanner.accept(null + end)):
                        emit("null")
                        return True
            emit('"')
            found = yield from ends.read(scanner, lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1]))
            emit('"' if found else "")
            return found
        if types & CONTAINERS and not types & STRING and (yield from scanner.space()) in ("{", "["):
            if not (yield from read_literal(scanner, emit)):
                return False
            yield from scanner.space()
            return (yield from scanner.accept(self.value_end)) or (yield from ends.value_ends(scanner))
        pieces: list[str] = []
        found = yield from ends.read(scanner, pieces.append)
        emit(json_value("".join(pieces), types, scanner) if found else "")
        return found
