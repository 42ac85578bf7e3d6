"""Plots a run: requests, KV use and tokens over time, and the distributions of latencies. Needs matplotlib.

Imported late: matplotlib, which only pictures need.
"""

import pathlib
from typing import Any

from jpaged.errors import RequestError
from jpaged.simulator.results import SimulationResult


def check_plot(path: pathlib.Path) -> None:
    """Raise RequestError if a picture cannot be drawn or written, before the run."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        advice = "needs matplotlib: python -m pip install matplotlib"
        raise RequestError("plot", str(path), advice) from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise RequestError("plot", str(path), f"must end in the format's name: one of {', '.join(sorted(formats))}")
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise RequestError("plot", str(path), f"cannot be written: {error.strerror}") from None


def draw(result: SimulationResult, path: pathlib.Path, title: str) -> None:
    """Write the picture in the format of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(4, 2, width_ratios=(3, 2))
    over_time = [figure.add_subplot(grid[row, 0]) for row in range(4)]
    points = result.timeline
    times = [point.time for point in points]
    panels: list[tuple[str, dict[str, list[float]]]] = [
        ("requests running", {"running": [point.running for point in points]}),
        ("requests waiting", {"waiting": [point.waiting for point in points]}),
        ("KV blocks held, %", {"held": [100 * point.kv_use for point in points]}),
        (
            "tokens a second",
            {
                "prompt, computed": [point.prompt_tokens for point in points],
                "output": [point.output_tokens for point in points],
            },
        ),
    ]
    for axes, (label, lines) in zip(over_time, panels, strict=True):
        for name, values in lines.items():
            axes.plot(times, values, linewidth=1, label=name)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize="small")
        if axes is not over_time[-1]:
            axes.tick_params(labelbottom=False)
    over_time[-1].set_xlabel("simulated seconds")
    for index, (name, latency) in enumerate(result.latencies().items()):
        _distribution(figure.add_subplot(grid[index, 1]), name, latency)
    figure.savefig(path, dpi=110)


def _distribution(axes: Any, name: str, latency: Any) -> None:
    """Draw the share of values up to each time, in %."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.step(latency.edges, [100 * share for share in latency.shares], where="post", linewidth=1)
    for percent, value in ((50, latency.p50), (90, latency.p90), (99, latency.p99)):
        axes.plot([value], [percent], "o", markersize=3, color="black")
        axes.annotate(f" p{percent} {value:.3g} s", (value, percent), fontsize="x-small", va="top")
    # Start at the first percentile: a few times near 0 would take most of a logarithmic axis.
    first = next((edge for edge, share in zip(latency.edges, latency.shares, strict=True) if share >= 0.01), 0.0)
    if first > 0:
        axes.set_xscale("log")
        lowest = max(first / 1.5, latency.max * 1e-4)
        axes.set_xlim(lowest, latency.max * 1.5)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if latency.max < 100 * lowest else (1,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.set_ylim(0, 102)
    axes.set_ylabel("%")
    axes.set_xlabel(f"{name.lower()}, seconds", fontsize="small")
    axes.grid(alpha=0.3)
