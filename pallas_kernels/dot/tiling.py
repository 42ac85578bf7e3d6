"""Tile sizes of `dot` for NVIDIA, and the number of parts that its inputs are cut into."""

import dataclasses

from pallas_kernels.platforms import has_small_blocks, num_multiprocessors

MAX_PARTS = 8
MIN_PART_INPUTS = 256  # four iterations: a shorter part waits longer for its first tile than it multiplies


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of a program's tile. It multiplies [rows, inputs] by [outputs, inputs] in each iteration."""

    rows: int     # of x
    outputs: int  # rows of the matrix
    inputs: int   # of one iteration
    warps: int = 4
    stages: int = 4  # of the software pipeline: one tile less is in flight

    @classmethod
    def by_rule(cls, rows: int, *, small_blocks: bool = False) -> "Tiling":
        """The rule for a number of rows. small_blocks: `platforms.has_small_blocks`.

        64 rows take 8 KiB of weights and 8 KiB of x per iteration, so that three programs fit into a multiprocessor.
        More rows have tiles of 128 rows: each byte of the matrix is then read half as often.
        """
        if rows <= 64:
            return FIXED
        return cls(128, 64, 64, warps=8, stages=3 if small_blocks else 4)

    @classmethod
    def choose(cls, rows: int) -> "Tiling":
        """The rule for the device that a kernel is traced for."""
        return cls.by_rule(rows, small_blocks=has_small_blocks())


# The only tile of "triton_fixed", for every number of rows. It has 64 rows, because fewer rows would use another matrix
# instruction on Hopper. With 64 outputs, four float32 sums of a tile fit into a program's registers: see `tree_dot`.
FIXED = Tiling(64, 64, 64)


def parts_that_fill(rows: int, outputs: int, inputs: int) -> int:
    """Number of parts of the inputs, a power of two, so that three quarters of the multiprocessors have a tile.

    Each part costs 8 bytes for each output: its sum is written and read. 256 rows of 1,024 outputs have 4 parts, with
    128 tiles on 132 multiprocessors. 8 parts would move 17 MB instead of 8.
    """
    tiling = Tiling.choose(rows)
    tiles = -(-rows // tiling.rows) * -(-outputs // tiling.outputs)
    parts, wanted = 1, 3 * num_multiprocessors() // 4
    while parts < MAX_PARTS and tiles * parts < wanted and _can_halve(inputs, parts, tiling.inputs):
        parts *= 2
    return parts


def _can_halve(inputs: int, parts: int, tile: int) -> bool:
    """True if the parts can be cut once more, into whole tiles of at least MIN_PART_INPUTS."""
    part = inputs // (2 * parts)
    return inputs % (2 * parts * tile) == 0 and part >= MIN_PART_INPUTS
