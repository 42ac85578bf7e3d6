"""Histogram: percentiles of any number of values, in constant memory."""

import math

import numpy as np

LOWEST, HIGHEST = 1e-7, 1e7  # smaller values are in the first bucket, larger values in the last
RATIO = 1.01                 # upper edge / lower edge of a bucket; a percentile's error is at most 0.5%
_PER_LOG = 1 / math.log(RATIO)
_OFFSET = math.log(LOWEST) * _PER_LOG
_SIZE = math.ceil(math.log(HIGHEST / LOWEST) * _PER_LOG) + 1


class Histogram:
    """Counts non-negative values in buckets whose edges grow by RATIO. Sum, minimum and maximum are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = 0.0
        self._buckets = [0] * _SIZE

    def add(self, value: float, weight: int = 1) -> None:
        """Count one value, `weight` times."""
        index = 0 if value <= LOWEST else min(int(math.log(value) * _PER_LOG - _OFFSET), _SIZE - 1)
        self._buckets[index] += weight
        self.count += weight
        self.total += value * weight
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def add_many(self, values: np.ndarray) -> None:
        """Count each of an array's values once."""
        for value, weight in zip(*(part.tolist() for part in np.unique(values, return_counts=True)), strict=True):
            self.add(value, weight)

    @property
    def mean(self) -> float:
        """Average of all values; nan without values."""
        return self.total / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """Return the value that `percent` of all values do not exceed, within 0.5%; nan without values."""
        if not self.count:
            return math.nan
        rank = max(math.ceil(round(self.count * percent / 100, 6)), 1)  # 99.9% of 20,000 is 19,980.000000000004
        if rank == self.count:
            return self.largest
        seen = 0
        for index, weight in enumerate(self._buckets):
            seen += weight
            if seen >= rank:
                middle = LOWEST * RATIO ** (index + 0.5)
                return min(max(middle, self.smallest), self.largest) if index else self.smallest
        raise AssertionError("the buckets hold all values")

    def shares_up_to(self) -> tuple[list[float], list[float]]:
        """Return the CDF: (upper edges of non-empty buckets, share of values up to each edge)."""
        edges, shares, seen = [], [], 0
        for index, weight in enumerate(self._buckets):
            if weight:
                seen += weight
                edges.append(min(max(LOWEST * RATIO ** (index + 1), self.smallest), self.largest))
                shares.append(seen / self.count)
        return edges, shares
