"""The tags around a model's reasoning, and whether a prompt ends inside them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jpaged.errors import RequestError

PROMPT_END = 64  # last tokens of a prompt, which are searched for an open start tag


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning.

    always: an answer begins with reasoning even without a start tag, unless the prompt has closed the reasoning. For
        models whose own chat template writes the start tag, when another template rendered the prompt without it.
    opened: True if the answer continues reasoning, False if it has none. None: the end of the prompt decides.
    """

    start: str
    end: str
    always: bool = False
    opened: bool | None = None

    def __post_init__(self) -> None:
        for name, tag in (("start", self.start), ("end", self.end)):
            if not isinstance(tag, str) or not tag.strip() or tag != tag.strip() or len(tag) > 100:
                accepted = f"the {name} tag must be a string of 1 to 100 characters, without white space around it"
                raise RequestError("reasoning_tags", tag, accepted)
        if self.start == self.end:
            raise RequestError("reasoning_tags", self.start, "start and end must differ")

    def continuing(self, text: str) -> "ReasoningTags":
        """The tags for an answer that continues `text`. Reasoning can only be at the beginning of an answer."""
        begun = text.strip()
        if not begun:
            return self
        return dataclasses.replace(self, opened=begun.startswith(self.start) and self.end not in begun)

    def opened_after(self, tokenizer: Any, token_ids: Sequence[int]) -> bool:
        """True if an answer to this prompt begins inside reasoning. `opened` decides, or else the end of the prompt."""
        if self.opened is not None:
            return self.opened
        return self.opened_by(tokenizer.decode(token_ids[-PROMPT_END:]))

    def opened_by(self, prompt: str) -> bool:
        """True if a prompt, or its end, ends inside reasoning. A template may write the start tag."""
        start, end = prompt.rfind(self.start), prompt.rfind(self.end)
        written = prompt.rstrip()
        if written.endswith(self.start):
            return True
        return self.always and not (end > start and written.endswith(self.end))


# Keys are the names of vLLM's --reasoning-parser.
REASONING_PARSERS = {
    "deepseek_r1": ReasoningTags("<think>", "</think>", always=True),
    "qwen3": ReasoningTags("<think>", "</think>"),
}
