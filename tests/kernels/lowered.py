"""Calls of the kernels that must lower and compile for accelerators: real models' shapes, without data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPages, gated_dot, paged_attention, write_kv, write_qkv

ROWS, TOKENS, WIDTH, NUM_BLOCKS = 4, 64, 128, 1024
HEADS = {"gqa": (32, 8), "mha": (4, 4), "gqa-7": (14, 2), "mqa": (8, 1), "mqa-20": (20, 1), "mha-32": (32, 32),
         "gemma-4": (16, 2), "latent": (128, 1), "latent-64": (64, 1)}  # fmt: skip

# name: heads, head_dim, dtype, dtype of the pages, block size, options; a tuple is the shape of an array option
ATTENTION = {
    "llama-3-8b": ("gqa", 128, "bfloat16", None, 16, {}),
    "float32-window": ("gqa", 128, "float32", None, 16, {"sliding_window": 100}),
    "mha-80-float16-softcap": ("mha", 80, "float16", None, 32, {"logit_softcap": 30.0}),
    "gqa-7-64-sinks": ("gqa-7", 64, "bfloat16", None, 64, {"sinks": (14,)}),
    "mqa-96-alibi": ("mqa", 96, "bfloat16", None, 128, {"alibi_slopes": (8,)}),
    "mha-256": ("mha", 256, "bfloat16", None, 16, {}),
    "float32-256": ("mha", 256, "float32", None, 16, {}),
    "int8": ("gqa", 128, "bfloat16", "int8", 16, {}),
    "int8-float32": ("mha", 64, "float32", "int8", 32, {}),
    "fp8": ("gqa", 128, "bfloat16", "float8_e4m3fn", 16, {}),
    "gemma-4-512": ("gemma-4", 512, "bfloat16", None, 16, {}),
    "float32-512": ("gemma-4", 512, "float32", None, 16, {"sliding_window": 100}),
    "deepseek-v3": ("latent", (576, 512), "bfloat16", None, 16, {}),
    "kimi-k2": ("latent-64", (576, 512), "bfloat16", None, 16, {}),
}
# the same for the decode through Mosaic GPU
HOPPER = {
    "llama-3-8b": ("gqa", 128, "bfloat16", None, 16, {}),
    "gqa-7-64": ("gqa-7", 64, "float16", None, 64, {"sliding_window": 100, "sinks": (14,)}),
    "mqa-softcap": ("mqa", 128, "bfloat16", None, 128, {"logit_softcap": 30.0}),
    "alibi": ("mha", 64, "bfloat16", None, 32, {"alibi_slopes": (4,)}),
}
# the same for TPU
TPU = {
    "llama-3-8b": ("gqa", 128, "bfloat16", None, 16, {}),
    "float32-window": ("gqa", 128, "float32", None, 16, {"sliding_window": 100}),
    "mha-80-softcap": ("mha", 80, "bfloat16", None, 32, {"logit_softcap": 30.0}),
    "gqa-7-64-sinks": ("gqa-7", 64, "bfloat16", None, 64, {"sinks": (14,)}),
    "mqa-96-alibi": ("mqa", 96, "bfloat16", None, 128, {"alibi_slopes": (8,)}),
    "mha-256": ("mha", 256, "bfloat16", None, 16, {}),
    "gemma-4-512": ("gemma-4", 512, "bfloat16", None, 16, {}),
    "mqa-20-block-8": ("mqa-20", 64, "float32", None, 8, {"sinks": (20,), "alibi_slopes": (20,)}),
    "mha-32-in-blocks-of-heads": ("mha-32", 128, "float32", None, 128, {}),
    "float32-queries": ("gqa", 128, "float32", "bfloat16", 16, {}),
    "float32-pages": ("gqa", 128, "bfloat16", "float32", 16, {}),
    "int8": ("gqa", 128, "bfloat16", "int8", 64, {}),
    "int8-float32-window": ("gqa-7", 64, "float32", "int8", 32, {"sliding_window": 100}),
    "int8-in-blocks-of-heads": ("mha-32", 128, "bfloat16", "int8", 64, {}),
    "fp8-softcap-sinks": ("gqa", 128, "bfloat16", "float8_e4m3fn", 64, {"logit_softcap": 30.0, "sinks": (32,)}),
}
TPU_WRITES = [("gqa", 128, "bfloat16", None), ("gqa", 128, "float32", None), ("gqa", 64, "bfloat16", None),
              ("mha", 80, "float32", None), ("mqa", 256, "bfloat16", None), ("gqa", 128, "bfloat16", "int8"),
              ("gqa-7", 64, "float32", "int8"), ("mqa", 256, "bfloat16", "float8_e4m3fn")]  # fmt: skip
# name: heads, head_dim, dtype, dtype of the pages, bias, norm, half
QKV = {
    "llama-3-8b": ("gqa", 128, "bfloat16", None, False, False, 64),
    "qwen2": ("gqa-7", 64, "bfloat16", None, True, False, 32),
    "qwen3": ("gqa", 128, "bfloat16", None, False, True, 64),
    "partial-80": ("mha", 80, "float32", None, True, True, 10),
    "no-rotation": ("mqa", 64, "float16", None, False, False, 0),
    "int8": ("gqa", 128, "bfloat16", "int8", False, True, 64),
    "fp8": ("gqa", 128, "bfloat16", "float8_e4m3fn", False, True, 64),
}
WRITES = [("gqa", 128, "bfloat16", None), ("mha", 80, "float32", None), ("gqa", 128, "bfloat16", "int8"),
          ("mqa", 96, "bfloat16", "float8_e4m3fn")]  # fmt: skip


def array(shape, dtype):
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def pages_of(heads, head_dim, dtype, kv_dtype, block_size=16):
    head_dim, v_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, None)
    return KVPages.shapes(NUM_BLOCKS, block_size, HEADS[heads][1], head_dim, kv_dtype or dtype, v_dim=v_dim)


def sparse_attention():
    """Rows of one token over single tokens of latent pages: DeepSeek V3.2, whose pages have 128 numbers more."""

    def call(q, pages, *rows):
        return paged_attention(
            q, pages.by_token(), *rows, scale=0.1, max_query_len=1, key_dim=576, implementation="triton"
        )

    return call, (
        array((TOKENS, 128, 704), "bfloat16"), pages_of("latent", (704, 512), "bfloat16", None),
        array((TOKENS, 2048), "int32"), array((TOKENS,), "int32"), array((TOKENS + 1,), "int32"),
    )  # fmt: skip


def attention(name, max_query_len, implementation, variants=ATTENTION):
    """A function of arrays, and ShapeDtypeStructs as its arguments. A pair as head_dim: of latent pages, with v_dim."""
    heads, head_dim, dtype, kv_dtype, block_size, options = variants[name]
    tokens = ROWS if max_query_len == 1 else TOKENS
    pages = pages_of(heads, head_dim, dtype, kv_dtype, block_size)
    names = [n for n, value in options.items() if isinstance(value, tuple)]
    fixed = {n: value for n, value in options.items() if n not in names}

    def call(q, pages, tables, lens, starts, *more):
        return paged_attention(
            q, pages, tables, lens, starts, scale=pages.head_dim**-0.5, max_query_len=max_query_len,
            implementation=implementation, **fixed, **dict(zip(names, more, strict=True)),
        )  # fmt: skip

    return call, (
        array((tokens, HEADS[heads][0], pages.head_dim), dtype), pages,
        array((ROWS, WIDTH), "int32"), array((ROWS,), "int32"), array((ROWS + 1,), "int32"),
        *(array(options[n], "float32") for n in names),
    )  # fmt: skip


def writing(heads, head_dim, dtype, kv_dtype, implementation, block_size=16):
    new = array((TOKENS, HEADS[heads][1], head_dim), dtype)
    call = functools.partial(write_kv, implementation=implementation)
    return call, (pages_of(heads, head_dim, dtype, kv_dtype, block_size), new, new, array((TOKENS,), np.int32))


def gated(rows, activation="silu"):
    """Gate and up of Llama 3.1 8B, through the kernel for NVIDIA."""
    call = functools.partial(gated_dot, activation=activation, implementation="triton")
    return call, (array((rows, 4096), "bfloat16"), array((2, 14336, 4096), "bfloat16"), array((), "int32"))


def writing_qkv(name, implementation):
    heads, head_dim, dtype, kv_dtype, bias, norm, half = QKV[name]
    q_heads, kv_heads = HEADS[heads]
    qkv = array((TOKENS, kv_heads, q_heads // kv_heads + 2, head_dim), dtype)
    given = {"bias": array(qkv.shape[1:], dtype)} if bias else {}
    given |= {n: array((head_dim,), dtype) for n in ("q_norm", "k_norm") if norm}
    given |= {n: array((TOKENS, half), "float32") for n in ("cos", "sin") if half}

    def call(pages, qkv, slots, given):
        return write_qkv(pages, qkv, slots, implementation=implementation, **given)

    return call, (pages_of(heads, head_dim, dtype, kv_dtype), qkv, array((TOKENS,), np.int32), given)
