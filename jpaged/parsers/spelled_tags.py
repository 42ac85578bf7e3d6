"""Hides names of special tokens that a model has spelled with other tokens, so that no parser takes them for tags.

A model may write about tags, or quote them in an argument of a call. Its text then has the same characters as a tag.
Only the tokens show the difference: a tag is a special token, a quotation is not.
"""

import itertools
import re
from collections.abc import Iterable, Set

# Inserted into a spelled name. No answer has it: it is half a surrogate pair, and answers are decoded UTF-8.
HIDDEN = "\udfff"


class SpelledTags:
    """Hides spelled names in the text of one answer, which comes in pieces. names: of special tokens."""

    def __init__(self, names: Set[str]):
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._overlap = len(longest_first[0]) - 1
        self._tail = ""       # the last characters of the text so far: a name may begin in them
        self._length = 0      # of the text so far
        self._starts = set[int]()  # of special tokens
        self.found = False    # a name was hidden

    def hide(self, text: str, special_offsets: Iterable[int]) -> str:
        """Return the next piece of the text, with HIDDEN in names that no special token has written.

        special_offsets: new ones. See `CompletionOutput`.
        """
        self._starts.update(special_offsets)
        joined, kept = self._tail + text, len(self._tail)
        first = self._length - kept  # index of `joined` in the answer
        cuts = [
            max(match.start() + 1 - kept, 0)
            for match in self._pattern.finditer(joined)
            if match.end() > kept and first + match.start() not in self._starts
        ]
        self._length += len(text)
        self._tail = joined[max(len(joined) - self._overlap, 0) :] if self._overlap else ""
        if not cuts:
            return text
        self.found = True
        return HIDDEN.join(text[low:high] for low, high in itertools.pairwise((0, *cuts, len(text))))
