"""Reads the machine code of the prefill kernels for an H200: instructions, tensor-core cycles and overlap per tile.

    python benchmarks/prefill_sass.py      # needs JAX's CUDA plugin and nvidia-cuda-nvdisasm, but no GPU
    python benchmarks/prefill_sass.py --only llama-3-8b

A tile is one iteration of the kernel's main loop, over keys that every query sees. *Issue cycles* are the instructions
that one scheduler of a multiprocessor issues for a tile, one a cycle: a warp of each warp group that attends, and for
Mosaic GPU a warp that copies. *Matmul cycles* are the tile's cycles on the tensor cores at the data sheet's rate, and
*MUFU cycles* those of the exponentials. The largest of the three limits a tile. *Overlapped* are the instructions of a
warp between its wait for the scores and its wait for the second matmul: they run while that matmul is in flight.
"""

import argparse
import pathlib
import sys
import tempfile

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from pallas_kernels.paged_attention.mosaic_gpu_prefill import tile_keys
from pallas_kernels.paged_attention.tiling import Tiling
from tests.kernels import lowered
from tests.kernels.machine_code import MUFU_CYCLES, MatmulLoop, kernels_of, mosaic_kernel, tool
from tests.support.deviceless import H200

SHAPES = lowered.HOPPER | {
    "gemma-256": ("gqa", 256, "bfloat16", None, 16, {"sliding_window": 100, "logit_softcap": 50.0}),
    "gqa-256": ("gqa", 256, "bfloat16", None, 16, {}),
    "gqa-64": ("gqa", 64, "bfloat16", None, 16, {}),
}
HEADER = f"{'shape':14} {'kernel':10} {'tile':>9} {'issue':>6} {'matmul':>7} {'MUFU':>5} {'overlapped':>11} spills"


def mosaic(name: str, folder: pathlib.Path) -> str:
    """The line of the table for Mosaic GPU's prefill."""
    call = lowered.attention(name, 32, "mosaic_prefill", SHAPES)
    with pytest.MonkeyPatch.context() as patch:
        kernel = mosaic_kernel(*call, folder, patch)
    loop = MatmulLoop.of(min((one for one in kernel.loops if any("HGMMA" in i for i in one)), key=len))
    (copy,) = [one for one in kernel.loops if any("UTMALDG" in i for i in one)]
    return line(name, "mosaic", (128, tile_keys(SHAPES[name][1])), loop, units=2, more=len(copy))


def triton(name: str, folder: pathlib.Path) -> str:
    """The line of the table for Triton's prefill. A warp of 8 has an instance on each of 4 schedulers, twice."""
    (kernel,) = kernels_of(*lowered.attention(name, 32, "triton", SHAPES), folder, "paged_prefill").values()
    loop = MatmulLoop.of(min((one for one in kernel.loops if any("HGMMA" in i for i in one)), key=len))
    head_dim, itemsize = SHAPES[name][1], 2
    tiling = Tiling.by_rule(head_dim, itemsize)
    units = tiling.prefill_warps // 4
    return line(name, "triton", (tiling.prefill_rows, tiling.prefill_keys), loop, units=units)


def line(name: str, kernel: str, tile: tuple[int, int], loop: MatmulLoop, *, units: int, more: int = 0) -> str:
    """A line of the table. units: warp groups that attend. more: instructions of a warp that copies."""
    numbers = units * loop.instructions + more, units * loop.matmul_cycles, units * MUFU_CYCLES * loop.exponentials
    issue, matmul, special = numbers
    return (
        f"{name:14} {kernel:10} {tile[0]:>4}x{tile[1]:<4} {issue:>6,} {matmul:>7,} {special:>5,} "
        f"{loop.overlapped:>4} of {loop.instructions:<4} {loop.spills:>6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHAPES, help="one shape; default: all")
    args = parser.parse_args()
    missing = H200.missing or (None if tool("nvdisasm") else "nvidia-cuda-nvdisasm")
    if missing:
        parser.error(f"needs {missing}: install it with pip")
    print(f"JAX {jax.__version__}, compiled for an H200, cycles of one multiprocessor for each tile")
    print(HEADER)
    for name in [args.only] if args.only else SHAPES:
        for kind in (mosaic, triton):
            with tempfile.TemporaryDirectory() as folder:
                print(kind(name, pathlib.Path(folder)), flush=True)


if __name__ == "__main__":
    main()
