"""Times and tokens of one answer, as the client sees them."""

import dataclasses
import time


@dataclasses.dataclass(slots=True)
class Answer:
    """One request's answer. All times are in seconds, of `time.perf_counter`."""

    start: float                  # when the request was sent
    waited: float = 0.0           # time that the request waited for --max-concurrency before it was sent
    first: float | None = None    # time from the start to the first output
    last: float = 0.0             # moment of the last output
    latency: float = 0.0          # time from the start to the end of the answer
    gaps: list[float] = dataclasses.field(default_factory=list)  # between two events with output, after the first
    prompt_tokens: int | None = None   # as the server counts them
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
        """Tokens that were generated: the server's count, or one per event if the server does not count."""
        return self.num_events if self.output_tokens is None else self.output_tokens

    @property
    def time_per_output_token(self) -> float | None:
        """Time from the first to the last output, per token after the first. None for an answer of one token."""
        tokens = self.num_output_tokens
        if self.first is None or tokens < 2:
            return None
        return (self.latency - self.first) / (tokens - 1)
