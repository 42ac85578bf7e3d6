"""The parser of answers: text in pieces of any size in, what is new in the message out; whole answers are one piece."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from jpaged.answers.answer import AnswerDelta, AnswerSink, ParsedAnswer
from jpaged.answers.formats import ToolCallFormat
from jpaged.answers.reasoning import read_reasoning
from jpaged.answers.scanner import Scanner, Steps
from jpaged.params.reasoning_tags import ReasoningTags


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerReader:
    """How the answers to one request are read.

    tool_format: of calls; None where no tools were offered: then all is content.
    tool_names:  of the tools that were offered. What names another is text.
    parallel:    False keeps the first call only.
    reasoning:   tags of reasoning, where the model has any.
    reasoning_opened: whether the prompt has opened it already.
    """

    tool_format: ToolCallFormat | None = None
    tool_names: frozenset[str] = frozenset()
    parallel: bool = True
    reasoning: ReasoningTags | None = None
    reasoning_opened: bool = False
    new_id: Callable[[], str] | None = None  # of calls; by default as the format's models need it

    def new(self) -> "AnswerParser":
        """A parser for one answer."""
        return AnswerParser(self)

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer."""
        return self.parse_pieces([text])

    def parse_pieces(self, pieces: Iterable[str]) -> ParsedAnswer:
        """An answer that comes in pieces; how it was cut makes no difference."""
        return self.new().read(pieces)


class AnswerParser:
    """Reads one answer. Any text is an answer: nothing raises, and what is no call and no reasoning is content."""

    def __init__(self, reader: AnswerReader):
        made = reader.tool_format
        new_id = reader.new_id or (made.new_id if made else str)
        self._scanner = Scanner()
        self._sink = AnswerSink(new_id, parallel=reader.parallel)
        self._steps: Steps[None] | None = self._read(reader)

    @property
    def called(self) -> bool:
        """Whether the answer has a whole call."""
        return self._sink.completed > 0

    def read(self, pieces: Iterable[str]) -> ParsedAnswer:
        """A whole answer."""
        return ParsedAnswer.of(itertools.chain(map(self.feed, pieces), (self.finish() for _ in range(1))))

    def feed(self, text: str) -> AnswerDelta:
        """More text; what is certain now."""
        self._scanner.feed(text)
        self._resume()
        return self._sink.take()

    def finish(self) -> AnswerDelta:
        """No more text will come; what was held back."""
        self._scanner.ended = True
        self._resume()
        self._sink.reasoning.end()
        self._sink.content.end()
        return self._sink.take()

    def _resume(self) -> None:
        if self._steps is not None and next(self._steps, StopIteration) is StopIteration:
            self._steps = None
        if self._steps is None:
            self._sink.content.give(self._scanner.rest())

    def _read(self, reader: AnswerReader) -> Steps[None]:
        if reader.reasoning is not None:
            yield from read_reasoning(self._scanner, self._sink, reader.reasoning, reader.reasoning_opened)
        if reader.tool_format is not None:
            yield from reader.tool_format.read(self._scanner, self._sink, reader.tool_names.__contains__)
