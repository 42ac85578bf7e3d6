"""The TPU kernels compile for a v5e, without the device: fast memory and registers suffice, pages are not copied."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, write_kv
from pallas_kernels.kv_pages import KVPages
from tests.kernels import lowered
from tests.support.deviceless import V5E, compile_for_v5e, marks, page

pytestmark = marks(V5E)
BOTH_KINDS = pytest.mark.parametrize("max_query_len", [1, 32], ids=["decode", "mixed"])


@BOTH_KINDS
@pytest.mark.parametrize("name", lowered.TPU)
def test_attention_compiles(name, max_query_len):
    call, arguments = lowered.attention(name, max_query_len, "mosaic_tpu", lowered.TPU)
    program = compile_for_v5e(call, arguments)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert program.memory_analysis().temp_size_in_bytes < arguments[1].num_bytes // 2


@BOTH_KINDS
def test_a_long_context_of_many_rows_compiles(max_query_len):
    """256 rows of 524,288 tokens: of the 32 MiB of block tables, scalar memory holds those of two tiles only."""
    rows, tokens, width = 256, 256 if max_query_len == 1 else 4096, 1 << 15
    call, (_, pages, *_) = lowered.attention("llama-3-8b", max_query_len, "mosaic_tpu", lowered.TPU)
    program = compile_for_v5e(call, (
        lowered.array((tokens, 32, 128), "bfloat16"), pages, lowered.array((rows, width), np.int32),
        lowered.array((rows,), np.int32), lowered.array((rows + 1,), np.int32),
    ))  # fmt: skip
    # 384 tiles of 32 tokens have room for three times the queries, and nothing that large is gathered or copied
    moved = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose|gather|fusion)\(", program.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in moved) <= (tokens + 32) * 32 * 128 * (
        1 if max_query_len > 1 else 16 // 4  # a decode's 4 query heads are padded to 16 rows
    )


@BOTH_KINDS
@pytest.mark.parametrize("variant", lowered.TPU_WRITES, ids=lambda v: "-".join(str(x) for x in v))
def test_pages_are_written_and_read_in_place(variant, max_query_len):
    """write_kv and paged_attention of two layers over the same donated pages make no copy of the pages."""
    heads, head_dim, dtype, kv_dtype = variant
    tokens = lowered.ROWS if max_query_len == 1 else lowered.TOKENS
    q_heads, kv_heads = lowered.HEADS[heads]
    pages = lowered.pages_of(heads, head_dim, dtype, kv_dtype, 64 if kv_dtype else 16)

    def two_layers(q, pages, tables, lens, starts, k, v, slots):
        for _ in range(2):
            pages = write_kv(pages, k, v, slots, implementation="mosaic_tpu")
            q += paged_attention(
                q, pages, tables, lens, starts, scale=0.1, max_query_len=max_query_len, implementation="mosaic_tpu"
            )
        return q, pages

    new = lowered.array((tokens, kv_heads, head_dim), dtype)
    rows = lowered.ROWS
    program = compile_for_v5e(
        two_layers,
        (
            lowered.array((tokens, q_heads, head_dim), dtype), pages, lowered.array((rows, lowered.WIDTH), np.int32),
            lowered.array((rows,), np.int32), lowered.array((rows + 1,), np.int32),
            new, new, lowered.array((tokens,), np.int32),
        ),
        donate_argnums=1,
        out_shardings=(V5E.sharding(), jax.tree.map(lambda x: page(x, V5E).format, pages)),
    )  # fmt: skip
    text, memory = program.as_text(), program.memory_analysis()
    assert text.count('custom_call_target="tpu_custom_call"') == 4
    assert copies(text, pages, "copy|copy-start|copy-done|transpose|convert|fusion") == []
    assert memory.temp_size_in_bytes < pages.num_bytes // 8
    assert memory.alias_size_in_bytes >= pages.num_bytes


def copies(text, pages, operations):
    """Instructions whose result is as large as the pages, or as the scales of int8 pages."""
    pools = "|".join(",".join(map(str, x.shape)) for x in jax.tree.leaves(pages) if len(x.shape) > 2)
    # S(1) is fast memory
    return re.findall(rf"= \w+\[(?:{pools})\]\S* ({operations})\(|\w+\[(?:{pools})\]\S*S\(1\)", text)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_bytes_of_pages_are_those_of_the_device(kv_heads, kv_dtype):
    """The scales of int8 pages are padded to 128 tokens, and to 2, 4, or a multiple of 8 KV heads."""
    pages = KVPages.shapes(100, 64, kv_heads, 128, kv_dtype)
    program = compile_for_v5e(lambda pages: pages.take_blocks(jnp.zeros(1, jnp.int32)), (pages,))
    assert 0 <= program.memory_analysis().argument_size_in_bytes - pages.bytes_on("tpu") < 4096


def test_the_check_sees_a_copy():
    """The assertion above can fail: pages in the layout that XLA chooses for heads of 64 are copied."""
    call, arguments = lowered.attention("gqa-7-64-sinks", 1, "mosaic_tpu", lowered.TPU)

    def default_layout(x):
        if isinstance(x, KVPages):
            return jax.tree.map(default_layout, x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=V5E.sharding())

    assert copies(compile_for_v5e(call, arguments, default_layout).as_text(), arguments[1], "copy|copy-start|copy-done")
