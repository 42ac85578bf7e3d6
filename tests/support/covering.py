"""Covering arrays: few combinations in which each pair of values of any two factors occurs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return combinations with one value per factor, in which every pair of values occurs. Deterministic.

    Greedy (as in AETG, Cohen 1997): each row begins with a missing pair. For each further factor it takes the value
    that adds the most missing pairs.
    """
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    uses = dict.fromkeys(((name, i) for name in names for i in range(len(factors[name]))), 0)
    order = {name: place for place, name in enumerate(names)}

    def pair(one: tuple[str, int], other: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
        return (one, other) if order[one[0]] < order[other[0]] else (other, one)

    rows = []
    while missing:
        row = dict(min(missing, key=lambda two: (order[two[0][0]], order[two[1][0]], two[0][1], two[1][1])))
        for name in names:
            if name not in row:
                gains = [
                    (sum(pair((name, i), taken) in missing for taken in row.items()), -uses[name, i], -i)
                    for i in range(len(factors[name]))
                ]
                row[name] = -max(gains)[2]
        for choice in row.items():
            uses[choice] += 1
        missing -= {pair(*two) for two in itertools.combinations(row.items(), 2)}
        rows.append({name: factors[name][row[name]] for name in names})
    return rows
