"""Start-up checks against the references, in seconds: attention and KV writes, `gated_dot`, and `partial_dots`."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.add_norm import add_norm
from pallas_kernels.dot import partial_dots
from pallas_kernels.gated_dot import IMPLEMENTATIONS as GATED_DOT
from pallas_kernels.gated_dot import choose_implementation as choose_gated_dot
from pallas_kernels.gated_dot.tiling import choose as choose_tiling
from pallas_kernels.kv_pages import FP8, INT8, KVPages
from pallas_kernels.paged_attention import choose_implementation, paged_attention
from pallas_kernels.platforms import default_device
from pallas_kernels.write_kv import matching_write, write_kv
from pallas_kernels.write_qkv import write_qkv

# Largest accepted difference from the reference in float32, with inputs from N(0, 1). Relative for numbers above 1.
# Rounding in the matmuls stays below half of it.
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}
# For stored 8-bit numbers: one quantisation step, because a number between two steps may be rounded either way.
# int8: the largest number, about 4.5, over 127. fp8: an eighth.
WRITE_TOLERANCE = {"int8": 0.06, "float8_e4m3fn": 0.15}
ROWS, WIDTH_KEYS = 4, 2048
# Size of the gated_dot check: several tiles, the last one not full.
CHECKED_ROWS, CHECKED_OUTPUTS = 300, 1000
CASES = {  # tokens of each row, keys of each row; None = block size + 1
    "decode": ((1, 1, 1, 1), (1, None, 777, WIDTH_KEYS)),
    "chunks": ((64, 0, 33, 2), (64, 0, 1000, None)),
    "mixed": ((1, 70, 0, 1), (WIDTH_KEYS, 200, 0, 5)),
}
# Long chunks, for kernels whose warps wait for each other: many tiles of keys pass through the same shared memory. The
# call is repeated, because a race may show in few runs, as other bits.
LONG_CASES = {"prompts": ((300, 0, 1, 129), (WIDTH_KEYS, 0, 3, 777))}
LONG_RUNS = 20


class KernelCheckError(RuntimeError):
    """An implementation's results on this device differ from the reference."""


