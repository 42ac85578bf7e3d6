"""Times of paged attention on CPU: native kernel, and XLA by rows per tile, tiles per loop and keys per step.

    python benchmarks/attention_cpu.py [--dtype bfloat16]
    python benchmarks/attention_cpu.py --profile     # time of each operation of a decode
    python benchmarks/attention_cpu.py --contexts    # a decode by context length, 64 to 8,192

Runs are interleaved in one process. Prints minimum and median in milliseconds per call. The shape is a small Llama's: 8
query heads, 4 KV heads of 64, blocks of 16 in a pool of 128 MB. `decode` is 32 rows of 60 to 450 keys, `prompt` one
prompt of 512 tokens, and `mixed` 16 decodes with a chunk of 112 tokens. In `shared` and `chunks` all rows share their
first 512 keys: 32 decodes of 528 keys, and 16 chunks of 32 tokens with 544 keys each.
"""

import argparse
import collections
import functools
import importlib
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPages, paged_attention
from pallas_kernels.paged_attention.call import AttentionCall

xla = importlib.import_module("pallas_kernels.paged_attention.xla")

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, WIDTH = 8, 4, 64, 16, 8192, 128
KERNEL = "native kernel"
SETTINGS = {
    "XLA operations": {},
    "tile of 8 rows": {"TILE_ROWS": 8},
    "tile of 32 rows": {"TILE_ROWS": 32},
    "8 tiles together": {"TILE_GROUP": 8},
    "32 tiles together": {"TILE_GROUP": 32},
    "64 keys per step": {"KEYS_PER_STEP": 64},
    "256 keys per step": {"KEYS_PER_STEP": 256},
}


def make_case(
    rng: np.random.Generator, dtype: str, tokens: int, counts: list[int], lens: list[int], shared: int = 0
) -> tuple:
    """Arguments of the attention call, padded with empty rows to 32. shared: blocks that all rows share."""
    rows = tokens if len(counts) == tokens else 32
    tables = rng.integers(0, NUM_BLOCKS, (rows, WIDTH))
    tables[:, :shared] = tables[0, :shared]
    counts, lens = (values + [0] * (rows - len(values)) for values in (counts, lens))
    return (
        jnp.asarray(rng.standard_normal((tokens, HEADS, HEAD_DIM)), dtype),
        KVPages(jnp.asarray(rng.standard_normal((NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)), dtype)),
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32),
    )


def _by_xla(longest: int, *arrays: Any) -> jax.Array:
    """Attention in XLA operations. arrays: the first fields of AttentionCall."""
    return xla.paged_attention(AttentionCall(*arrays, scale=0.125, max_query_len=longest), device_loops=True)


def by_context(dtype: str, repeats: int) -> None:
    """Print a decode's time by context: 8 equal rows, one such row among short ones, and a table 8 times as wide."""
    rows, width = 8, 8192 // BLOCK_SIZE
    rng = np.random.default_rng(0)
    call = jax.jit(functools.partial(paged_attention, scale=0.125, max_query_len=1))
    q, pages, _, _, starts = make_case(rng, dtype, rows, [1] * rows, [0] * rows)
    contexts = [2**n for n in range(6, 14)]
    cases = {}
    for n in contexts:
        equal, one_long = [n] * rows, [n] + [64] * (rows - 1)
        for name, lens, wide in (
            ("8 rows", equal, 1), ("1 row, 7 of 64", one_long, 1), ("8 rows, 8 x table", equal, 8)
        ):  # fmt: skip
            tables = jnp.asarray(rng.integers(0, NUM_BLOCKS, (rows, wide * width)), jnp.int32)
            cases[n, name] = (q, pages, tables, jnp.asarray(lens, jnp.int32), starts)
    times: dict[tuple[int, str], list[float]] = {key: [] for key in cases}
    for repeat in range(repeats + 1):
        for key, case in cases.items():
            start = time.perf_counter()
            call(*case).block_until_ready()
            if repeat:  # the first compiles
                times[key].append(time.perf_counter() - start)
    names = list(dict.fromkeys(name for _, name in cases))
    print(f"{dtype}, JAX {jax.__version__}, Python {platform.python_version()}; ms a call, minimum (median)")
    print(f"{'keys':>8}" + "".join(f"{name:>20}" for name in names))
    for n in contexts:
        cells = [f"{min(times[n, c]) * 1e3:.2f} ({statistics.median(times[n, c]) * 1e3:.2f})" for c in names]
        print(f"{n:>8,}" + "".join(f"{cell:>20}" for cell in cells))


