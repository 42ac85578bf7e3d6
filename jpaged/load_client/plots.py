"""PNG plots of the load client's runs. Needs matplotlib."""

import pathlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jpaged.load_client.metrics import BenchmarkMetrics

COLOURS = ("#c8553d", "#28587b", "#5b8e7d")


def plot_concurrency(runs: Sequence[BenchmarkMetrics], title: str, path: pathlib.Path) -> None:
    """Plot TTFT, inter-token latency and throughput over the concurrency of the runs."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    first, second, third = figure.subplots(1, 3)
    where = [run.max_concurrency or run.max_concurrent_requests for run in runs]
    for axes, metric, name in ((first, "ttft", "time to first token"), (second, "itl", "inter-token latency")):
        _latency(axes, where, runs, metric)
        axes.set_title(f"{name}, ms", fontsize="small")
    third.plot(where, [run.output_throughput for run in runs], "o-", color=COLOURS[0], label="generated")
    third.plot(where, [run.total_token_throughput for run in runs], "o:", color=COLOURS[1], label="with prompts")
    third.set_title("tokens per second", fontsize="small")
    for axes in (first, second, third):
        axes.set_xscale("log", base=2)
        axes.set_xticks(where, [str(value) for value in where])
        axes.set_xlabel("requests at a time", fontsize="small")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize="small")
        axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)


def _latency(axes: Axes, where: Sequence[int], runs: Sequence[BenchmarkMetrics], metric: str) -> None:
    latencies = [run.latencies[metric] for run in runs]
    axes.plot(where, [one.median for one in latencies], "o-", color=COLOURS[0], label="median")
    axes.plot(where, [one.mean for one in latencies], "o:", color=COLOURS[1], label="mean")
    for cut in latencies[0].percentiles:
        axes.plot(where, [one.percentiles[cut] for one in latencies], "o--", color=COLOURS[2], label=f"P{cut:g}")