def self_check(
    *,
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: Any = jnp.bfloat16,
    kv_dtype: Any = None,
    v_dim: int | None = None,
    key_dim: int | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    with_sinks: bool = False,
    with_alibi: bool = False,
    implementation: str | None = None,
    device: Any = None,
    cases: Iterable[str] | None = None,
) -> dict[str, float]:
    """Run decodes, chunks and a mix of both through the writes and paged_attention, and compare with the reference.

    The shape is that of one layer. Rows have 1 to 2,048 keys in shuffled blocks, and unused slots hold NaN. New tokens
    are stored by write_qkv and earlier tokens by write_kv, with the implementations chosen for the device.

    kv_dtype:       dtype of the pages; None: dtype.
    v_dim:          width of the values of latent pages, which only `write_kv` writes; None: pages with values.
    key_dim:        of `paged_attention`. For latent pages with an indexer: each token is then a row, and its keys are
                    blocks of one token, as in sparse attention.
    with_sinks, with_alibi: give each head a different sink or slope.
    implementation: of paged_attention; None: the best one. The writes use the matching implementation.
    device:         a jax Device; None: JAX's default.
    cases:          names from CASES and LONG_CASES; "decode" alone for an implementation of decodes only. None: see
                    `cases_of`.

    Returns the largest difference of paged_attention for each case. Raises KernelCheckError, with the implementation,
    the device, the case and the difference, if a difference is too large or NaN. Raises it also if a call of LONG_CASES
    has other bits when it runs again.
    """
    device = device or default_device()
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)
    if dtype.name not in TOLERANCE:
        raise ValueError(f"dtype={dtype.name}: must be one of {', '.join(TOLERANCE)}")
    known = CASES | LONG_CASES
    if cases is not None:
        cases = (cases,) if isinstance(cases, str) else tuple(cases)
        if not cases or not set(cases) <= set(known):
            raise ValueError(f"cases={cases}: must be some of {', '.join(known)}")
    if not 1 <= block_size <= WIDTH_KEYS:
        raise ValueError(f"block_size={block_size}: must be 1 to {WIDTH_KEYS}")
    width = -(-WIDTH_KEYS // block_size)
    pages = KVPages.shapes(ROWS * width, block_size, kv_heads, head_dim, kv_dtype, v_dim=v_dim)
    tables = np.random.default_rng(0).permutation(ROWS * width).reshape(ROWS, width).astype(np.int32)
    q = jax.ShapeDtypeStruct((1, q_heads, head_dim), dtype)
    name = implementation or choose_implementation(device, q, pages, tables, 64)
    if cases is None:
        cases = cases_of(name)
    write = matching_write(name)
    tolerance = TOLERANCE[dtype.name]
    stored = WRITE_TOLERANCE.get(kv_dtype.name, tolerance)
    errors = {}
    # sinks as large as the largest scores, and ALiBi slopes from 1/4 down
    a_head = jax.device_put((jnp.linspace(-2, 4, q_heads), 2.0 ** -jnp.linspace(2, 8, q_heads)), device)
    for case in cases:
        counts, given_lens = known[case]
        lens = np.array([min(block_size + 1, WIDTH_KEYS) if n is None else n for n in given_lens], np.int32)
        tokens, rows = _arguments(counts, lens, tables, block_size, q_heads, kv_heads, head_dim, dtype)
        tokens, rows = jax.device_put((tokens, rows), device)
        write_all = functools.partial(
            _write, *tokens, block_size=block_size, kv_dtype=kv_dtype, num_blocks=tables.size, v_dim=v_dim,
            key_dim=key_dim,
        )  # fmt: skip
        q, written = write_all(write=write)
        if key_dim is not None:
            rows = jax.device_put(_rows_by_token(tables, lens, counts, block_size), device)
        # both attention calls read the same pages; the writes are compared separately
        attend = functools.partial(
            # this scale spreads the weights over many keys, as in a model
            _attend, q, written if key_dim is None else written.by_token(), *rows, scale=head_dim**-0.5,
            max_query_len=max(counts) if key_dim is None else 1, sliding_window=sliding_window, key_dim=key_dim,
            logit_softcap=logit_softcap, sinks=a_head[0] if with_sinks else None,
            alibi_slopes=a_head[1] if with_alibi else None,
        )  # fmt: skip
        expected_q, expected = write_all(write="xla")
        every = jax.device_put(tables.reshape(1, -1), device)
        keys, values = (zip(*(pages.gather(every, jnp.float32) for pages in (written, expected)), strict=True))
        for what, pair, limit, stale in (
            (f"write_qkv {write!r}, queries", (q, expected_q), tolerance, False),
            (f"{write!r} writes, keys", keys, stored, True),
            (f"{write!r} writes, values", values, stored, True),
            (
                f"paged_attention {name!r}",
                (attend(implementation=name), attend(implementation="reference")), tolerance, False,
            ),
        ):  # fmt: skip
            ours, theirs = (np.asarray(a, np.float64) for a in pair)
            # relative for numbers above 1: a bfloat16 number may be rounded either way, which above 4 is more than the
            # tolerance
            differences = np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))
            if stale:  # slots that neither has written are NaN in both
                differences = differences[~(np.isnan(ours) & np.isnan(theirs))]
            else:
                differences = differences[: sum(counts)]  # results of padding tokens are undefined
            difference = float(differences.max())
            if not difference <= limit:  # also if it is NaN
                # the advice is a line of its own: an engine shows the first line, and tries the next implementation
                raise KernelCheckError(
                    f"{what} on {device.device_kind}, case {case} ({q_heads}/{kv_heads} heads of {head_dim}, "
                    f"{dtype.name}, pages of {kv_dtype.name}, blocks of {block_size}): differs from the reference by "
                    f"{difference:.3g}, more than {limit:g}\n"
                    "Use implementation='xla', and please report this"
                )
            errors[case] = difference  # of the last comparison: attention
        if case in LONG_CASES:
            first, *others = (np.asarray(attend(implementation=name))[: sum(counts)] for _ in range(LONG_RUNS))
            if any(first.tobytes() != other.tobytes() for other in others):
                raise KernelCheckError(
                    f"paged_attention {name!r} on {device.device_kind}, case {case}: has other bits in another run\n"
                    "Use implementation='xla', and please report this"
                )
    return errors


