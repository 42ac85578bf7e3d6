"""The text of `/metrics`: engine metrics under vLLM's names, further ones as `jpaged:`, and HTTP requests.

prometheus_client writes the text. Its own histograms are not used for the engine: there an observation takes 2.4 us,
in `jpaged.metrics.Histogram` 0.2 us (`benchmarks/host_overhead.py`), and the engine's thread would pay for it. The
collector here copies the engine's metrics at each scrape.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client import generate_latest as plain_text
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector

from jpaged import metric_families
from jpaged.errors import JPagedError
from jpaged.metric_families import MetricFamily, families_of, histogram_metric
from jpaged.metrics import EngineMetricsSnapshot, Histogram

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
FAMILIES: dict[
    type[metric_families.Metric], type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
] = {
    metric_families.Counter: CounterMetricFamily,
    metric_families.Gauge: GaugeMetricFamily,
    metric_families.Histogram: HistogramMetricFamily,
}

Snapshots = Callable[[], Sequence[EngineMetricsSnapshot | None]]


class EngineCollector(Collector):
    """Converts the metrics of engines to prometheus_client's metric families, at each scrape."""

    def __init__(self, snapshots: Snapshots, model_name: str):
        """snapshots: returns one per engine; None for an engine that collects no metrics."""
        self._snapshots = snapshots
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Return nothing: the registry need not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families. Yields nothing if the engines are closed, or collect no metrics."""
        try:
            snapshots = [snapshot for snapshot in self._snapshots() if snapshot is not None]
        except JPagedError:
            return
        if snapshots:
            yield from map(_prometheus_family, families_of(snapshots, self._model_name))


def _prometheus_family(family: MetricFamily) -> Metric:
    made = FAMILIES[type(family.metrics[0])](family.name, family.text, labels=list(family.metrics[0].labels))
    for metric in family.metrics:
        values = list(metric.labels.values())
        if isinstance(made, HistogramMetricFamily):
            assert isinstance(metric, metric_families.Histogram)
            made.add_metric(values, list(metric.buckets.items()), metric.sum)
        else:
            assert not isinstance(metric, metric_families.Histogram)
            made.add_metric(values, metric.value)
    return made


@dataclasses.dataclass(slots=True)
class HTTPCounts:
    """Answered HTTP requests of one process, as plain data: processes send it to each other.

    requests: by route, method and class of status. seconds: by route and method.
    """

    requests: Counter[tuple[str, str, str]] = dataclasses.field(default_factory=Counter)
    seconds: dict[tuple[str, str], Histogram] = dataclasses.field(default_factory=dict)

    def add(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a request."""
        method = method if method in METHODS else "other"  # clients choose it: labels must stay few
        self.requests[handler, method, f"{status // 100}xx"] += 1
        self.seconds.setdefault((handler, method), Histogram(REQUEST_SECONDS)).observe(seconds)

    def merged(self, others: Sequence[Self]) -> "HTTPCounts":
        """The sums of several processes."""
        total = HTTPCounts(Counter(self.requests), {key: each.copy() for key, each in self.seconds.items()})
        for other in others:
            total.requests += other.requests
            for key, each in other.seconds.items():
                mine = total.seconds.setdefault(key, Histogram(each.bounds))
                mine.counts = [a + b for a, b in zip(mine.counts, each.counts, strict=True)]
                mine.sum += each.sum
        return total


class _HTTPCollector(Collector):
    """Converts `counts` to prometheus_client's metric families."""

    def __init__(self, counts: HTTPCounts):
        self.counts = counts

    def describe(self) -> list[Metric]:
        """Return nothing, as `EngineCollector`."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield both families."""
        text = "HTTP requests by route, method and class of status."
        requests = CounterMetricFamily("http_requests", text, labels=("handler", "method", "status"))
        for labels, count in self.counts.requests.items():
            requests.add_metric(labels, count)
        yield requests
        text = "Time to answer a request, a stream to its end."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=("handler", "method"))
        for labels, histogram in self.counts.seconds.items():
            metric = histogram_metric(seconds.name, {}, histogram)
            seconds.add_metric(labels, list(metric.buckets.items()), metric.sum)
        yield seconds


class ServerMetrics:
    """Everything that `/metrics` shows: the engines, the HTTP requests, and the process.

    http: the requests of this process.
    """

    def __init__(self, snapshots: Snapshots, model_name: str):
        """snapshots: as `EngineCollector`. model_name: value of the label."""
        self.http = HTTPCounts()
        self._http = _HTTPCollector(self.http)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(snapshots, model_name))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(self._http)

    def note_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request. handler: path of its route."""
        self.http.add(handler, method, status, seconds)

    def text(self, accept: str, others: Sequence[HTTPCounts] = ()) -> tuple[bytes, str]:
        """Return the text, and its content type. accept: the header of the request. Takes milliseconds.

        others: counts of the server's other processes.

        The format is OpenMetrics if the client lists it, else Prometheus' 0.0.4. The header's versions are not read:
        both formats suit every version of Prometheus.
        """
        self._http.counts = self.http.merged(others)
        if "application/openmetrics-text" in accept:
            # With its default escaping, prometheus_client 0.26 writes samples' names with underscores for colons.
            return openmetrics_text(self._registry, escaping=ALLOWUTF8), OPENMETRICS
        return plain_text(self._registry), PLAIN
