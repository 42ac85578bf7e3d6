"""Cases for the kernels, and an independent attention in float64 numpy that shares no code with the package."""

import dataclasses
import functools

import jax
import numpy as np

from pallas_kernels import KVPages, paged_attention
from pallas_kernels.paged_attention.call import AttentionCall
from tests.support.device_arrays import device_array

# Largest absolute difference from float64 on inputs from N(0, 1), up to 1,024 keys.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of a call. Each shape needs one compiled program per implementation."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None  # of the pages; None: dtype
    v_dim: int | None = None     # latent pages
    rows: int = 6
    tokens: int = 64             # 0: every row has one token
    width: int = 20
    num_blocks: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False
    scale: float | None = None   # None: head_dim ** -0.5

    @property
    def options(self) -> dict:
        """The options of a call, with numpy arrays."""
        return {
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "sliding_window": self.window,
            "logit_softcap": self.softcap,
            "sinks": np.linspace(-1, 1, self.heads, dtype=np.float32) if self.sinks else None,
            "alibi_slopes": 2.0 ** -np.arange(1, self.heads + 1, dtype=np.float32) if self.slopes else None,
        }

    @property
    def table_keys(self) -> int:
        """Number of keys that a block table has room for."""
        return self.width * self.block_size


RAGGED = ((1, 5), (1, 300), (0, 0), (33, 40), (7, 200), (16, 16))
DECODES = ((1, 1), (1, 15), (1, 16), (0, 0), (1, 17), (1, 129))


