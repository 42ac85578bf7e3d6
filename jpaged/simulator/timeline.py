"""Timeline: what happened when, in a bounded number of equal intervals however long a run becomes."""

import dataclasses
import math

NUM_BINS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One interval: averages over its time."""

    time: float               # seconds, the middle
    running: float            # requests that hold a row, all replicas together
    waiting: float            # requests that wait for one
    kv_use: float             # share of the KV blocks that somebody holds, averaged over replicas
    prompt_tokens: float      # computed a second, recomputed ones included
    output_tokens: float      # sampled a second


class Timeline:
    """Adds up what steps report. When the last interval is full, neighbours are joined and all are twice as wide."""

    def __init__(self, num_replicas: int = 1, width: float = 1e-3):
        self._num_replicas = num_replicas
        self._width = width
        self._sums = [[0.0] * NUM_BINS for _ in range(5)]
        self._end = 0.0

    def add(
        self, start: float, end: float, running: int, waiting: int, kv_use: float, prompt: int, output: int
    ) -> None:
        """One replica's state between two times, and the tokens that it computed and sampled in between."""
        while end > self._width * NUM_BINS:
            self._join()
        self._end = max(self._end, end)
        width, sums = self._width, self._sums
        first, last = int(start / width), math.ceil(end / width) - 1
        sums[3][last] += prompt
        sums[4][last] += output
        if first >= last:
            span = end - start
            sums[0][last] += running * span
            sums[1][last] += waiting * span
            sums[2][last] += kv_use * span
            return
        for index in range(first, last + 1):
            span = min(end, (index + 1) * width) - max(start, index * width)
            sums[0][index] += running * span
            sums[1][index] += waiting * span
            sums[2][index] += kv_use * span

    def points(self) -> list[TimelinePoint]:
        """The intervals, in order; between NUM_BINS / 2 and NUM_BINS of them unless the run was very short."""
        points = []
        for index in range(min(math.ceil(self._end / self._width), NUM_BINS)):
            begin = index * self._width
            span = min(self._end - begin, self._width)
            running, waiting, kv_use, prompt, output = (part[index] / span for part in self._sums)
            points.append(
                TimelinePoint(begin + span / 2, running, waiting, kv_use / self._num_replicas, prompt, output)
            )
        return points

    def _join(self) -> None:
        self._width *= 2
        self._sums = [
            [part[i] + part[i + 1] for i in range(0, NUM_BINS, 2)] + [0.0] * (NUM_BINS // 2) for part in self._sums
        ]
