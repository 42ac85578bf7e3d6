"""A limit on reasoning: when a request has thought for so many tokens, the end tag's tokens are what comes next.

Host side. Whoever samples asks `forced` before a token and tells `take` of each that came; after a preemption the state
is that of a new one which took the same tokens again.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tags around reasoning, as token ids: those that the tokenizer writes them with."""

    start: tuple[int, ...]
    end: tuple[int, ...]


class ThinkingBudget:
    """Follows one answer.

    budget: tokens of reasoning, tags not counted; 0 ends it at once.
    opened: whether the prompt has opened the reasoning.
    """

    def __init__(self, tags: ThinkingTags, budget: int, *, opened: bool):
        self._tags = tags
        self._left = budget
        self._recent: tuple[int, ...] = ()  # the last tokens: where a tag may be ending
        self._thinking = opened
        self._ended = False
        self._written = 0  # tokens of the end tag that stand at the answer's end

    @property
    def forced(self) -> int | None:
        """The token that must come next; None where the model is free."""
        if not self._thinking or self._left > self._written:
            return None
        return self._tags.end[self._written]

    def take(self, token_id: int) -> None:
        """One more token of the answer."""
        if self._ended:
            return
        longest = max(len(self._tags.start), len(self._tags.end))
        self._recent = (*self._recent, token_id)[-longest:]
        if not self._thinking:
            self._thinking = self._recent[-len(self._tags.start) :] == self._tags.start
            return
        before = self._written
        self._written = _overlap(self._recent, self._tags.end)
        if self._written == len(self._tags.end):
            self._thinking, self._ended = False, True
            return
        # What looked like the beginning of the end tag and was none has been reasoning after all.
        self._left -= before + 1 - self._written


def _overlap(recent: tuple[int, ...], tag: tuple[int, ...]) -> int:
    """The most tokens at the end of `recent` that a tag begins with."""
    counts = range(min(len(tag), len(recent)), 0, -1)
    return next((count for count in counts if recent[-count:] == tag[:count]), 0)