def cases_of(implementation: str) -> tuple[str, ...]:
    """Names of the cases for an implementation: all of CASES, for kernels through Mosaic GPU also LONG_CASES."""
    return tuple(CASES | LONG_CASES if implementation in ("mosaic_prefill", "mosaic_gpu") else CASES)


def check_gated_dot(
    x: Any, weight: Any, activation: str, *, implementation: str | None = None, device: Any = None
) -> float:
    """Compare gated_dot with its reference, with the tiles that a call of this shape has, and return the difference.

    x, weight:      arrays or ShapeDtypeStructs of the call. At most CHECKED_ROWS rows and CHECKED_OUTPUTS outputs are
                    computed, so that large models leave memory for them.
    implementation: None: the best one.
    device:         a jax Device; None: JAX's default.

    Raises KernelCheckError, with the implementation, the device, the shape and the difference, if the difference is too
    large or NaN.
    """
    device = device or default_device()
    name = implementation or choose_gated_dot(device, x, weight, activation)
    rows, outputs, width = min(x.shape[0], CHECKED_ROWS), min(weight.shape[1], CHECKED_OUTPUTS), x.shape[1]
    rng = np.random.default_rng(2)
    numbers = rng.standard_normal((rows, width), np.float32), rng.standard_normal((2, outputs, width), np.float32)
    a, b = jax.device_put((jnp.asarray(numbers[0], x.dtype), jnp.asarray(numbers[1] * width**-0.5, x.dtype)), device)
    options = {"tiling": choose_tiling(x, weight)} if name == "triton" else {}
    call, reference = GATED_DOT[name].call, GATED_DOT["reference"].call
    count = jax.device_put(np.int32(rows), device)
    ours, theirs = (
        np.asarray(jax.jit(functools.partial(one, activation=activation, **given))(a, b, count), np.float64)
        for one, given in ((call, options), (reference, {}))
    )
    difference = float((np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))).max())
    limit = TOLERANCE[x.dtype.name]
    if not difference <= limit:  # also if it is NaN
        raise KernelCheckError(
            f"gated_dot {name!r} on {device.device_kind}, {activation}, {x.shape[0]} x {width} to {weight.shape[1]}, "
            f"{x.dtype.name}: differs from the reference by {difference:.3g}, more than {limit:g}. Use "
            "implementation='xla', and please report this"
        )
    return difference


def check_partial_dots(x: Any, weight: Any, *, implementation: str, device: Any = None) -> float:
    """Compare `partial_dots` and `add_norm` with their references, and return the largest difference.

    x, weight:      arrays or ShapeDtypeStructs of a call. At most CHECKED_OUTPUTS outputs are computed, with the tiles
                    of x's rows.
    implementation: of both: "triton" or "triton_fixed".
    device:         a jax Device; None: JAX's default.

    Raises KernelCheckError, with the implementation, the device, the shape and the difference, if the difference is too
    large or NaN.
    """
    device = device or default_device()
    rows, outputs, width = x.shape[0], min(weight.shape[0], CHECKED_OUTPUTS), x.shape[1]
    rng = np.random.default_rng(3)
    shapes = {"x": (rows, width), "weight": (outputs, width), "residual": (rows, outputs), "norm": (outputs,)}
    numbers = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    numbers["weight"] *= width**-0.5
    arrays = jax.device_put([jnp.asarray(each, x.dtype) for each in numbers.values()], device)
    parts = next(n for n in (8, 4, 2, 1) if width % n == 0)

    @functools.partial(jax.jit, static_argnames="name")
    def run(name: str, x: Any, weight: Any, residual: Any, norm: Any) -> Any:
        apart, together = (
            partial_dots(x, weight, rows, parts=parts, together=both, implementation=name) for both in (False, True)
        )
        adds = "xla" if name == "xla" else "triton"
        return [add_norm(sums, residual, norm, implementation=adds) for sums in (apart, together)]

    difference = 0.0
    for ours, theirs in zip(*(jax.tree.leaves(run(name, *arrays)) for name in (implementation, "xla")), strict=True):
        a, b = (np.asarray(each, np.float64) for each in (ours, theirs))
        difference = max(difference, float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max()))
    limit = TOLERANCE[x.dtype.name]
    if not difference <= limit:  # also if it is NaN
        raise KernelCheckError(
            f"partial_dots {implementation!r} on {device.device_kind}, {rows} x {width} to {weight.shape[0]}, "
            f"{x.dtype.name}: differs from the reference by {difference:.3g}, more than {limit:g}. Please report this"
        )
    return difference


