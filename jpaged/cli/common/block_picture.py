"""Draws a snapshot of the engine: one cell per block of the KV pool, in the colour of the owning request.

Imported late: matplotlib, which only the picture needs.
"""

import dataclasses
import pathlib

import numpy as np

from jpaged.cli.common.block_map import Look, lighter, looks, summary
from jpaged.snapshot import BlockSnapshot, EngineSnapshot

DPI = 100
LEFT, RIGHT, TOP = 64, 24, 88            # pixels around the cells
LEAST_WIDTH = 800                        # pixels: room for the legend
LEGEND_ROW = 22
MOST_LISTED = 24                         # maximum number of requests in the legend
CACHED = (0.80, 0.83, 0.88)
EMPTY = (1.0, 1.0, 1.0)
OUTLINE = (0.80, 0.80, 0.80)
UNFILLED = 0.7                           # fraction of white in the part of a block without tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Position of each block's cell in the picture."""

    num_blocks: int
    columns: int
    cell: int  # side of a cell in pixels, with the gap to the next cell

    @classmethod
    def of(cls, num_blocks: int) -> "Grid":
        """Choose columns and cell size: cells of up to 40 pixels for a small pool, of 2 pixels for a large one."""
        columns = next((wide for wide, most in ((16, 128), (32, 512), (64, 2048)) if num_blocks <= most), 0)
        columns = columns or 32 * -(-int((2 * num_blocks) ** 0.5) // 32)  # about twice as wide as high
        return cls(num_blocks, columns, min(40, max(2, 1152 // columns)))

    @property
    def rows(self) -> int:
        return -(-self.num_blocks // self.columns)

    @property
    def gap(self) -> int:
        """Gap between two cells, in pixels."""
        return 2 if self.cell >= 12 else 1 if self.cell >= 5 else 0

    def corner(self, block: int) -> tuple[int, int]:
        """Return the upper left pixel of a block's cell, (x, y), relative to the first cell."""
        row, column = divmod(block, self.columns)
        return column * self.cell, row * self.cell


def paint(snapshot: EngineSnapshot, known: dict[str, Look]) -> np.ndarray:
    """Draw the cells. Returns float32[height, width, 3]."""
    grid = Grid.of(len(snapshot.blocks))
    pixels = np.ones((grid.rows * grid.cell, grid.columns * grid.cell, 3), np.float32)
    side = grid.cell - grid.gap
    for block in snapshot.blocks:
        x, y = grid.corner(block.block)
        pixels[y : y + side, x : x + side] = _cell(block, side, snapshot.pool.block_size, known)
    return pixels


def _cell(block: BlockSnapshot, side: int, block_size: int, known: dict[str, Look]) -> np.ndarray:
    """Draw one block: a stripe per owner, in the owner's colour. The part without tokens is pale."""
    if not block.ref_count:
        cell = np.empty((side, side, 3), np.float32)
        cell[:] = EMPTY if block.prefix_hash is None else CACHED
        if side >= 4 and block.prefix_hash is None:
            cell[[0, -1]] = cell[:, [0, -1]] = OUTLINE
        return cell
    owners = dict.fromkeys((owner.request_id, owner.sample) for owner in block.owners)
    grey = Look("?", (0.5, 0.5, 0.5))
    colours = [known.get(request_id, grey).shade(sample) for request_id, sample in owners] or [grey.colour]
    x, y = np.meshgrid(np.arange(side), np.arange(side))
    stripe = max(side // 5, 1)
    cell = np.asarray(colours, np.float32)[(x + y) // stripe % len(colours)]
    unfilled = side - round(side * block.tokens / block_size)
    if unfilled:
        cell[:, side - unfilled :] += (1 - cell[:, side - unfilled :]) * UNFILLED
    return cell


def draw(snapshot: EngineSnapshot, path: pathlib.Path) -> None:
    """Draw the snapshot into a PNG file. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke

    known, grid = looks(snapshot), Grid.of(len(snapshot.blocks))
    pixels = paint(snapshot, known)
    high, wide = pixels.shape[:2]
    entries = [Patch(facecolor=look.colour, label=_label(snapshot, name)) for name, look in known.items()]
    if len(entries) > MOST_LISTED:
        rest = Patch(facecolor="none", label=f"and {len(entries) - MOST_LISTED:,} more requests")
        entries = [*entries[:MOST_LISTED], rest]
    dark, bright = (0.25, 0.45, 0.7), (0.85, 0.45, 0.3)
    entries += [
        Patch(facecolor=dark, edgecolor=bright, hatch="////", linewidth=0, label="striped: shared; number: owners"),
        Patch(facecolor=lighter(dark, UNFILLED), label="pale: slots without a token"),
        Patch(facecolor=CACHED, label="cached: free, reused by a prompt with the same prefix"),
        Patch(facecolor=EMPTY, edgecolor=OUTLINE, label="empty"),
    ]
    legend_high = LEGEND_ROW * -(-len(entries) // 2) + 24
    width, height = max(LEFT + wide + RIGHT, LEAST_WIDTH), TOP + high + legend_high
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    for line, text in enumerate(summary(snapshot)):
        figure.text(LEFT / width, 1 - (24 + 20 * line) / height, text, fontsize=10 if line else 12)
    # The axes cover whole pixels, so that each cell keeps its size in pixels.
    axes = figure.add_axes((LEFT / width, legend_high / height, wide / width, high / height))
    axes.imshow(pixels, interpolation="nearest", aspect="auto", extent=(0, wide, high, 0))
    axes.set_xticks([])
    every = max(1, -(-20 // grid.cell))  # one row number for this number of rows
    numbered = range(0, grid.rows, every)
    axes.set_yticks([(row + 0.5) * grid.cell for row in numbered], [f"{row * grid.columns:,}" for row in numbered])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    if grid.cell >= 16:
        outlined = [withStroke(linewidth=2.5, foreground="white")]
        for block in snapshot.blocks:
            if block.ref_count > 1:
                x, y = (start + (grid.cell - grid.gap) / 2 for start in grid.corner(block.block))
                size = min(grid.cell * 0.35, 11)
                axes.text(x, y, f"{block.ref_count}", fontsize=size, ha="center", va="center_baseline",
                          weight="bold", path_effects=outlined)  # fmt: skip
    legend = figure.legend(
        entries, ["-"] * len(entries), loc="upper left", bbox_to_anchor=(LEFT / width, (legend_high - 4) / height),
        ncols=2, fontsize=9, frameon=False, borderpad=0, borderaxespad=0,
    )  # fmt: skip
    # Texts are set after the legend is made, because matplotlib omits entries with labels that begin with _.
    for entry, patch in zip(legend.get_texts(), entries, strict=True):
        entry.set_parse_math(False)  # matplotlib would read a $ in a request id as math
        entry.set_text(str(patch.get_label()))
    figure.savefig(path, dpi=DPI, format="png")


def _label(snapshot: EngineSnapshot, request_id: str) -> str:
    """Return a request's text in the legend, summed over its parallel samples."""
    samples = [r for r in (*snapshot.running, *snapshot.waiting) if r.request_id == request_id]
    tokens = sum(sample.prompt_tokens + sample.output_tokens for sample in samples)
    name = request_id if len(request_id) <= 24 else f"{request_id[:12]}…{request_id[-8:]}"
    of = f"{len(samples)} samples, " if len(samples) > 1 else ""
    return f"{name}: {of}{tokens:,} tokens in {sum(sample.num_blocks for sample in samples):,} blocks"