def profile(call: Callable, arguments: tuple, layers: int = 8, calls: int = 20) -> None:
    """Print microseconds per layer of each operation of `call`, run for `layers` layers in one program.

    Several layers, because one alone spends its time on page faults of fresh temporaries.
    """

    @jax.jit
    def stack(q: jax.Array, pages: tuple, *rest: jax.Array) -> jax.Array:
        for layer in pages:
            q = call(q, layer, *rest)
        return q

    q, pages, *rest = arguments
    pools = tuple(jax.tree.map(lambda a, shift=i: jnp.roll(a, shift, axis=0), pages) for i in range(layers))
    stack(q, pools, *rest).block_until_ready()
    start = time.perf_counter()
    for _ in range(calls):
        stack(q, pools, *rest).block_until_ready()
    whole = (time.perf_counter() - start) / calls / layers
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                stack(q, pools, *rest).block_until_ready()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        spent: collections.Counter[str] = collections.Counter()
        count: collections.Counter[str] = collections.Counter()
        for event in (event for plane in planes for line in plane.lines for event in line.events):
            # events have HLO names; numbers in the names differ between layers
            if not event.name.startswith(("end: ", "$", "Thunk", "while", "Pjit")):
                name = event.name.rstrip("0123456789.")
                spent[name] += event.duration_ns
                count[name] += 1
    print(f"{whole * 1e6:.0f} us a layer; each operation (parallel ones count twice):")
    for name, nanoseconds in spent.most_common(12):
        total, times = nanoseconds / calls / layers / 1e3, count[name] / calls / layers
        print(f"{total:9.1f} us {times:6.1f} x {total / times:7.1f} us  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="time each operation of the decode instead")
    parser.add_argument("--contexts", action="store_true", help="time a decode by context length instead")
    args = parser.parse_args()
    if args.contexts:
        by_context(args.dtype, args.repeats)
        return
    rng = np.random.default_rng(0)
    lens = rng.integers(60, 450, 32).tolist()
    cases = {
        "decode": (make_case(rng, args.dtype, 32, [1] * 32, lens), 1),
        "prompt": (make_case(rng, args.dtype, 512, [512], [512]), 512),
        "mixed": (make_case(rng, args.dtype, 128, [1] * 16 + [112], [*lens[:16], 112]), 128),
        "shared": (make_case(rng, args.dtype, 32, [1] * 32, [528] * 32, 512 // BLOCK_SIZE), 1),
        "chunks": (make_case(rng, args.dtype, 512, [32] * 16, [544] * 16, 512 // BLOCK_SIZE), 32),
    }
    if args.profile:
        arguments, longest = cases["decode"]
        profile(functools.partial(_by_xla, longest), arguments)
        return
    native = {
        case: jax.jit(functools.partial(paged_attention, scale=0.125, max_query_len=longest, implementation="cpu"))
        for case, (_, longest) in cases.items()
    }
    programs = {(KERNEL, case): native[case].lower(*cases[case][0]).compile() for case in cases}
    for name, changes in SETTINGS.items():
        before = {constant: getattr(xla, constant) for constant in changes}
        for constant, value in changes.items():
            setattr(xla, constant, value)
        for case, (arguments, longest) in cases.items():
            call = functools.partial(_by_xla, longest)  # a new function, so that jit traces it with these constants
            programs[name, case] = jax.jit(call).lower(*arguments).compile()
        for constant, value in before.items():
            setattr(xla, constant, value)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
    for _ in range(args.repeats):
        for key, program in programs.items():
            start = time.perf_counter()
            program(*cases[key[1]][0]).block_until_ready()
            times[key].append(time.perf_counter() - start)
    print(f"{args.dtype}, JAX {jax.__version__}, Python {platform.python_version()}; ms, minimum (median)")
    print(f"{'':20}" + "".join(f"{case:>16}" for case in cases))
    for name in (KERNEL, *SETTINGS):
        cells = [f"{min(times[name, c]) * 1e3:.2f} ({statistics.median(times[name, c]) * 1e3:.2f})" for c in cases]
        print(f"{name:20}" + "".join(f"{cell:>16}" for cell in cells))
    read = sum(lens) * KV_HEADS * HEAD_DIM * 2 * jnp.dtype(args.dtype).itemsize
    best = min(times[KERNEL, "decode"])
    print(f"the decode's keys and values: {read / 1e6:.1f} MB, {read / best / 1e9:.1f} GB/s in the native kernel")


if __name__ == "__main__":
    main()
