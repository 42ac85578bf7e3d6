"""Send times of a workload's requests."""

import dataclasses
import itertools
import math
from typing import Literal

import numpy as np

from jpaged.errors import RequestError

RampUp = Literal["linear", "exponential"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Request rate and its distribution, as in vLLM's load client. Raises RequestError for bad values."""

    rate: float = math.inf     # requests per second; inf: all at once
    burstiness: float = 1.0    # shape of the gamma distribution of gaps; 1 is a Poisson process
    ramp_up: RampUp | None = None
    start_rate: float | None = None  # with ramp_up: rate at the first request; end_rate: at the last
    end_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise RequestError("request_rate", self.rate, "must be above 0, or inf to send all requests at once")
        if not self.burstiness > 0:
            raise RequestError("burstiness", self.burstiness, "must be above 0; 1 is a Poisson process")
        ends = {"ramp_up_start_rps": self.start_rate, "ramp_up_end_rps": self.end_rate}
        for name, value in ends.items():
            if self.ramp_up is None and value is not None:
                raise RequestError(name, value, "needs --ramp-up-strategy")
            if self.ramp_up is not None and (value is None or not 0 < value < math.inf):
                raise RequestError(name, value, "must be above 0 with --ramp-up-strategy")
        if self.ramp_up is not None and self.rate != math.inf:
            raise RequestError("request_rate", self.rate, "does not go with --ramp-up-strategy: leave it out")

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        """Return each request's time in seconds since the first request, in ascending order.

        Without a ramp, the gaps are scaled to a sum of count / rate seconds, as in vLLM's client. The sum of unscaled
        random gaps differs by 1% to 2%.
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
        """Return the rate at request `index` of `count`, in requests per second."""
        if self.ramp_up is None or self.start_rate is None or self.end_rate is None:
            return self.rate
        progress = index / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.start_rate + (self.end_rate - self.start_rate) * progress
        return self.start_rate * (self.end_rate / self.start_rate) ** progress