def _arguments(
    counts: tuple[int, ...], lens: np.ndarray, tables: np.ndarray, block_size: int, q_heads: int, kv_heads: int,
    head_dim: int, dtype: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Arguments of the writes (old k, v, slots; new qkv, slots, cos, sin) and attention (tables, lens, starts)."""
    rng = np.random.default_rng(1)
    tokens = -(-sum(counts) // 8) * 8
    history, new = [], []
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        position = np.arange(length)
        slots = tables[row, position // block_size] * block_size + position % block_size
        history.append(slots[: length - count])
        new.append(slots[length - count :])
    history_slots = np.concatenate(history)
    history_slots = np.pad(history_slots, (0, -len(history_slots) % (ROWS * WIDTH_KEYS)), constant_values=-1)
    new_slots = np.pad(np.concatenate(new), (0, tokens - sum(counts)), constant_values=-1)
    k, v = rng.standard_normal((2, len(history_slots), kv_heads, head_dim), np.float32)
    qkv = rng.standard_normal((tokens, kv_heads, q_heads // kv_heads + 2, head_dim), np.float32)
    angles = rng.uniform(0, 2 * np.pi, (tokens, head_dim // 2)).astype(np.float32)
    k, v, qkv = (jnp.asarray(a, dtype) for a in (k, v, qkv))
    written = (k, v, history_slots.astype(np.int32), qkv, new_slots.astype(np.int32), np.cos(angles), np.sin(angles))
    return written, (tables, lens, np.cumsum([0, *counts], dtype=np.int32))


def _rows_by_token(
    tables: np.ndarray, lens: np.ndarray, counts: tuple[int, ...], block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tables, lens and starts with a row for each token, whose blocks are the slots of all keys that it sees."""
    position = np.arange(WIDTH_KEYS)
    slots = tables[:, position // block_size] * block_size + position % block_size
    row = np.repeat(np.arange(len(counts)), counts)
    seen = np.concatenate([length - count + 1 + np.arange(count) for length, count in zip(lens, counts, strict=True)])
    return slots[row].astype(np.int32), seen.astype(np.int32), np.arange(len(row) + 1, dtype=np.int32)


@functools.partial(jax.jit, static_argnames=("block_size", "kv_dtype", "num_blocks", "v_dim", "key_dim", "write"))
def _write(
    k: Any, v: Any, history_slots: Any, qkv: Any, new_slots: Any, cos: Any, sin: Any,
    *, block_size: int, kv_dtype: Any, num_blocks: int, v_dim: int | None, key_dim: int | None, write: str,
) -> tuple[Any, KVPages]:  # fmt: skip
    """q, and pages with earlier and new tokens. Other slots are NaN."""
    pages = KVPages.create(num_blocks, block_size, k.shape[1], k.shape[2], kv_dtype, v_dim=v_dim)
    if pages.dtype == FP8:  # its scales belong to no page
        pages = dataclasses.replace(pages, data=jnp.full_like(pages.data, jnp.nan))
    else:
        pages = jax.tree.map(lambda a: a if a.dtype == INT8 else jnp.full_like(a, jnp.nan), pages)
    pages = write_kv(pages, k, v if v_dim is None else None, history_slots, implementation=write)
    if v_dim is not None:
        q = qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[3])
        q = jnp.where(jnp.arange(q.shape[2]) < (key_dim or q.shape[2]), q, 0)
        return q, write_kv(pages, qkv[:, :, -2], None, new_slots, implementation=write)
    # norm weights of one keep q and k distributed as N(0, 1)
    ones = jnp.ones(k.shape[2], k.dtype)
    return write_qkv(pages, qkv, new_slots, cos=cos, sin=sin, q_norm=ones, k_norm=ones, implementation=write)


_attend = jax.jit(
    paged_attention,
    static_argnames=("scale", "max_query_len", "sliding_window", "logit_softcap", "key_dim", "implementation"),
)
