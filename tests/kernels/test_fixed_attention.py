"""triton_fixed: a token has the same bits in a decode and in any chunk, and both are near to the reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVPages, paged_attention, write_kv
from pallas_kernels.paged_attention import triton_fixed
from tests.kernels.lowering import DEVICES

pytestmark = pytest.mark.codegen

BLOCK, WIDTH, HEAD_DIM, KV_HEADS = 16, 40, 32, 2
LENS, COUNTS = (600, 37), (70, 37)  # keys of two splits; chunks that are not whole tiles
OPTIONS = {
    "plain": (2, {}),
    "window": (3, {"sliding_window": 70, "sinks": np.linspace(-1, 2, 6, dtype=np.float32)}),
    "slopes": (1, {"logit_softcap": 20.0, "alibi_slopes": np.array([0.25, 0.01], np.float32)}),
}


@functools.cache
def cache():
    """Pages of two rows with shuffled blocks, and their block tables."""
    rng = np.random.default_rng(0)
    tables = rng.permutation(2 * WIDTH).reshape(2, WIDTH).astype(np.int32)
    pages = KVPages.create(2 * WIDTH, BLOCK, KV_HEADS, HEAD_DIM, jnp.bfloat16)
    for table, length in zip(tables, LENS, strict=True):
        keys_and_values = jnp.asarray(rng.standard_normal((2, length, KV_HEADS, HEAD_DIM)), jnp.bfloat16)
        position = np.arange(length)
        slots = table[position // BLOCK] * BLOCK + position % BLOCK
        pages = write_kv(pages, *keys_and_values, jnp.asarray(slots, jnp.int32), implementation="xla")
    return pages, tables


@functools.cache
def program(name, longest, implementation):
    options = {key: jnp.asarray(v) if isinstance(v, np.ndarray) else v for key, v in OPTIONS[name][1].items()}
    run = functools.partial(paged_attention, scale=HEAD_DIM**-0.5, max_query_len=longest, **options)
    return jax.jit(functools.partial(run, implementation=implementation))


def attend(name, q, rows, lens, counts, implementation="triton_fixed"):
    """Attention of chunks: `counts` last tokens of `rows`, which have `lens` keys."""
    pages, tables = cache()
    starts, lens = np.cumsum([0, *counts]).astype(np.int32), np.array(lens, np.int32)
    out = program(name, max(counts), implementation)(q, pages, tables[list(rows)], lens, starts)
    return np.asarray(out, np.float32)


@pytest.mark.slow  # 61 programs, most of them operations of the test itself
@pytest.mark.parametrize("name", OPTIONS)
def test_a_decode_has_the_bits_of_every_chunk(name):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((sum(COUNTS), KV_HEADS * OPTIONS[name][0], HEAD_DIM)), jnp.bfloat16)
    whole = attend(name, q, (0, 1), LENS, COUNTS)
    np.testing.assert_allclose(whole, attend(name, q, (0, 1), LENS, COUNTS, "reference"), atol=2e-2)
    for back in (0, 60):  # tokens before the last: at 540 keys; the second row has 37 tokens
        tokens = [COUNTS[0] - 1 - back, sum(COUNTS) - 1 - back // 2]
        lens = (LENS[0] - back, LENS[1] - back // 2)
        decodes = attend(name, q[np.array(tokens)], (0, 1), lens, (1, 1))
        np.testing.assert_array_equal(decodes, whole[tokens])
    chunk = attend(name, q[23:70], (0,), LENS[:1], (47,))
    np.testing.assert_array_equal(chunk, whole[23:70])
    mixed = attend(name, jnp.concatenate([q[69:70], q[-5:]]), (0, 1), LENS, (1, 5))
    np.testing.assert_array_equal(mixed, np.concatenate([whole[69:70], whole[-5:]]))


def test_one_tile_is_in_the_programs_of_decodes_and_chunks():
    """The traced kernels have matmuls of the same two shapes, and the same warps, for every number of rows."""
    found = set()
    for rows, longest in ((1, 1), (64, 1), (4, 256)):
        tokens = rows if longest == 1 else 1024
        pages = KVPages.shapes(64, BLOCK, 8, 128, jnp.bfloat16)
        index = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 256), (rows,), (rows + 1,))]
        call = functools.partial(paged_attention, scale=0.1, max_query_len=longest, implementation="triton_fixed")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("_",), abstract_device=DEVICES["cuda"])):
            text = str(jax.make_jaxpr(call)(jax.ShapeDtypeStruct((tokens, 16, 128), jnp.bfloat16), pages, *index))
        assert ("paged_chunks_fixed" in text) == (longest > 1)
        assert "paged_decode_fixed" in text
        shapes = re.findall(r"f32\[(\S+)\] = dot_general", text)
        found.add((frozenset(shapes), frozenset(re.findall(r"num_warps=(\d+)", text))))
    size = triton_fixed.ROWS, triton_fixed.KEYS
    assert found == {(frozenset({f"{size[0]},{size[1]}", f"{size[0]},128"}), frozenset({str(triton_fixed.WARPS)}))}


def test_the_length_of_a_split_depends_on_the_width_of_the_tables_only():
    assert [triton_fixed.split_keys(keys) for keys in (16, 32_768, 32_769, 131_072)] == [512, 512, 1024, 2048]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dtype", "message"), [(4, "float32", "queries of float32"), (130, "bfloat16", "65 query heads per KV")]
)
def test_refuses(plain_errors, heads, dtype, message):
    pages, tables = cache()
    q = jnp.zeros((2, heads, HEAD_DIM), dtype)
    with pytest.raises(ValueError, match=f"implementation='triton_fixed' cannot take this: {message}"):
        paged_attention(
            q, pages, tables, jnp.ones(2, jnp.int32), jnp.arange(3), scale=1, max_query_len=1,
            implementation="triton_fixed",
        )  # fmt: skip
