"""Metrics of a run with the names of `vllm bench serve`, and the table that it prints."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.errors import RequestError
from jpaged.load_client.answer import Answer
from jpaged.load_client.drafts import DraftCounts
from jpaged.load_client.run import Run

WIDTH = 50  # of the table, in characters
NAMES = {  # metric -> (short name, title)
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True)
class Latency:
    """Distribution of one metric, in milliseconds."""

    metric: str
    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> "Latency":
        """Summarise values in seconds. Without values, all results are NaN."""
        values = np.asarray(seconds or [math.nan]) * 1e3
        cuts = {cut: float(np.percentile(values, cut)) for cut in percentiles}
        return cls(metric, float(values.mean()), float(np.median(values)), float(values.std()), cuts)

    def lines(self) -> list[str]:
        """Lines of the metric in the table."""
        name, title = NAMES[self.metric]
        rows = {"Mean": self.mean, "Median": self.median}
        rows |= {f"P{cut:g}": value for cut, value in self.percentiles.items()}
        return [f"{title:-^{WIDTH}}", *(_line(f"{row} {name} (ms):", value) for row, value in rows.items())]

    def fields(self) -> dict[str, float]:
        """Fields of the metric in the result file."""
        fields = {f"mean_{self.metric}_ms": self.mean, f"median_{self.metric}_ms": self.median}
        fields[f"std_{self.metric}_ms"] = self.std
        return fields | {f"p{cut:g}_{self.metric}_ms": value for cut, value in self.percentiles.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkMetrics:
    """All metrics of a run. Throughput is averaged over the whole run."""

    completed: int
    failed: int
    duration: float             # seconds
    total_input_tokens: int
    total_output_tokens: int
    max_output_tokens_per_s: float  # in the second with the most output
    max_concurrent_requests: int
    goodput: float | None       # requests per second that met all limits of --goodput
    latencies: Mapping[str, Latency]
    max_concurrency: int | None = None
    request_rate: float = math.inf
    drafts: DraftCounts | None = None  # None: the server does not speculate

    @property
    def request_throughput(self) -> float:
        """Requests per second."""
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second."""
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        """Prompt and generated tokens per second."""
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    def table(self, generates: bool = True) -> str:
        """Table that `vllm bench serve` prints. generates: False for embeddings, which have no output tokens."""
        rows: list[tuple[str, float | None]] = [
            ("Successful requests:", self.completed),
            ("Failed requests:", self.failed),
            ("Maximum request concurrency:", self.max_concurrency),
            ("Request rate configured (RPS):", None if math.isinf(self.request_rate) else float(self.request_rate)),
            ("Benchmark duration (s):", self.duration),
            ("Total input tokens:", self.total_input_tokens),
            ("Total generated tokens:", self.total_output_tokens if generates else None),
            ("Request throughput (req/s):", self.request_throughput),
            ("Request goodput (req/s):", self.goodput),
            ("Output token throughput (tok/s):", self.output_throughput if generates else None),
            ("Peak output token throughput (tok/s):", self.max_output_tokens_per_s if generates else None),
            ("Peak concurrent requests:", float(self.max_concurrent_requests)),
            ("Total token throughput (tok/s):", self.total_token_throughput),
        ]
        lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
        lines += [_line(name, value) for name, value in rows if value is not None]
        for latency in self.latencies.values():
            lines += latency.lines()
        if self.drafts is not None:
            lines += [f"{'Speculative Decoding':-^{WIDTH}}", *(_line(*row) for row in self.drafts.rows())]
        return "\n".join([*lines, "=" * WIDTH])

    def fields(self) -> dict[str, Any]:
        """Fields of the result file, with vLLM's names."""
        plain = {
            "duration": self.duration, "completed": self.completed, "failed": self.failed,
            "total_input_tokens": self.total_input_tokens, "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput, "request_goodput": self.goodput,
            "output_throughput": self.output_throughput, "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
        }  # fmt: skip
        for latency in self.latencies.values():
            plain |= latency.fields()
        return plain | ({} if self.drafts is None else self.drafts.fields())


def _line(name: str, value: float) -> str:
    """One line of the table. Integers as they are, floats with two decimals."""
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def summarise(
    run: Run,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None = None,
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
    drafts: DraftCounts | None = None,
) -> BenchmarkMetrics:
    """Summarise a run. goodput: limit of each metric, in milliseconds. A good request is within all limits."""
    good = [answer for answer in run.answers if answer.error is None]
    values = {
        "ttft": [answer.first for answer in good if answer.first is not None],
        "tpot": [time for answer in good if (time := answer.time_per_output_token) is not None],
        "itl": [gap for answer in good for gap in answer.gaps],
        "e2el": [answer.latency for answer in good],
    }
    return BenchmarkMetrics(
        completed=len(good), failed=len(run.answers) - len(good), duration=run.seconds,
        total_input_tokens=sum(answer.prompt_tokens or 0 for answer in good),
        total_output_tokens=sum(answer.num_output_tokens for answer in good),
        max_output_tokens_per_s=float(_output_per_second(good).max()), max_concurrent_requests=_most_at_a_time(good),
        goodput=sum(_is_good(answer, goodput) for answer in good) / run.seconds if goodput else None,
        latencies={metric: Latency.of(metric, values[metric], percentiles) for metric in metrics},
        max_concurrency=max_concurrency, request_rate=request_rate, drafts=drafts,
    )  # fmt: skip


def details(run: Run) -> dict[str, list[Any]]:
    """Lists with one value per request, in request order, with vLLM's names. Times are in seconds."""
    answers = run.answers
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "ttfts": [answer.first for answer in answers],
        "itls": [answer.gaps for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.start for answer in answers],
        "queue_times": [answer.waited for answer in answers],
        "generated_texts": ["".join(answer.text) for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse limits like `ttft:200`, in milliseconds. Raises RequestError."""
    limits = {}
    for pair in pairs:
        metric, _, value = pair.partition(":")
        try:
            limits[metric] = float(value)
        except ValueError:
            limits[metric] = -1.0
        if metric not in GOODPUT_METRICS or not 0 <= limits[metric] < math.inf:
            accepted = f"must be METRIC:MILLISECONDS, with a metric of {', '.join(GOODPUT_METRICS)}"
            raise RequestError("goodput", pair, accepted)
    return limits


def _is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    # As in vLLM, the time per output token of an answer of one token is 0.
    values = {"ttft": answer.first, "tpot": answer.time_per_output_token, "e2el": answer.latency}
    return all((values[metric] or 0.0) * 1e3 <= limit for metric, limit in limits.items())


def _output_per_second(answers: Sequence[Answer]) -> np.ndarray:
    """Return float64[seconds]: tokens received in each second of the run.

    An event may have several tokens. Each event of an answer counts as the answer's mean number of tokens per event.
    """
    if not answers:
        return np.zeros(1)
    begin = min(answer.start for answer in answers)
    tokens = np.zeros(int(max(answer.start + answer.latency for answer in answers) - begin) + 1)
    for answer in answers:
        if answer.first is not None:
            moments = answer.start + answer.first - begin + np.cumsum([0.0, *answer.gaps])
            each = answer.num_output_tokens / answer.num_events
            np.add.at(tokens, np.minimum(moments.astype(int), len(tokens) - 1), each)
    return tokens


def _most_at_a_time(answers: Sequence[Answer]) -> int:
    """Return the largest number of requests that ran at the same moment.

    vLLM's client counts all requests within a second instead: 10 for ten short requests that run one by one.
    """
    changes = [(answer.start, 1) for answer in answers]
    changes += [(answer.start + answer.latency, -1) for answer in answers]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)