def make_case(shape: Shape, rows=RAGGED, *, seed=0, shared=0):
    """Random pages and queries for rows of (tokens, keys). The keys include those of the tokens.

    Everything that no row may read is poisoned: unused slots hold NaN, and unused entries of the block tables are far
    outside the pool. This includes keys before all windows of a row.
    shared: number of first blocks that all rows share.
    """
    rng = np.random.default_rng(seed)
    counts, lens = np.array(rows, np.int32).reshape(-1, 2).T
    counts, lens = (np.pad(a, (0, shape.rows - len(a))) for a in (counts, lens))
    used_blocks = -(-lens // shape.block_size)
    tables = np.full((shape.rows, shape.width), 10**6, np.int32)
    order = rng.permutation(shape.num_blocks)
    beginning, free = order[:shared], list(order[shared:])
    for row, n in enumerate(used_blocks):
        # rows share blocks if there are not enough
        own = [free.pop() if len(free) > 1 else rng.choice(order) for _ in range(n)]
        tables[row, :n] = np.concatenate([beginning, own])[:n]
    used = np.zeros((shape.num_blocks, shape.block_size), bool)
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        # keys before all windows are poisoned, and blocks with such keys only are outside the pool
        first = 0 if shape.window is None else max(0, length - count + 1 - shape.window)
        position = np.arange(first, length)
        tables[row, : first // shape.block_size] = 10**6
        used[tables[row, position // shape.block_size], position % shape.block_size] = True

    parts = 1 if shape.v_dim else 2
    values = rng.standard_normal((shape.num_blocks, parts, shape.kv_heads, shape.block_size, shape.head_dim))
    poisoned = ~used[:, None, None, :, None]
    kv_dtype, scales = shape.kv_dtype or shape.dtype, None
    if kv_dtype == "int8":
        data = device_array(np.clip(values * 40, -127, 127), "int8")
        scales = rng.uniform(0.01, 0.04, values.shape[:-1])
        scales = device_array(np.where(poisoned[..., 0], np.nan, scales), "bfloat16")
    else:
        data = device_array(np.where(poisoned, np.nan, values), kv_dtype)
        if kv_dtype == "float8_e4m3fn":
            scales = device_array(rng.uniform(0.5, 1.5, (2, shape.kv_heads)), "float32")
    tokens = shape.tokens or shape.rows
    return {
        "q": device_array(rng.standard_normal((tokens, shape.heads, shape.head_dim)), shape.dtype),
        "pages": KVPages(data, scales, shape.v_dim),
        "block_tables": device_array(tables, "int32"),
        "context_lens": device_array(lens, "int32"),
        "query_start_loc": device_array(np.cumsum([0, *counts]), "int32"),
    }


def attention_call(shape: Shape, case) -> AttentionCall:
    """The call as implementations take it."""
    return AttentionCall(**case, **_device_options(shape), max_query_len=shape.tokens or 1)


def _device_options(shape: Shape) -> dict:
    return {k: device_array(v, v.dtype) if isinstance(v, np.ndarray) else v for k, v in shape.options.items()}


@functools.cache
def _program(shape: Shape, implementation: str, tiling):
    """The jitted call. tiling: part of the cache key only; tests that patch the choice of tiles pass another one."""
    options = _device_options(shape)
    return jax.jit(functools.partial(
        paged_attention, implementation=implementation, max_query_len=shape.tokens or 1, **options
    ))  # fmt: skip


def attend(shape: Shape, case, implementation, tiling=None):
    """float32 outputs of all tokens but padding."""
    out = _program(shape, implementation, tiling)(*case.values())
    return np.asarray(out, np.float32)[: int(np.asarray(case["query_start_loc"])[-1])]


def expected(shape: Shape, case):
    """The expected outputs, in float64."""
    options = shape.options
    pages, q = case["pages"], np.asarray(case["q"], np.float64)
    data = np.asarray(pages.data).astype(np.float32).astype(np.float64)
    if pages.scales is not None:
        scales = np.asarray(pages.scales).astype(np.float64)
        data = data * (scales[..., None] if scales.ndim == 4 else scales[None, :, :, None, None])
    tables, lens, starts = (np.asarray(case[n]) for n in ("block_tables", "context_lens", "query_start_loc"))
    q_per_kv = shape.heads // shape.kv_heads
    out = np.zeros((starts[-1], shape.heads, shape.v_dim or shape.head_dim))
    for row, length in enumerate(lens):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start == tokens.stop:
            continue
        key = np.arange(length)
        block = np.minimum(tables[row, key // shape.block_size], shape.num_blocks - 1)
        kv = data[block, :, :, key % shape.block_size]  # [keys, parts, kv_heads, dim]
        position = length - (tokens.stop - tokens.start) + np.arange(tokens.stop - tokens.start)
        distance = position[:, None] - key
        hidden = distance < 0
        if shape.window is not None:
            hidden |= distance >= shape.window
        for head in range(shape.heads):
            keys = kv[:, 0, head // q_per_kv]
            values = keys[:, : shape.v_dim] if shape.v_dim else kv[:, 1, head // q_per_kv]
            scores = q[tokens, head] @ keys.T * options["scale"]
            if shape.softcap is not None:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            if shape.slopes:
                scores = scores - options["alibi_slopes"][head] * distance
            scores[hidden] = -np.inf  # this includes scores of poisoned keys, which are NaN
            top = scores.max(1, keepdims=True)
            weights = np.exp(scores - top)
            values = np.where(hidden.all(0)[:, None], 0, values)  # these may be poisoned
            total = weights.sum(1, keepdims=True)
            if shape.sinks:
                total = total + np.exp(options["sinks"][head] - top)
            out[tokens, head] = weights / total @ values
    return out


def slot_values(pages):
    """float64[num_blocks * block_size, 2, kv_heads, head_dim]: contents of all slots, in numpy."""
    data = np.asarray(pages.data).astype(np.float32).astype(np.float64)
    if pages.scales is not None:
        scales = np.asarray(pages.scales).astype(np.float64)
        data = data * (scales[..., None] if scales.ndim == 4 else scales[None, :, :, None, None])
    return data.transpose(0, 3, 1, 2, 4).reshape(-1, *np.delete(data.shape, (0, 3)))


def numpy_qkv(qkv, *, bias=None, cos=None, sin=None, q_norm=None, k_norm=None, eps=1e-6):
    """Expected q, k, v in float64."""
    x = np.asarray(qkv, np.float64) + (0 if bias is None else bias)
    q, k, v = x[:, :, :-2], x[:, :, -2:-1], x[:, :, -1]

    def norm_and_rope(x, weight):
        if weight is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
        if cos is not None:
            half = cos.shape[1]
            c, s = cos[:, None, None], sin[:, None, None]
            a, b = x[..., :half], x[..., half : 2 * half]
            x = np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], -1)
        return x

    return norm_and_rope(q, q_norm).reshape(len(x), -1, x.shape[-1]), norm_and_rope(k, k_norm)[:, :, 0], v
