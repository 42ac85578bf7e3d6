"""Tile sizes of the NVIDIA kernel, and the splits of its sums. No GPU was measured yet: they follow a rule."""

import dataclasses

from pallas_kernels.platforms import has_small_blocks, num_multiprocessors

FEW_ROWS, SOME_ROWS = 16, 64
LEAST_STEPS = 4  # of a split: the pipeline of loads must fill


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of a program's tile. It multiplies [outputs, inputs] of weights by [rows, inputs]."""

    rows: int     # of x
    outputs: int
    inputs: int   # of one iteration: 64 or 128
    warps: int = 4
    stages: int = 4  # of the software pipeline: one tile less is in flight
    splits: int = 1  # of the inputs, at fixed positions; a program sums one split

    @classmethod
    def by_rule(
        cls, rows: int, inputs: int, outputs: int, *, multiprocessors: int, small_blocks: bool = False
    ) -> "Tiling":
        """rows, inputs, outputs: of the call. small_blocks: `platforms.has_small_blocks`.

        Up to 64 rows, a call takes as long as reading the weights. The inputs are split until about two programs share
        a multiprocessor: one waits for memory while the other computes. More splits would cost time, because each
        writes a float32 for each row and output. Hopper's smallest matrix instruction takes 64 outputs. Up to 16 rows,
        five tiles in flight are 20 KiB of codes per program, and 40 KiB per multiprocessor. An H200 needs about 27 KiB
        (4.8 TB/s times 0.75 us).
        """
        if rows > SOME_ROWS:
            return cls(128, 128, 64 if small_blocks else 128, warps=8, stages=2 if small_blocks else 3)
        tiles, steps, splits = -(-outputs // 64), -(-inputs // 128), 1
        while tiles * splits < 1.9 * multiprocessors and steps // (2 * splits) >= LEAST_STEPS:
            splits *= 2
        if rows <= FEW_ROWS:
            return cls(FEW_ROWS, 64, 128, stages=4 if small_blocks else 6, splits=splits)
        return cls(SOME_ROWS, 64, 128, stages=3 if small_blocks else 4, splits=splits)

    @classmethod
    def for_blocks(cls, rows: int, *, small_blocks: bool = False) -> "Tiling":
        """The tiling for blocks of rows with a matrix each: `by_rule` without splits.

        Several matrices are multiplied at once, so there are enough programs. A token of Qwen3 30B A3B has 8 experts of
        24 and 32 tiles. A token of gpt-oss 20B has 4 of 90 and 45 tiles.
        """
        whole = cls.by_rule(min(rows, SOME_ROWS), 0, 0, multiprocessors=0, small_blocks=small_blocks)
        return dataclasses.replace(whole, rows=min(SOME_ROWS, max(FEW_ROWS, 1 << (rows - 1).bit_length())))


def choose(rows: int, inputs: int, outputs: int) -> Tiling:
    """The tiling for the device that a kernel is traced for."""
    return Tiling.by_rule(
        rows, inputs, outputs, multiprocessors=num_multiprocessors(), small_blocks=has_small_blocks()
    )


def choose_for_blocks(rows: int) -> Tiling:
    """The tiling of `quantized_grouped_dot` for the device that a kernel is traced for. rows: of a block."""
    return Tiling.for_blocks(rows, small_blocks=has_small_blocks())
