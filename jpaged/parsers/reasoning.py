"""Parses the reasoning of an answer."""

from jpaged.params.reasoning_tags import ReasoningTags
from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.scanner import Scanner, Steps


def read_reasoning(scanner: Scanner, sink: AnswerSink, tags: ReasoningTags) -> Steps[None]:
    """Consume reasoning at the beginning of an answer. If the prompt has opened it, another start tag is accepted."""
    if tags.opened is False:
        return
    scanner.hold()
    yield from scanner.space()
    started = False
    for start in tags.starts:
        started = started or (yield from scanner.accept(start))
    if not started and not tags.opened:
        sink.content.append(scanner.release())
        return
    scanner.release()
    sink.reasoning.begin()
    end = yield from scanner.until((*tags.ends, *tags.stops), sink.reasoning.append)
    if end is not None:
        sink.reasoning.mark_edge()
        sink.content.begin()
    if end in tags.stops:
        scanner.back(end)
