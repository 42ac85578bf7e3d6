"""Reading what a model thinks before it answers."""

from jpaged.answers.answer import AnswerSink
from jpaged.answers.scanner import Scanner, Steps
from jpaged.params.reasoning_tags import ReasoningTags


def read_reasoning(scanner: Scanner, sink: AnswerSink, tags: ReasoningTags, opened: bool) -> Steps[None]:
    """Consume reasoning, which stands at the beginning of an answer or nowhere.

    opened: whether the prompt has opened it; a model that writes the tag once more is forgiven.
    """
    scanner.hold()
    yield from scanner.space()
    if not (yield from scanner.accept(tags.start)) and not opened:
        sink.content.give(scanner.release())
        return
    scanner.release()
    sink.reasoning.begin()
    if (yield from scanner.until((tags.end,), sink.reasoning.give)) is not None:
        sink.reasoning.edge()
        sink.content.begin()
