"""Parses the reasoning of an answer."""

from jpaged.answers.answer import AnswerSink
from jpaged.answers.scanner import Scanner, Steps
from jpaged.params.reasoning_tags import ReasoningTags


def read_reasoning(scanner: Scanner, sink: AnswerSink, tags: ReasoningTags, opened: bool) -> Steps[None]:
    """Consume reasoning, which can only be at the beginning of an answer.

    opened: the prompt has the start tag. A second start tag in the answer is accepted.
    """
    scanner.hold()
    yield from scanner.space()
    if not (yield from scanner.accept(tags.start)) and not opened:
        sink.content.append(scanner.release())
        return
    scanner.release()
    sink.reasoning.begin()
    if (yield from scanner.until((tags.end,), sink.reasoning.append)) is not None:
        sink.reasoning.mark_edge()
        sink.content.begin()
