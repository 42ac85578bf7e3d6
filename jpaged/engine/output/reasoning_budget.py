"""Limits reasoning: after `budget` reasoning tokens, the tokens of the end tag are forced.

Runs on the host. The engine reads `forced` before each token and calls `append` after it. The state depends only on the
appended tokens, so a preempted request can be followed again from its tokens.

Reasoning begins and ends where its tags are in the text, as in the answer parser and in grammars. A model may write a
tag with other tokens than the tokenizer, or begin and end it inside a token.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedReasoningTags:
    """The tags around reasoning, as UTF-8, and the tokens of the end tag.

    other_starts, other_ends: other texts that begin and end reasoning.
    """

    start: bytes
    end: bytes
    end_ids: tuple[int, ...]
    other_starts: tuple[bytes, ...] = ()
    other_ends: tuple[bytes, ...] = ()


class ReasoningBudget:
    """Follows one answer. Only text at the beginning of an answer can be reasoning.

    budget: maximum number of reasoning tokens, without tags; 0 ends the reasoning at once.
    opened: the prompt has the start tag.
    """

    def __init__(self, tags: EncodedReasoningTags, budget: int, *, opened: bool):
        self._tags = tags
        self._left = budget
        self._recent: tuple[int, ...] = ()  # last tokens, which may begin the end tag
        self._text = b""                    # end of the answer's text, which may begin a tag
        self._in_reasoning = opened
        self._ended = False
        self._written = 0  # number of end-tag tokens at the end of the answer

    @property
    def forced(self) -> int | None:
        """The token that must come next; None if any token may."""
        if not self._in_reasoning or self._left > self._written:
            return None
        return self._tags.end_ids[self._written]

    def append(self, token_id: int, text: bytes) -> None:
        """Append a token of the answer, and its text in UTF-8."""
        if self._ended:
            return
        self._text += text
        if self._in_reasoning:
            self._append_reasoning(token_id)
            return
        self._text = self._text.lstrip()
        starts = (self._tags.start, *self._tags.other_starts)
        if found := [start for start in starts if self._text.startswith(start)]:
            self._in_reasoning, self._text = True, self._text[len(found[0]) :]
            self._look_for_end()
        elif not any(start.startswith(self._text) for start in starts):
            self._ended = True  # the answer has begun: tags in it are ordinary text

    def _append_reasoning(self, token_id: int) -> None:
        before = self._written
        self._recent = (*self._recent, token_id)[-len(self._tags.end_ids) :]
        self._written = _overlap(self._recent, self._tags.end_ids)
        self._look_for_end()
        if not self._ended:
            # Tokens that turn out not to begin the end tag count as reasoning now.
            self._left -= before + 1 - self._written

    def _look_for_end(self) -> None:
        ends = (self._tags.end, *self._tags.other_ends)
        if any(end in self._text for end in ends) or self._written == len(self._tags.end_ids):
            self._in_reasoning, self._ended = False, True
        else:
            self._text = self._text[max(len(self._text) - max(map(len, ends)) + 1, 0) :]


def _overlap(recent: tuple[int, ...], tag: tuple[int, ...]) -> int:
    """Length of the longest suffix of `recent` that is a prefix of `tag`."""
    counts = range(min(len(tag), len(recent)), 0, -1)
    return next((count for count in counts if recent[-count:] == tag[:count]), 0)
