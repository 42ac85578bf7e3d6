"""Generates the requests of a simulated load one at a time, so that memory does not grow with their number.

Arrival times, lengths, prefixes and priorities are random, from a seed. `jpaged.simulator.trace` reads recorded loads.
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
    prompt_tokens: int      # length of the prompt, including its prefix
    output_tokens: int      # number of tokens that it generates
    prefix_id: int = NO_PREFIX  # requests with the same prefix_id start with the same tokens
    prefix_tokens: int = 0  # length of the prefix
    priority: int = 0


class LengthDistribution:
    """Distribution of lengths in tokens, whole numbers of at least 1: "256", "uniform:64:448", "lognormal:MEAN:SPREAD".

    SPREAD is the standard deviation divided by the mean.
    """

    FORMS = "N, uniform:LOWEST:HIGHEST or lognormal:MEAN:SPREAD (standard deviation over mean)"

    def __init__(self, parameter: str, text: str):
        """Parse a distribution. parameter: name of the option, for errors. Raises RequestError."""
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
        """Mean of the distribution, before lengths are cut to max_model_len."""
        return sum(self._numbers) / 2 if self._kind == "uniform" else self._numbers[0]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw int64[count]."""
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
    """Parse priorities and their shares: "0", or "0:9,5:1" for nine requests of priority 0 to one of priority 5."""
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
    """Random arrival times: "poisson", "gamma:SPREAD" or "onoff:ON:OFF".

    gamma: the standard deviation of gaps is SPREAD times their mean. onoff: Poisson arrivals for ON seconds, then none
    for OFF seconds, repeated. The rate is the average over all time, with pauses. If infinite, all arrive at time 0.
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
        """Yield arrival times in seconds, float64[CHUNK] at a time, ascending, endlessly."""
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
            times = last + np.cumsum(gaps)  # onoff: on a clock that stops during pauses
            last = float(times[-1])
            if self._kind == "onoff":
                on, off = self._numbers
                times = times + np.floor(times / on) * off
            yield times

    def _busy_share(self) -> float:
        return self._numbers[0] / sum(self._numbers) if self._kind == "onoff" else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedLoad:
    """A random load. Equal fields give equal loads, and every iteration gives the same requests."""

    num_requests: int
    times: ArrivalTimes
    prompt_tokens: LengthDistribution    # length of a prompt without its prefix
    output_tokens: LengthDistribution
    max_model_len: int                   # longer requests are cut to this length
    seed: int = 0
    prefixes: int = 0                    # number of different prefixes
    prefix_tokens: int = 0               # length of a prefix
    prefix_zipf: float = 1.0             # the k-th most popular prefix has a probability proportional to 1 / k**zipf
    prefix_share: float = 1.0            # share of requests with a prefix
    priorities: Sequence[tuple[int, float]] = ((0, 1.0),)  # (priority, share of requests)

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise RequestError("num_requests", self.num_requests, "must be at least 1")
        if self.seed < 0:
            raise RequestError("seed", self.seed, "must be 0 or more")
        if self.prefixes < 0:
            raise RequestError("prefixes", self.prefixes, "must be 0 or more")
        if (self.prefixes > 0) != (self.prefix_tokens > 0) or self.prefix_tokens < 0:
            raise RequestError("prefix_tokens", self.prefix_tokens, "must be above 0 if --prefixes is, else 0")
        if self.prefix_tokens + 2 > self.max_model_len:
            raise RequestError(
                "prefix_tokens", self.prefix_tokens, f"must be at most max_model_len - 2 = {self.max_model_len - 2}"
            )
        if not self.prefix_zipf >= 0:
            raise RequestError("prefix_zipf", self.prefix_zipf, "must be 0 or more")
        if not 0 <= self.prefix_share <= 1:
            raise RequestError("prefix_share", self.prefix_share, "must be a share: from 0 to 1")
        if not self.priorities or not all(0 < share < math.inf for _, share in self.priorities):
            raise RequestError("priorities", self.priorities, "each needs a share above 0")

    def __iter__(self) -> Iterator[Arrival]:
        # One random stream per purpose: changing one distribution does not change the other values.
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
