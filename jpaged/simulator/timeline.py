"""Timeline: statistics over time in at most NUM_BINS equal intervals, for runs of any length."""

import dataclasses
import math

NUM_BINS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Averages over one interval."""

    time: float               # middle of the interval, in seconds
    running: float            # requests that have a row, summed over replicas
    waiting: float            # requests that wait for a row, summed over replicas
    kv_use: float             # share of KV blocks in use, averaged over replicas
    prompt_tokens: float      # computed per second, with recomputed tokens
    output_tokens: float      # sampled per second


class Timeline:
    """Sums the values of steps per interval. After the last interval is full, pairs of intervals are merged."""

    def __init__(self, num_replicas: int = 1, width: float = 1e-3):
        self._num_replicas = num_replicas
        self._width = width
        self._sums = [[0.0] * NUM_BINS for _ in range(5)]
        self._end = 0.0

    def add(
        self, start: float, end: float, running: int, waiting: int, kv_use: float, prompt: int, output: int
    ) -> None:
        """Add a replica's state from `start` to `end`, and the tokens that it computed and sampled."""
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
        """Return NUM_BINS / 2 to NUM_BINS intervals in order; fewer after a very short run."""
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
