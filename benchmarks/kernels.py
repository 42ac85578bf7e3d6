"""The kernels on an NVIDIA GPU: checks against the reference, times, and times of other implementations.

    python benchmarks/kernels.py --check                  # only compare with the reference on this device
    python benchmarks/kernels.py --out benchmarks/results # check, then measure: at most 8 minutes on a GPU
    python benchmarks/kernels.py --tiny                   # small shapes on any machine: a rehearsal

1. The GPU's limits: bytes copied per second and bf16 flops per second. All other results are shares of them.
2. paged_attention: decodes and a prefill chunk with Llama-3-8B's heads (32 query and 8 KV heads of 128, bf16, blocks of
   16). For comparison: JAX's own `paged_attention` (pages) and `decode_attention`, cuDNN and torch (contiguous KV), and
   vLLM's unified attention (pages), if `--vllm-attention FILE` names a copy of it.
3. write_kv, and write_qkv, which reads the output of the q, k and v matmuls.
4. gated_dot: gate, up and activation as one kernel, and as XLA's matmul and activation.

A measurement is one jitted loop whose iterations depend on each other. It cycles through the pages of several layers,
more than any cache holds. The table has the median of the repeats. The JSON file has all repeats and is written after
every step. An implementation that does not compile or run is reported, and the measurement continues.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib
import importlib.util
import json
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import gated_matmul
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import seconds, sentence, too_large, within_limit

from pallas_kernels import KernelCheckError, KVPages, paged_attention, self_check, write_kv, write_qkv
from pallas_kernels.paged_attention import IMPLEMENTATIONS, choose_implementation
from pallas_kernels.self_check import cases_of
from pallas_kernels.write_kv import matching_write

CHECKS = [  # query heads, KV heads, head_dim, block size, dtype, dtype of the pages, window
    (32, 8, 128, 16, "bfloat16", "bfloat16", None),
    (32, 8, 128, 64, "float16", "float16", None),
    (8, 2, 128, 16, "float32", "float32", 100),
    (4, 4, 80, 32, "bfloat16", "bfloat16", 300),
    (8, 1, 96, 128, "bfloat16", "bfloat16", None),
    (8, 4, 256, 16, "bfloat16", "bfloat16", None),
    (32, 8, 128, 16, "bfloat16", "int8", None),
    (14, 2, 64, 16, "float32", "int8", None),
    (32, 8, 128, 16, "bfloat16", "float8_e4m3fn", None),
    (14, 2, 64, 16, "bfloat16", "bfloat16", None),
]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch for attention."""

    name: str
    context: tuple[int, ...]  # keys of each row
    chunk: int = 1            # tokens of each row
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    kv_dtype: str = "bfloat16"
    decodes: tuple[int, ...] = ()  # keys of additional rows with one token each: a mixed step
    table_keys: int = 0            # capacity of a block table, in keys; 0: the longest row's keys

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Tokens and keys of each row."""
        return [*((1, keys) for keys in self.decodes), *((self.chunk, keys) for keys in self.context)]

    @property
    def is_decode(self) -> bool:
        """True if every row has one token."""
        return self.chunk == 1

    @property
    def is_ours_alone(self) -> bool:
        """True if other implementations do not support the shape, or their time does not depend on the table."""
        return bool(self.decodes or self.table_keys)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call reads, without scales."""
        keys = sum(keys for _, keys in self.rows)
        return 2 * keys * self.kv_heads * self.head_dim * jnp.dtype(self.kv_dtype).itemsize

    @property
    def flops(self) -> int:
        """Flops of the two matmuls, for the keys that a causal chunk sees."""
        seen = sum(tokens * keys - tokens * (tokens - 1) // 2 for tokens, keys in self.rows)
        return 4 * seen * self.heads * self.head_dim

    @property
    def layers(self) -> int:
        """Number of page arrays to cycle through, so that no cache holds them: 400 MB, at least 2."""
        return max(2, min(16, math.ceil(4e8 / self.kv_bytes)))


def shapes(tiny: bool) -> list[Shape]:
    rng = np.random.default_rng(0)
    mixed = tuple(int(n) for n in rng.integers(128, 8193, 256))
    real = [
        Shape("decode, 64 rows of 4,096", (4096,) * 64),
        Shape("decode, 1 row of 32,768", (32768,)),
        Shape("decode, 256 rows of 128 to 8,192", mixed),
        Shape("prefill, 2,048 tokens on 8,192", (8192,), chunk=2048),
        Shape("decode, 64 rows of 4,096, int8 pages", (4096,) * 64, kv_dtype="int8"),
        Shape("decode, 64 rows of 4,096, fp8 pages", (4096,) * 64, kv_dtype="float8_e4m3fn"),
        # in an engine for requests of 131,072 tokens
        *(
            Shape(f"decode, {rows} row{'s'[: rows - 1]} of {keys:,}, wide table", (keys,) * rows, table_keys=131_072)
            for rows, keys in ((1, 1024), (1, 4096), (8, 1024), (8, 4096), (256, 1024))
        ),
        Shape("mixed, 1,024 tokens on 4,096 and 64 decodes of 2,048", (4096,), chunk=1024, decodes=(2048,) * 64),
    ]
    if not tiny:
        return real
    small = functools.partial(Shape, heads=4, kv_heads=2, head_dim=16)
    return [
        small("rehearsal: decode, 4 rows of 40", (40,) * 4),
        small("rehearsal: decode, 1 row of 1,100", (1100,)),
        small("rehearsal: decode, 3 rows of 5 to 60", (5, 60, 33)),
        small("rehearsal: prefill, 16 tokens on 64", (64,), chunk=16),
        small("rehearsal: decode, int8 pages", (40,) * 4, kv_dtype="int8"),
        small("rehearsal: decode, fp8 pages", (40,) * 4, kv_dtype="float8_e4m3fn"),
        small("rehearsal: decode, wide table", (40,), table_keys=4096),
        small("rehearsal: mixed", (64,), chunk=16, decodes=(40, 7)),
    ]


def chained(attend: Callable[..., jax.Array], turns: int) -> Callable[..., jax.Array]:
    """A jitted loop, `turns` times over all layers. The output of each call is the query of the next."""

    @jax.jit
    def run(q: jax.Array, layers: tuple, *rest: jax.Array) -> jax.Array:
        def turn(_: jax.Array, q: jax.Array) -> jax.Array:
            for layer in layers:
                q = attend(q, layer, *rest)
            return q

        return lax.fori_loop(0, turns, turn, q)

    return run


# --- the GPU ----------------------------------------------------------------------------------------------------------


def measure_card(tiny: bool, repeats: int) -> dict[str, float]:
    """Bytes per second of a copy (read plus written), and flops per second of a bf16 matmul."""
    size, width = (1 << 16, 64) if tiny else (1 << 30, 8192)
    source = jnp.arange(size // 4, dtype=jnp.float32)
    turns = 4 if tiny else 200  # the loop begins with one more copy, which is not counted

    @jax.jit
    def copies(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda i, x: x + 1.0, x)

    copy = statistics.median(seconds(copies, (source,), turns, repeats))
    # random numbers, because GPUs clock higher with constants; scaled to keep their magnitude
    x, w = jax.random.normal(jax.random.key(0), (2, width, width), jnp.bfloat16)
    turns = 4 if tiny else 40

    @jax.jit
    def products(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda i, x: (x @ w) * jnp.bfloat16(width**-0.5), x)

    product = statistics.median(seconds(products, (x, w), turns, repeats))
    return {"copy_bytes_per_s": 2 * size / copy, "bf16_flops_per_s": 2 * width**3 / product}


# --- attention --------------------------------------------------------------------------------------------------------


def paged_case(shape: Shape) -> tuple:
    """q, one KVPages per layer, block tables (shuffled blocks), context lengths, query starts."""
    rng = np.random.default_rng(0)
    counts, lens = np.array(shape.rows, np.int32).T
    blocks = [int(-(-n // shape.block_size)) for n in lens]
    width = max(*blocks, shape.table_keys // shape.block_size)
    order, tables, used = rng.permutation(sum(blocks)), np.zeros((len(blocks), width), np.int32), 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[used : used + count]
        used += count
    key = jax.random.key(0)
    size = (sum(blocks), 2, shape.kv_heads, shape.block_size, shape.head_dim)

    def pages(key: jax.Array) -> KVPages:
        data = jax.random.normal(key, size, jnp.bfloat16)
        if shape.kv_dtype == "int8":
            return KVPages((data * 40).astype(jnp.int8), jnp.full(size[:-1], 1 / 40, jnp.bfloat16))
        if shape.kv_dtype == "float8_e4m3fn":
            return KVPages(data.astype(jnp.float8_e4m3fn), jnp.ones((2, shape.kv_heads), jnp.float32))
        return KVPages(data)

    layers = tuple(pages(k) for k in jax.random.split(key, shape.layers))
    q = jax.random.normal(key, (int(counts.sum()), shape.heads, shape.head_dim), jnp.bfloat16)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return q, layers, jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(starts)


def ours(shape: Shape, implementation: str) -> tuple[Callable, tuple]:
    """pallas_kernels.paged_attention."""
    attend = functools.partial(
        paged_attention, scale=shape.head_dim**-0.5, max_query_len=shape.chunk, implementation=implementation
    )
    return attend, paged_case(shape)


def jax_paged(shape: Shape) -> tuple[Callable, tuple]:
    """JAX's example kernel for paged KV. Decodes only."""
    from jax.experimental.pallas.ops.gpu import paged_attention as jax_kernels

    q, layers, tables, lens, _ = paged_case(shape)
    # its pages: [kv_heads, blocks, block_size, head_dim], separate arrays for keys and values
    layers = tuple(tuple(p.data[:, i].transpose(1, 0, 2, 3) for i in (0, 1)) for p in layers)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % 128)))  # an odd width could not be split
    splits = max(s for s in (1, 2, 4, 8, 16) if tables.shape[1] % s == 0)
    per_block = max(n for n in (1, 2, 4, 8) if tables.shape[1] // splits % n == 0)

    def attend(q: jax.Array, kv: tuple, tables: jax.Array, lens: jax.Array) -> jax.Array:
        scaled = q * q.shape[-1] ** -0.5
        return jax_kernels.paged_attention(
            scaled, *kv, tables, lens, k_splits=splits, pages_per_compute_block=per_block
        )

    return attend, (q, layers, tables, lens)


def contiguous_case(shape: Shape) -> tuple:
    """q [rows, chunk, heads, dim], (k, v) [rows, longest, kv_heads, dim] per layer, context lengths."""
    key, rows = jax.random.key(0), len(shape.context)
    # a multiple of 256, so that JAX's decode_attention can split it
    size = (rows, -(-max(shape.context) // 256) * 256, shape.kv_heads, shape.head_dim)
    layers = tuple(
        tuple(jax.random.normal(k, size, jnp.bfloat16) for k in jax.random.split(layer))
        for layer in jax.random.split(key, shape.layers)
    )
    q = jax.random.normal(key, (rows, shape.chunk, shape.heads, shape.head_dim), jnp.bfloat16)
    return q, layers, jnp.asarray(shape.context, jnp.int32)


def jax_decode(shape: Shape) -> tuple[Callable, tuple]:
    """JAX's example kernel for decodes over contiguous KV."""
    from jax.experimental.pallas.ops.gpu import decode_attention

    q, layers, lens = contiguous_case(shape)

    def attend(q: jax.Array, kv: tuple, lens: jax.Array) -> jax.Array:
        return decode_attention.gqa(q, *kv, kv_seq_len=lens, sm_scale=q.shape[-1] ** -0.5).astype(q.dtype)

    return attend, (q[:, 0], layers, lens)


def cudnn(shape: Shape) -> tuple[Callable, tuple]:
    """cuDNN through jax.nn, with contiguous KV. The bias is the mask of a chunk at the end of its context."""
    q, layers, lens = contiguous_case(shape)

    def attend(q: jax.Array, kv: tuple, lens: jax.Array) -> jax.Array:
        if shape.chunk == 1:
            return jax.nn.dot_product_attention(q, *kv, key_value_seq_lengths=lens, implementation="cudnn")
        position = lens[:, None] - shape.chunk + jnp.arange(shape.chunk)
        seen = (jnp.arange(kv[0].shape[1]) <= position[:, :, None])[:, None]
        return jax.nn.dot_product_attention(q, *kv, mask=seen, implementation="cudnn")

    return attend, (q, layers, lens)


def torch_peers(shape: Shape, plain: bool, vllm: pathlib.Path | None, repeats: int) -> dict[str, list[float] | str]:
    """Seconds of the implementations of torch_peers.py, or the reason why one is not measured.

    plain: contiguous KV can replace the pages. vllm: the user's copy of vLLM's attention.
    """
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}

    def contiguous() -> list[float]:
        rows, longest = len(shape.context), max(shape.context)
        return torch_module().sdpa_seconds(rows, shape.chunk, longest, layers=shape.layers, repeats=repeats, **heads)

    def unified(file: pathlib.Path) -> list[float]:
        _, _, tables, lens, _ = paged_case(dataclasses.replace(shape, kv_dtype="bfloat16"))
        counts = np.array([tokens for tokens, _ in shape.rows], np.int32)
        return torch_module().unified_seconds(
            file, counts, np.array(lens), np.array(tables), block_size=shape.block_size, layers=shape.layers,
            repeats=repeats, **heads,
        )  # fmt: skip

    missing = None if importlib.util.find_spec("torch") else "not measured: torch is not installed"
    if jax.default_backend() != "gpu":
        missing = "not measured: needs an NVIDIA GPU"
    calls: dict[str, Callable[[], list[float]] | str] = {}
    if plain:
        calls["torch, contiguous"] = missing or contiguous
    if shape.kv_dtype == "bfloat16":
        unnamed = "not measured: name a copy of vLLM's triton_unified_attention.py with --vllm-attention"
        calls["vLLM unified attention"] = unnamed if vllm is None else missing or functools.partial(unified, vllm)
    found: dict[str, list[float] | str] = {}
    for name, call in calls.items():
        try:
            found[name] = call if isinstance(call, str) else call()
        except Exception as error:  # continue with the other implementations
            found[name] = sentence(error)
    return found


def torch_module() -> Any:
    return importlib.import_module("torch_peers")


def measure_attention(
    shape: Shape, implementation: str, tiny: bool, repeats: int, vllm: pathlib.Path | None
) -> dict[str, Any]:
    """Seconds per call of each implementation, or its error. vllm: as for `torch_peers`."""
    results: dict[str, Any] = {}
    cases: dict[str, Callable[[], tuple[Callable, tuple]]] = {implementation: lambda: ours(shape, implementation)}
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not shape.table_keys:  # XLA's loops over whole block tables take seconds for wide ones
        cases["xla"] = lambda: ours(shape, "xla")
    if on_gpu and not shape.is_decode:
        cases["mosaic_prefill"] = lambda: ours(shape, "mosaic_prefill")
    plain = shape.kv_dtype == "bfloat16" and not shape.is_ours_alone  # shapes that the other implementations support
    if on_gpu and plain:
        cases["cuDNN, contiguous"] = lambda: cudnn(shape)
        if shape.is_decode:
            cases["mosaic_gpu"] = lambda: ours(shape, "mosaic_gpu")
            cases["JAX paged_attention"] = lambda: jax_paged(shape)
            cases["JAX decode_attention, contiguous"] = lambda: jax_decode(shape)
    turns = 1 if tiny else max(1, round(0.02 / (shape.layers * (shape.kv_bytes / 3e12 + shape.flops / 3e14))))
    for name, case in cases.items():
        try:
            attend, arguments = case()
            # the XLA implementation is slow, because it loops over whole block tables: fewer iterations
            count = 1 if name == "xla" else turns
            times = seconds(chained(attend, count), arguments, count * shape.layers, repeats)
            results[name] = times
        except Exception as error:  # continue with the other implementations
            results[name] = sentence(error)
    return results | torch_peers(shape, plain, vllm, repeats)


def measure_write(implementation: str, tiny: bool, repeats: int) -> dict[str, Any]:
    """Seconds per call of write_kv and write_qkv: 8,192 tokens, 8 KV heads of 128, bf16; write_qkv: 32 query heads.

    The loop cycles through six layers: 200 MB of new keys and values, 400 MB of pages.
    """
    tokens, heads, q_per_kv, dim, turns = (64, 2, 2, 16, 2) if tiny else (8192, 8, 4, 128, 20)
    num_layers = 2 if tiny else 6
    keys = jax.random.split(jax.random.key(0), num_layers)
    slots = jnp.asarray(np.random.default_rng(0).permutation(2 * tokens)[:tokens], jnp.int32)
    angles = jax.random.uniform(jax.random.key(1), (tokens, dim // 2))
    norm = jnp.ones(dim, jnp.bfloat16)
    layers = tuple(KVPages.create(2 * tokens // 16, 16, heads, dim, jnp.bfloat16) for _ in keys)
    products = tuple(jax.random.normal(k, (tokens, heads, q_per_kv + 2, dim), jnp.bfloat16) for k in keys)
    news = tuple(tuple(jax.random.normal(k, (2, tokens, heads, dim), jnp.bfloat16)) for k in keys)
    # every iteration differs, so that XLA cannot hoist work out of the loop

    def plain(layers: tuple, news: tuple, slots: jax.Array, *, name: str) -> tuple:
        def turn(i: jax.Array, layers: tuple) -> tuple:
            moved = jnp.roll(slots, i)
            return tuple(
                write_kv(pages, *new, moved, implementation=name) for pages, new in zip(layers, news, strict=True)
            )

        return lax.fori_loop(0, turns, turn, layers)

    def fused(layers: tuple, products: tuple, slots: jax.Array, *, name: str) -> tuple:
        def turn(i: jax.Array, carry: tuple) -> tuple:
            cos, sin = jnp.cos(angles + i), jnp.sin(angles + i)
            return tuple(
                write_qkv(
                    pages, product, slots, cos=cos, sin=sin, q_norm=norm, k_norm=norm, implementation=name
                )
                for (_, pages), product in zip(carry, products, strict=True)
            )

        queries = jnp.zeros((tokens, heads * q_per_kv, dim), jnp.bfloat16)
        return lax.fori_loop(0, turns, turn, tuple((queries, pages) for pages in layers))

    results: dict[str, Any] = {}
    for kind, run, given in (("write_kv", plain, news), ("write_qkv", fused, products)):
        for name in dict.fromkeys((matching_write(implementation), "xla")):
            call = jax.jit(functools.partial(run, name=name))
            try:
                results[f"{kind} {name}"] = seconds(call, (layers, given, slots), turns * num_layers, repeats)
            except Exception as error:  # as above
                results[f"{kind} {name}"] = sentence(error)
    return results


def measure_gated(tiny: bool, repeats: int, card: dict[str, float], end: float) -> dict[str, Any]:
    """Print and return the seconds per call of gated_dot. Starts no workload after the time `end`."""
    found: dict[str, Any] = {}
    for products in gated_matmul.workloads(tiny):
        if time.monotonic() > end:
            break
        print(products.name, flush=True)
        found[products.name] = gated_matmul.measure(products, repeats)
        if products.rows <= 256:  # the weights are the limit
            print_times(found[products.name], lambda _, p=products: p.weight_bytes, "bytes", card["copy_bytes_per_s"])
        else:
            print_times(found[products.name], lambda _, p=products: p.flops, "flops", card["bf16_flops_per_s"])
    return found


# --- the command line -------------------------------------------------------------------------------------------------


def check(implementation: str, tiny: bool) -> dict[str, Any]:
    """Print and return the largest differences from the reference, or the error. Prints the limit too."""
    found: dict[str, Any] = {}
    cases = ("decode",) if implementation == "mosaic_gpu" else cases_of(implementation)
    for heads, kv_heads, dim, block, dtype, kv_dtype, window in CHECKS[-1:] if tiny else CHECKS:
        shape = f"{heads:3}/{kv_heads} heads of {dim:3}, blocks of {block:3}, {dtype:8} pages {kv_dtype:13}"
        shape += f" window {window}"
        try:
            found[shape] = self_check(
                q_heads=heads, kv_heads=kv_heads, head_dim=dim, block_size=block, dtype=dtype, kv_dtype=kv_dtype,
                sliding_window=window, implementation=implementation, cases=cases,
            )  # fmt: skip
            text = within_limit(found[shape], dtype)
        except KernelCheckError as error:
            text = found[shape] = too_large(error)
        except Exception as error:  # compiler errors as well; continue with the other shapes
            text = found[shape] = sentence(error)
        print(f"  {shape}: {text}", flush=True)
    return found


def wrong(checks: dict[str, Any]) -> list[str]:
    """Checks that failed. A shape that the implementation refuses does not count."""
    return [shape for shape, found in checks.items() if isinstance(found, str) and "cannot take this" not in found]


def print_times(results: dict[str, Any], moved: Callable[[str], float], unit: str, of: float) -> None:
    """Print one line per implementation. moved: bytes or flops of a call; of: the GPU's limit, per second."""
    for name, times in results.items():
        if isinstance(times, str):
            print(f"  {name:34} {times}", flush=True)
            continue
        middle = statistics.median(times)
        rate = moved(name) / middle
        scale, name_of_unit = (1e9, "GB/s") if unit == "bytes" else (1e12, "Tflop/s")
        print(
            f"  {name:34} {middle * 1e6:10,.1f} us {rate / scale:8,.1f} {name_of_unit:7} {100 * rate / of:5.1f}%",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="only compare with the reference")
    only.add_argument("--measure", action="store_true", help="only measure")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal without a GPU")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="default: the best one for this device")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vllm-attention", type=pathlib.Path, metavar="FILE",
                        help="a copy of vLLM's triton_unified_attention.py to compare with; needs torch")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no measurement after this time (default: 8)")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results as JSON")
    args = parser.parse_args()
    if args.vllm_attention and not args.vllm_attention.is_file():
        parser.exit(2, f"--vllm-attention {args.vllm_attention}: no such file\n")
    end = time.monotonic() + 60 * args.minutes
    device = jax.devices()[0]
    q = jax.ShapeDtypeStruct((1, 32, 128), jnp.dtype(jnp.bfloat16))
    pages, tables = KVPages.shapes(1, 16, 8, 128, jnp.bfloat16), jax.ShapeDtypeStruct((1, 1), jnp.dtype(jnp.int32))
    implementation = args.implementation or choose_implementation(device, q, pages, tables, 1)
    now = datetime.datetime.now()
    record: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "device": device.device_kind,
        "back end": jax.extend.backend.get_backend().platform_version,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "implementation": implementation,
        "repeats": args.repeats,
        "tiny": args.tiny,
    }
    file = None
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        kind = "rehearsal" if args.tiny else "kernels"
        file = args.out / f"{kind}-{device.device_kind.lower().replace(' ', '-')}-{now:%Y-%m-%d-%H%M%S}.json"

    def keep(**parts: Any) -> None:
        """Add results to the record and write the file, because later steps may fail."""
        record.update(parts)
        if file:
            file.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    print(f"{device.device_kind}, JAX {jax.__version__}, Python {platform.python_version()}: {implementation!r}")
    checks: dict[str, Any] = {}
    if not args.measure:
        print("difference from the reference:", flush=True)
        checks = check(implementation, args.tiny) | gated_matmul.check(args.tiny)
        for name in ("mosaic_prefill", "mosaic_gpu") if device.platform == "gpu" and not args.implementation else ():
            print(f"difference of {name!r} from the reference:", flush=True)
            checks |= {f"{name}, {shape}": found for shape, found in check(name, args.tiny).items()}
    keep(checks=checks)
    if not args.check:
        card = measure_card(args.tiny, args.repeats)
        keep(card=card)
        copy, product = card["copy_bytes_per_s"], card["bf16_flops_per_s"]
        print(f"copy {copy / 1e9:,.0f} GB/s; bf16 product {product / 1e12:,.1f} Tflop/s", flush=True)
        attention: dict[str, Any] = {}
        for shape in shapes(args.tiny):
            print(shape.name, flush=True)
            if time.monotonic() > end:
                print(f"  left out: {args.minutes:g} minutes are over", flush=True)
                continue
            results = measure_attention(shape, implementation, args.tiny, args.repeats, args.vllm_attention)
            attention[shape.name] = dataclasses.asdict(shape) | {"seconds": results}
            keep(attention=attention)
            if shape.is_decode:
                print_times(results, lambda _, s=shape: s.kv_bytes, "bytes", copy)
            else:
                print_times(results, lambda _, s=shape: s.flops, "flops", product)
        token = (2 * 16 if args.tiny else 8 * 128) * 2  # bytes of a token's keys
        tokens, q_per_kv = (64, 2) if args.tiny else (8192, 4)
        # keys and values, and for write_qkv the queries, are read and written
        bytes_of = {"write_kv": 2 * 2 * tokens * token, "write_qkv": 2 * (2 + q_per_kv) * tokens * token}
        print(f"writes of {tokens:,} tokens", flush=True)
        keep(write=measure_write(implementation, args.tiny, args.repeats), write_bytes=bytes_of)
        print_times(record["write"], lambda name: bytes_of[name.split()[0]], "bytes", copy)
        keep(gated=measure_gated(args.tiny, args.repeats, card, end))
    if file:
        print(file)
    if wrong(checks):
        raise SystemExit(f"{len(wrong(checks))} of {len(checks)} checks failed")


if __name__ == "__main__":
    main()
