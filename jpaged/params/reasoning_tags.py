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
    other_starts, other_ends: other texts that the model writes as start and end tags.
    stops:  texts that end the reasoning without an end tag, and are part of the answer, such as the start of a call.
    header: text before every answer that a grammar constrains, with reasoning or without. Forced calls have their own.
    """

    start: str
    end: str
    always: bool = False
    opened: bool | None = None
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    header: str = ""

    def __post_init__(self) -> None:
        for name, tag in (("start", self.start), ("end", self.end)):
            if not isinstance(tag, str) or not tag.strip() or tag != tag.strip() or len(tag) > 100:
                accepted = f"the {name} tag must be a string of 1 to 100 characters, without white space around it"
                raise RequestError("reasoning_tags", tag, accepted)
        if self.start == self.end:
            raise RequestError("reasoning_tags", self.start, "start and end must differ")

    @property
    def starts(self) -> tuple[str, ...]:
        """All start tags. The first is the usual one."""
        return (self.start, *self.other_starts)

    @property
    def ends(self) -> tuple[str, ...]:
        """All end tags. The first is the usual one."""
        return (self.end, *self.other_ends)

    def continuing(self, text: str) -> "ReasoningTags":
        """The tags for an answer that continues `text`. Reasoning can only be at the beginning of an answer."""
        begun = text.strip()
        if not begun:
            return self
        ended = any(end in begun for end in (*self.ends, *self.stops))
        return dataclasses.replace(self, opened=begun.startswith(self.starts) and not ended)

    def opened_after(self, tokenizer: Any, token_ids: Sequence[int]) -> bool:
        """True if an answer to this prompt begins inside reasoning. `opened` decides, or else the end of the prompt."""
        if self.opened is not None:
            return self.opened
        return self.opened_by(tokenizer.decode(token_ids[-PROMPT_END:]))

    def opened_by(self, prompt: str) -> bool:
        """True if a prompt, or its end, ends inside reasoning. A template may write the start tag."""
        start, end = max(map(prompt.rfind, self.starts)), max(map(prompt.rfind, self.ends))
        written = prompt.rstrip()
        if written.endswith(self.starts):
            return True
        return self.always and not (end > start and written.endswith(self.ends))


_THINK = ReasoningTags("<think>", "</think>")
_ALWAYS = dataclasses.replace(_THINK, always=True)

# Keys are the names of vLLM's --reasoning-parser.
REASONING_PARSERS = {
    "deepseek_r1": _ALWAYS,
    "deepseek_v3": _THINK,  # also V3.1 and V3.2: their templates write <think> or </think>
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>"),
    "glm45": _THINK,
    "glm47": _THINK,
    "granite": ReasoningTags(
        "Here is my thought process:", "Here is my response:",
        other_starts=("Here's my thought process:",), other_ends=("Here's my response:",),
    ),
    "kimi_k2": dataclasses.replace(_ALWAYS, stops=("<|tool_calls_section_begin|>",)),
    "minimax_m2": _ALWAYS,
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "nemotron_v3": _ALWAYS,
    "openai_gptoss": ReasoningTags(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", header="<|channel|>final<|message|>"
    ),
    "qwen3": _THINK,
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
}  # fmt: skip
