"""Draws the speed-up by drafts, by batch size. Needs matplotlib."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

if TYPE_CHECKING:
    from jpaged.cli.bench.speculation import Row

COLOURS = ("#28587b", "#c8553d", "#5b8e7d", "#9db8c7")


def plot_speculation(rows: Sequence["Row"], title: str, path: pathlib.Path) -> None:
    """Draw speed-up with its interval, and drafts per row with the accepted part, into a PNG file."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    speed, drafts = figure.subplots(1, 2)
    for colour, (text, group) in zip(COLOURS, itertools.groupby(rows, key=lambda row: row.text), strict=False):
        each = list(group)
        sizes = [row.batch_size for row in each]
        middle = [row.speedup for row in each]
        below = [row.speedup - row.speedup_low for row in each]
        above = [row.speedup_high - row.speedup for row in each]
        speed.errorbar(sizes, middle, (below, above), color=colour, marker="o", capsize=3, label=text)
        drafts.plot(sizes, [row.drafts_per_row for row in each], color=colour, marker="o", label=f"{text}, drafted")
        accepted = [row.drafts_per_row * row.acceptance for row in each]
        drafts.plot(sizes, accepted, color=colour, marker="o", linestyle="--", label=f"{text}, accepted")
    speed.axhline(1, color="#888888", linewidth=0.8)
    speed.set_ylabel("speed-up: tokens/s with drafts / without", fontsize="small")
    drafts.set_ylabel("drafts per row and step", fontsize="small")
    for axes in (speed, drafts):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("requests at once", fontsize="small")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize="small")
        axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
