"""A limit on reasoning: when a request has thought for so many tokens, the end tag's tokens are what comes next.

Host side. Whoever samples asks `forced` before a token and tells `take` of each that came; after a preemption the state
is that of a new one which took the same tokens again.

Where reasoning begins and ends is read from the text, as a parser of the answer and a grammar read it: a model writes a
tag in other tokens than the tokenizer would, or begins and ends it inside of one.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedReasoningTags:
    """The tags around reasoning: their text in UTF-8, and the tokens that the end tag is written with."""

    start: bytes
    end: bytes
    end_ids: tuple[int, ...]


class ReasoningBudget:
    """Follows one answer. Reasoning stands at its beginning, or nowhere.

    budget: tokens of reasoning, tags not counted; 0 ends it at once.
    opened: whether the prompt has opened the reasoning.
    """

    def __init__(self, tags: EncodedReasoningTags, budget: int, *, opened: bool):
        self._tags = tags
        self._left = budget
        self._recent: tuple[int, ...] = ()  # the last tokens: where the end tag may be under way
        self._text = b""                    # of the answer, as far as a tag may still be in it
        self._in_reasoning = opened
        self._ended = False
        self._written = 0  # tokens of the end tag that stand at the answer's end

    @property
    def forced(self) -> int | None:
        """The token that must come next; None where the model is free."""
        if not self._in_reasoning or self._left > self._written:
            return None
        return self._tags.end_ids[self._written]

    def append(self, token_id: int, text: bytes) -> None:
        """One more token of the answer, and what it stands for."""
        if self._ended:
            return
        self._text += text
        if self._in_reasoning:
            self._append_reasoning(token_id)
            return
        self._text, start = self._text.lstrip(), self._tags.start
        if self._text.startswith(start):
            self._in_reasoning, self._text = True, self._text[len(start) :]
            self._look_for_end()
        elif not start.startswith(self._text):
            self._ended = True  # the answer has begun: what it says of tags is none of reasoning's

    def _append_reasoning(self, token_id: int) -> None:
        before = self._written
        self._recent = (*self._recent, token_id)[-len(self._tags.end_ids) :]
        self._written = _overlap(self._recent, self._tags.end_ids)
        self._look_for_end()
        if not self._ended:
            # What looked like the beginning of the end tag and was none has been reasoning after all.
            self._left -= before + 1 - self._written

    def _look_for_end(self) -> None:
        end = self._tags.end
        if end in self._text or self._written == len(self._tags.end_ids):
            self._in_reasoning, self._ended = False, True
        else:
            self._text = self._text[max(len(self._text) - len(end) + 1, 0) :]


def _overlap(recent: tuple[int, ...], tag: tuple[int, ...]) -> int:
    """The most tokens at the end of `recent` that a tag begins with."""
    counts = range(min(len(tag), len(recent)), 0, -1)
    return next((count for count in counts if recent[-count:] == tag[:count]), 0)
