"""Plots of the suites' results. Needs matplotlib."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"jpaged": "C3", "transformers": "C1", "openvino": "C0", "vllm": "C2", "llamacpp": "C4"}


def bars(groups: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: pathlib.Path) -> None:
    """Draw medians by group and engine, each group in a panel with its own scale. Whiskers show the range."""
    columns = min(4, len(groups)) or 1
    lines = max(1, -(-len(groups) // columns))
    figure = Figure(figsize=(2.6 * columns, 2.4 * lines), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for index, (name, engines) in enumerate(groups.items()):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.set_title(name, fontsize="x-small")
        for engine, values in engines.items():
            if values:
                middle = statistics.median(values)
                reach = [[middle - min(values)], [max(values) - middle]]
                axes.bar(engine, middle, yerr=reach, color=COLOURS[engine], capsize=2)
        axes.tick_params(axis="x", rotation=60, labelsize="x-small")
        axes.tick_params(axis="y", labelsize="x-small")
    figure.savefig(path, dpi=90)


def steps(lines: Mapping[tuple[str, int, int], Sequence[tuple[float, float]]], path: pathlib.Path) -> None:
    """Draw decode steps by keys: on the left 4 rows on linear axes, on the right jpaged with any number of rows."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title("4 rows", fontsize="small")
    right.set_title("jpaged, rows and threads", fontsize="small")
    for (engine, threads, rows), points in lines.items():
        style = "o-" if threads > 1 else "o:"
        if rows == 4:
            label = f"{engine}, threads: {threads}"
            left.plot(*_columns(points), style, markersize=3, color=COLOURS[engine], label=label)
        if engine == "jpaged":
            right.plot(*_columns(points), style, markersize=3, label=f"{rows} rows, threads: {threads}")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    _finish(left)
    _finish(right)
    figure.savefig(path, dpi=90)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(axes: Axes) -> None:
    axes.set_xlabel("keys read by each row", fontsize="small")
    axes.set_ylabel("ms a step", fontsize="small")
    if axes.get_yscale() == "linear":
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="x-small")
