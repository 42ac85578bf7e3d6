"""What a model thinks before it answers, between two tags: which tags, whether they are open, and reading it."""

import dataclasses

from jpaged.answers.answer import AnswerSink
from jpaged.answers.scanner import Scanner, Steps
from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning.

    always: whether an answer begins with reasoning even where neither prompt nor answer opens it, unless the prompt has
            closed it: models whose templates open it, behind renderings that lose that.
    """

    start: str
    end: str
    always: bool = False

    def __post_init__(self) -> None:
        for name, tag in (("start", self.start), ("end", self.end)):
            if not isinstance(tag, str) or not tag.strip() or tag != tag.strip() or len(tag) > 100:
                accepted = f"the {name} tag must be a text of 1 to 100 characters, without blanks around it"
                raise RequestError("reasoning_tags", tag, accepted)
        if self.start == self.end:
            raise RequestError("reasoning_tags", self.start, "start and end must differ")

    def opened_by(self, prompt: str) -> bool:
        """Whether an answer to this prompt goes on with reasoning: templates may have written the start tag already."""
        start, end = prompt.rfind(self.start), prompt.rfind(self.end)
        written = prompt.rstrip()
        if written.endswith(self.start):
            return True
        return self.always and not (end > start and written.endswith(self.end))


# By the names of vLLM's --reasoning-parser.
REASONING_PARSERS = {
    "deepseek_r1": ReasoningTags("<think>", "</think>", always=True),
    "qwen3": ReasoningTags("<think>", "</think>"),
}


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
