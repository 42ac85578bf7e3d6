"""Compares jpaged with the best peer: a ratio of medians, and a statement."""

import dataclasses
import enum
import statistics
from collections.abc import Mapping, Sequence

EVEN = 0.05  # medians closer than this are even


class Statement(enum.Enum):
    AHEAD = "ahead"
    EVEN = "even"
    BEHIND = "behind"


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A measured quantity: the field of a record, and its format."""

    field: str
    title: str
    digits: int
    higher_is_better: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """jpaged compared with the best peer."""

    ours: Sequence[float]
    best_name: str
    best: Sequence[float]
    ratio: float          # of medians, jpaged / best peer
    statement: Statement


def compare(
    ours: Sequence[float], peers: Mapping[str, Sequence[float]], *, higher_is_better: bool
) -> Comparison | None:
    """Compare jpaged's runs with those of the peer with the best median. None if a side has no run.

    `ahead` or `behind`: the medians differ by at least 5%, and the ranges do not overlap. Otherwise `even`.
    """
    peers = {name: values for name, values in peers.items() if values}
    if not ours or not peers:
        return None
    choose = max if higher_is_better else min
    name = choose(peers, key=lambda peer: statistics.median(peers[peer]))
    best = peers[name]
    ratio = statistics.median(ours) / statistics.median(best)
    above = min(ours) > max(best) and ratio >= 1 + EVEN
    below = max(ours) < min(best) and ratio <= 1 / (1 + EVEN)
    if above or below:
        statement = Statement.AHEAD if above == higher_is_better else Statement.BEHIND
    else:
        statement = Statement.EVEN
    return Comparison(ours, name, best, ratio, statement)


def spread(values: Sequence[float], digits: int) -> str:
    """Print the median, and the range if there is more than one run."""
    text = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return f"{text} (1 run)"
    return f"{text} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
