"""The tags between which a model thinks before it answers, and whether a prompt has opened them."""

import dataclasses

from jpaged.errors import RequestError

PROMPT_END = 64  # tokens at a prompt's end that tell whether it opens reasoning


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
