"""Times and tokens of one answer, measured by the client."""

import dataclasses
import time


@dataclasses.dataclass(slots=True)
class Answer:
    """One request's answer. All times are seconds of `time.perf_counter`."""

    start: float                  # when the request was sent
    waited: float = 0.0           # time in the client before the start, because of --max-concurrency
    first: float | None = None    # time from the start to the first output
    last: float = 0.0             # time of the last output on the clock
    latency: float = 0.0          # time from the start to the end of the answer
    gaps: list[float] = dataclasses.field(default_factory=list)  # between consecutive events with output
    prompt_tokens: int | None = None   # as counted by the server
    output_tokens: int | None = None
    text: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None      # why the request failed; None if it succeeded

    def received(self, text: str) -> None:
        """Record an event with output."""
        now = time.perf_counter()
        if self.first is None:
            self.first = now - self.start
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.text.append(text)

    @property
    def num_events(self) -> int:
        """Number of events with output."""
        return 0 if self.first is None else 1 + len(self.gaps)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, as counted by the server. Without the server's count, one per event."""
        return self.num_events if self.output_tokens is None else self.output_tokens

    @property
    def time_per_output_token(self) -> float | None:
        """Time from the first output to the end, per token after the first. None for fewer than two tokens."""
        tokens = self.num_output_tokens
        if self.first is None or tokens < 2:
            return None
        return (self.latency - self.first) / (tokens - 1)
