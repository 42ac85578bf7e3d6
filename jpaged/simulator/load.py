"""Arrivals: the requests of a simulated load, one at a time, so that a million of them take no memory.

A generated load is drawn from a seed: when requests arrive, how long they are, which prefix they begin with, and which
priority they have. `jpaged.simulator.trace` reads a recorded one.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jpaged.errors import RequestError

CHUNK = 4096  # requests drawn at a time
NO_PREFIX = -1


@dataclasses.dataclass(slots=True)
class Arrival:
    """One request of a load."""

    time: float             # seconds
    prompt_tokens: int      # all of the prompt, its prefix included
    output_tokens: int      # so many it generates
    prefix_id: int = NO_PREFIX  # requests with the same one begin with the same tokens
    prefix_tokens: int = 0  # so many of them
    priority: int = 0


class LengthDistribution:
    """Where numbers of tokens come from: "256", "uniform:64:448" or "lognormal:MEAN:SPREAD".

    SPREAD is the standard deviation over the mean. Draws are whole numbers of at least 1.
    """

    FORMS = "N, uniform:LOWEST:HIGHEST or lognormal:MEAN:SPREAD (standard deviation over mean)"

    def __init__(self, parameter: str, text: str):
        """parameter: what an error calls it."""
        kind, *values = f"fixed:{text}".split(":") if ":" not in text else text.split(":")
        numbers = [_number(parameter, text, value) for value in values]
        if (kind, len(numbers)) not in {("fixed", 1), ("uniform", 2), ("lognormal", 2)}:
            raise RequestError(parameter, text, f"must be {self.FORMS}")
        if kind != "lognormal" and any(number != int(number) for number in numbers):
            raise RequestError(parameter, text, "must be whole numbers of tokens")
        if numbers[0] < 1:
            raise RequestError(parameter, text, "must be at least 1 token")
        if kind == "uniform" and numbers[1] < numbers[0]:
            raise RequestError(parameter, text, "the highest must not be below the lowest")
        if kind == "lognormal" and numbers[1] < 0:
            raise RequestError(parameter, text, "the spread must be 0 or more")
        self._kind, self._numbers = kind, numbers

    @property
    def mean(self) -> float:
        """The average before anything is cut off."""
        return sum(self._numbers) / 2 if self._kind == "uniform" else self._numbers[0]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int64[count]"""
        match self._kind:
            case "fixed":
                return np.full(count, int(self._numbers[0]))
            case "uniform":
                return rng.integers(int(self._numbers[0]), int(self._numbers[1]), endpoint=True, size=count)
            case _:
                mean, spread = self._numbers
                variance = math.log1p(spread**2)
                drawn = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), size=count)
                return np.maximum(np.rint(drawn), 1).astype(np.int64)


def parse_priorities(text: str) -> tuple[tuple[int, float], ...]:
    """A mix of priorities, each with its share: "0", or "0:9,5:1" for nine of 0 to one of 5."""
    shares: dict[int, float] = {}
    for part in text.split(","):
        priority, _, share = part.partition(":")
        numbers = _number("priorities", text, priority), _number("priorities", text, share or "1")
        if numbers[0] != int(numbers[0]) or int(numbers[0]) in shares or not numbers[1] > 0:
            accepted = "must be PRIORITY:SHARE,...: whole numbers, each once; shares above 0"
            raise RequestError("priorities", text, accepted)
        shares[int(numbers[0])] = numbers[1]
    return tuple(shares.items())


