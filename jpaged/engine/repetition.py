"""Whether an answer's last tokens are one pattern again and again; looked at token by token, on the host."""

import numpy as np

from jpaged.params.repetition_detection import RepetitionDetectionParams


class RepetitionWatch:
    """Follows one answer.

    For every length p of a pattern it counts how many tokens at the end are equal to the one p before them: a pattern
    stands there so many times and once more as p goes into that count. A token costs one comparison with all p at once.
    """

    def __init__(self, params: RepetitionDetectionParams):
        self._sizes = np.arange(params.min_pattern_size, params.max_pattern_size + 1)
        self._needed = self._sizes * (params.min_count - 1)
        self._equal = np.zeros(len(self._sizes), np.int64)  # tokens at the end that equal the one p before them, by p
        self._recent = np.full(2 * params.max_pattern_size, -1, np.int64)  # a ring, written twice: a window is a slice
        self._longest = params.max_pattern_size
        self._place = 0

    def append(self, token_id: int) -> bool:
        """One more token of the answer; whether it completes a repetition."""
        window = self._recent[self._place : self._place + self._longest]  # the last ones, the oldest first
        before = window[self._longest - self._sizes]
        self._equal = np.where(before == token_id, self._equal + 1, 0)
        self._recent[self._place] = self._recent[self._place + self._longest] = token_id
        self._place = (self._place + 1) % self._longest
        return bool((self._equal >= self._needed).any())
