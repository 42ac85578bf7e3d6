"""Draws the distribution of the KL divergence per token. Needs matplotlib."""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from jpaged.divergence import Divergence

SMALLEST = 1e-8  # nats; smaller divergences are rounding errors of float32, and are drawn here


def plot_divergence(found: Divergence, title: str, path: pathlib.Path) -> None:
    """Draw a histogram and the cumulative distribution into a file, with mean and P99 marked."""
    values = np.maximum(found.per_token, SMALLEST)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    bars, curve = figure.subplots(1, 2)
    low, high = np.log10(np.percentile(values, 0.1)), np.log10(values.max())
    edges = np.logspace(low - 0.1, high + 0.1, 60)
    bars.hist(np.maximum(values, edges[0]), edges, color="#9db8c7")
    bars.set_ylabel("tokens", fontsize="small")
    curve.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), color="#28587b")
    curve.set_xlim(edges[0], edges[-1])
    curve.set_ylabel("share of tokens at or below", fontsize="small")
    curve.set_ylim(0, 1.02)
    marks = (("mean", found.mean, "#c8553d", "-"), ("P99", found.p99, "#5b8e7d", "--"))
    for axes in (bars, curve):
        for name, value, colour, style in marks:
            axes.axvline(max(value, SMALLEST), color=colour, linestyle=style, label=f"{name} {value:.3g}")
        axes.set_xscale("log")
        axes.set_xlabel("KL divergence of a token, nats", fontsize="small")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize="small")
    bars.legend(fontsize="small", frameon=False, loc="upper left")
    figure.savefig(path, dpi=110)
