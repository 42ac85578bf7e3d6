"""When the requests of a workload are sent."""

import dataclasses
import itertools
import math
from typing import Literal

import numpy as np

from jpaged.errors import RequestError

RampUp = Literal["linear", "exponential"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrivals:
    """A rate of requests, as in vLLM's load client."""

    rate: float = math.inf     # requests per second; inf: all at once
    burstiness: float = 1.0    # shape of the gamma distribution of gaps; 1 is a Poisson process
    ramp_up: RampUp | None = None
    start_rate: float | None = None  # with ramp_up: rate at the first request, and at the last
    end_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise RequestError("request_rate", self.rate, "must be above 0, or inf to send all requests at once")
        if not self.burstiness > 0:
            raise RequestError("burstiness", self.burstiness, "must be above 0; 1 is a Poisson process")
        ends = {"ramp_up_start_rps": self.start_rate, "ramp_up_end_rps": self.end_rate}
        for name, value in ends.items():
            if self.ramp_up is None and value is not None:
                raise RequestError(name, value, "only goes with --ramp-up-strategy")
            if self.ramp_up is not None and (value is None or not 0 < value < math.inf):
                raise RequestError(name, value, "--ramp-up-strategy needs a rate above 0")
        if self.ramp_up is not None and self.rate != math.inf:
            raise RequestError("request_rate", self.rate, "does not go with --ramp-up-strategy: leave it out")

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        """Return the time of each request after the first one, in seconds, in ascending order.

        Without a ramp, `count` requests take count / rate seconds: the times are scaled, as vLLM's client does. The sum
        of random gaps would differ by a percent or two.
        """
        rates = [self._rate(index, count) for index in range(count)]
        if math.isinf(rates[0]):
            return [0.0] * count
        if math.isinf(self.burstiness):
            gaps = [1 / rate for rate in rates]
        else:
            gaps = [rng.gamma(self.burstiness, 1 / (rate * self.burstiness)) for rate in rates]
        times = list(itertools.accumulate(gaps))
        if self.ramp_up is None and times[-1] > 0:
            scale = count / self.rate / times[-1]
            times = [time * scale for time in times]
        return [time - times[0] for time in times]

    def _rate(self, index: int, count: int) -> float:
        """Return the rate at a request, in requests per second."""
        if self.ramp_up is None or self.start_rate is None or self.end_rate is None:
            return self.rate
        progress = index / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.start_rate + (self.end_rate - self.start_rate) * progress
        return self.start_rate * (self.end_rate / self.start_rate) ** progress
