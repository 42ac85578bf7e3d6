"""Records: statistics of a run, in constant memory."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from jpaged.simulator.histogram import Histogram
from jpaged.simulator.timeline import Timeline


class Recorded(Protocol):
    """The attributes of a simulated request that records read."""

    request_id: str
    arrived: float         # seconds
    final_length: int      # tokens, prompt included
    priority: int

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        ...


@dataclasses.dataclass(slots=True)
class Records:
    """Distributions and sums over all replicas of a run. Times are in seconds."""

    timeline: Timeline
    watch: Callable[[str, Recorded, float], None] | None = None  # called with "start" and "finish"; for tests
    first_token: Histogram = dataclasses.field(default_factory=Histogram)  # from arrival
    inter_token: Histogram = dataclasses.field(default_factory=Histogram)  # from the request's previous token
    end_to_end: Histogram = dataclasses.field(default_factory=Histogram)   # from arrival to the last token
    queued: Histogram = dataclasses.field(default_factory=Histogram)       # from arrival to the request's first step
    finished: int = 0
    refused: int = 0
    prompt_tokens: int = 0    # of finished requests
    output_tokens: int = 0    # of finished requests
    sampled_tokens: int = 0
    computed_tokens: int = 0  # in all steps, with recomputed tokens, without padding
    steps: int = 0
    steps_beyond: int = 0     # steps with a load larger than every measured one
    busy: float = 0.0         # seconds of steps, summed over replicas
    between_devices: float = 0.0  # seconds of all-reduces, part of `busy`
    end: float = 0.0          # time of the last token

    def note_step(self, computed_tokens: int, seconds: float, between_devices: float, *, beyond: bool) -> None:
        """Record the start of a step. between_devices: seconds of its all-reduces, part of `seconds`."""
        self.steps += 1
        self.computed_tokens += computed_tokens
        self.busy += seconds
        self.between_devices += between_devices
        self.steps_beyond += beyond

    def note_start(self, request: Recorded, time: float) -> None:
        """Record the first step of a request."""
        self.queued.add(time - request.arrived)
        if self.watch is not None:
            self.watch("start", request, time)

    def note_tokens(
        self, since: float, now: float, *, running: int, waiting: int, kv_use: float, prompt_tokens: int,
        output_tokens: int,
    ) -> None:  # fmt: skip
        """Record a step's tokens. running, waiting and kv_use describe the replica from `since` to `now`."""
        self.sampled_tokens += output_tokens
        self.timeline.add(since, now, running, waiting, kv_use, prompt_tokens, output_tokens)
        self.end = max(self.end, now)

    def note_finish(self, request: Recorded, time: float) -> None:
        """Record the last token of a request."""
        self.finished += 1
        self.prompt_tokens += request.prompt_len
        self.output_tokens += request.final_length - request.prompt_len
        self.end_to_end.add(time - request.arrived)
        if self.watch is not None:
            self.watch("finish", request, time)