class ArrivalTimes:
    """When requests arrive: "poisson"; "gamma:SPREAD", gaps whose standard deviation is so many times their mean; or
    "onoff:ON:OFF", Poisson for ON seconds and nothing for OFF seconds in turns.

    The rate is the average over everything, pauses included; with an infinite one all come at time 0.
    """

    FORMS = "poisson, gamma:SPREAD or onoff:ON_SECONDS:OFF_SECONDS"

    def __init__(self, text: str, rate: float):
        if not rate > 0:
            raise RequestError("rate", rate, "must be more than 0 requests a second, or inf")
        kind, *values = text.split(":")
        numbers = [_number("arrivals", text, value) for value in values]
        if (kind, len(numbers)) not in {("poisson", 0), ("gamma", 1), ("onoff", 2)}:
            raise RequestError("arrivals", text, f"must be {self.FORMS}")
        if (numbers and not numbers[0] > 0) or any(number < 0 for number in numbers):
            raise RequestError("arrivals", text, "spread and seconds must be more than 0")
        self._kind, self._numbers, self._rate = kind, numbers, rate

    def chunks(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """float64[CHUNK] at a time, never backwards, without end."""
        last = 0.0
        while True:
            if math.isinf(self._rate):
                yield np.zeros(CHUNK)
                continue
            if self._kind == "gamma":
                shape = self._numbers[0] ** -2
                gaps = rng.gamma(shape, 1 / (shape * self._rate), CHUNK)
            else:
                busy = self._busy_share()
                gaps = rng.exponential(busy / self._rate, CHUNK)
            times = last + np.cumsum(gaps)  # of an on/off load: on a clock that stands still while it is off
            last = float(times[-1])
            if self._kind == "onoff":
                on, off = self._numbers
                times = times + np.floor(times / on) * off
            yield times

    def _busy_share(self) -> float:
        return self._numbers[0] / sum(self._numbers) if self._kind == "onoff" else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedLoad:
    """A load that is drawn. The same fields give the same load, and so does each iteration over it."""

    num_requests: int
    times: ArrivalTimes
    prompt_tokens: LengthDistribution    # of a request's own part, behind its prefix
    output_tokens: LengthDistribution
    max_model_len: int                   # what is longer is cut to this
    seed: int = 0
    prefixes: int = 0                    # how many different ones there are
    prefix_tokens: int = 0
    prefix_zipf: float = 1.0             # the k-th most popular one is chosen in proportion to 1 / k ** this
    prefix_share: float = 1.0            # of the requests that begin with one
    priorities: Sequence[tuple[int, float]] = ((0, 1.0),)  # each with its share of the requests

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise RequestError("num_requests", self.num_requests, "must be at least 1")
        if self.seed < 0:
            raise RequestError("seed", self.seed, "must be 0 or more")
        if self.prefixes < 0:
            raise RequestError("prefixes", self.prefixes, "must be 0 or more")
        if (self.prefixes > 0) != (self.prefix_tokens > 0) or self.prefix_tokens < 0:
            raise RequestError("prefix_tokens", self.prefix_tokens, "shared prefixes need --prefixes and this above 0")
        if self.prefix_tokens + 2 > self.max_model_len:
            raise RequestError(
                "prefix_tokens", self.prefix_tokens, f"leaves nothing of max_model_len={self.max_model_len}"
            )
        if not self.prefix_zipf >= 0:
            raise RequestError("prefix_zipf", self.prefix_zipf, "must be 0 or more")
        if not 0 <= self.prefix_share <= 1:
            raise RequestError("prefix_share", self.prefix_share, "must be a share: from 0 to 1")
        if not self.priorities or not all(0 < share < math.inf for _, share in self.priorities):
            raise RequestError("priorities", self.priorities, "each needs a share above 0")

    def __iter__(self) -> Iterator[Arrival]:
        # A stream of numbers a purpose: another distribution of one leaves the others as they were.
        when, prompts, outputs, prefixes, priorities = np.random.default_rng(self.seed).spawn(5)
        popularity = np.arange(1, self.prefixes + 1, dtype=float) ** -self.prefix_zipf
        cumulative = np.cumsum(popularity) / popularity.sum() if self.prefixes else None
        values = np.array([priority for priority, _ in self.priorities])
        shares = np.array([share for _, share in self.priorities])
        left = self.num_requests
        for times in self.times.chunks(when):
            ids = np.full(CHUNK, NO_PREFIX)
            if cumulative is not None:
                begins = prefixes.random(CHUNK) < self.prefix_share
                ids = np.where(begins, np.searchsorted(cumulative, prefixes.random(CHUNK)), NO_PREFIX)
            shared = np.where(ids >= 0, self.prefix_tokens, 0)
            prompt = np.minimum(shared + self.prompt_tokens.draw(prompts, CHUNK), self.max_model_len - 1)
            output = np.minimum(self.output_tokens.draw(outputs, CHUNK), self.max_model_len - prompt)
            chosen = priorities.choice(values, CHUNK, p=shares / shares.sum())
            columns = (times, prompt, output, ids, shared, chosen)
            for fields in zip(*(column[:left].tolist() for column in columns), strict=True):
                yield Arrival(*fields)
            left -= min(left, CHUNK)
            if not left:
                return


def _number(parameter: str, text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(parameter, text, f"{value!r} is not a number")
    return number
