"""Parses answers: receives text in pieces of any size, and returns deltas of the message."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jpaged.params.reasoning_tags import ReasoningTags
from jpaged.parsers.answer import AnswerDelta, AnswerSink, ParsedAnswer
from jpaged.parsers.known_tools import KnownTools
from jpaged.parsers.reasoning import read_reasoning
from jpaged.parsers.scanner import Scanner, Steps
from jpaged.parsers.spelled_tags import HIDDEN, SpelledTags
from jpaged.parsers.tool_formats import ToolCallFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerReader:
    """How to parse the answers to one request.

    tool_format: format of calls; None if the request has no tools. Then there are no calls.
    tool_names:  names of the request's tools. A call of another name is content.
    parallel:    False keeps the first call only.
    forced:      the answer must be calls. A call that is cut off is then dropped instead of returned as content.
    schemas:     JSON schema of each tool's parameters, by its name. For dialects that write values without quotes.
    reasoning:   tags of reasoning, `opened` if the prompt has opened it; None if the model has no reasoning.
    special:     names of special tokens in the tags. Such a name is a tag only if the token itself has written it.
    new_id:      returns a new id for a call. None: the format's own ids.
    """

    tool_format: ToolCallFormat | None = None
    tool_names: frozenset[str] = frozenset()
    parallel: bool = True
    forced: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    reasoning: ReasoningTags | None = None
    special: frozenset[str] = frozenset()
    new_id: Callable[[], str] | None = None

    def new(self) -> "AnswerParser":
        """Return a parser for one answer."""
        return AnswerParser(self)

    def parse(self, text: str, special_offsets: Sequence[int] | None = None) -> ParsedAnswer:
        """Parse a whole answer. special_offsets: as for `AnswerParser.feed`."""
        return self.new().read(text, special_offsets)

    def parse_pieces(self, pieces: Iterable[str]) -> ParsedAnswer:
        """Parse an answer in pieces. The result does not depend on the cuts."""
        parser = self.new()
        return ParsedAnswer.of([*map(parser.feed, pieces), parser.finish()])


class AnswerParser:
    """Parses one answer. Any text is valid: text that is neither a call nor reasoning is content."""

    def __init__(self, reader: AnswerReader):
        tool_format = reader.tool_format
        new_id = reader.new_id or (tool_format.new_id if tool_format else str)
        self._scanner = Scanner()
        self._forced = reader.forced
        self._sink = AnswerSink(new_id, parallel=reader.parallel)
        self._spelled = SpelledTags(reader.special) if reader.special else None
        self._steps: Steps[None] | None = self._read(reader)

    @property
    def called(self) -> bool:
        """True if the answer has a complete call."""
        return self._sink.completed > 0

    def read(self, text: str, special_offsets: Sequence[int] | None = None) -> ParsedAnswer:
        """Parse a whole answer. special_offsets: as for `feed`."""
        return ParsedAnswer.of([self.feed(text, special_offsets), self.finish()])

    def feed(self, text: str, special_offsets: Sequence[int] | None = None) -> AnswerDelta:
        """Append text, and return the delta that is certain now.

        special_offsets: indices of new special tokens in the answer, as in `CompletionOutput`. None: they are unknown,
            and each name of a special token counts as the token.
        """
        if self._spelled is not None and special_offsets is not None:
            text = self._spelled.hide(text, special_offsets)
        self._scanner.feed(text)
        self._resume()
        return self._pop_new()

    def finish(self) -> AnswerDelta:
        """End the answer, and return the delta that was held back."""
        self._scanner.ended = True
        if self._forced:  # held-back text begins a call or a tag, which max_tokens has cut
            self._sink.content.close()
        self._resume()
        self._sink.reasoning.end()
        self._sink.content.end()
        return self._pop_new()

    def _pop_new(self) -> AnswerDelta:
        delta = self._sink.pop_new()
        if self._spelled is not None and self._spelled.found:
            delta.reasoning = delta.reasoning.replace(HIDDEN, "")
            delta.content = delta.content.replace(HIDDEN, "")
            for call in delta.tool_calls:
                call.arguments = call.arguments.replace(HIDDEN, "")
        return delta

    def _resume(self) -> None:
        if self._steps is not None and next(self._steps, StopIteration) is StopIteration:
            self._steps = None
        if self._steps is None:
            self._sink.content.append(self._scanner.rest())

    def _read(self, reader: AnswerReader) -> Steps[None]:
        tool_format = reader.tool_format
        if reader.reasoning is not None and not (tool_format is not None and tool_format.reads_reasoning):
            yield from read_reasoning(self._scanner, self._sink, reader.reasoning)
        if tool_format is not None:
            yield from tool_format.read(self._scanner, self._sink, KnownTools(reader.tool_names, reader.schemas))
