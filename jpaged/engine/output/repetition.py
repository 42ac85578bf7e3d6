"""Detects an answer that repeats one pattern of tokens. Runs on the host, once per token."""

import numpy as np

from jpaged.params.repetition_detection import RepetitionDetectionParams


class RepetitionWatch:
    """Follows one answer and reports when its end repeats.

    For each pattern length p, it counts the tokens at the end of the answer that equal the token p positions before
    them. A count of k * p means that the pattern occurs k + 1 times. A token costs one numpy comparison over all p.
    """

    def __init__(self, params: RepetitionDetectionParams):
        self._sizes = np.arange(params.min_pattern_size, params.max_pattern_size + 1)
        self._needed = self._sizes * (params.min_count - 1)
        self._equal = np.zeros(len(self._sizes), np.int64)  # the count for each p
        # A ring buffer that stores each token twice, so that any window is one slice.
        self._recent = np.full(2 * params.max_pattern_size, -1, np.int64)
        self._longest = params.max_pattern_size
        self._index = 0

    def append(self, token_id: int) -> bool:
        """Append a token of the answer. Returns True if it completes a repetition."""
        window = self._recent[self._index : self._index + self._longest]  # the last tokens, oldest first
        before = window[self._longest - self._sizes]
        self._equal = np.where(before == token_id, self._equal + 1, 0)
        self._recent[self._index] = self._recent[self._index + self._longest] = token_id
        self._index = (self._index + 1) % self._longest
        return bool((self._equal >= self._needed).any())
