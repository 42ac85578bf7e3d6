"""TPU kernels: fetching pages ahead, waiting for them, writing slabs, and refused calls."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # holds whether a race was found
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KVPages, paged_attention, write_kv
from pallas_kernels.paged_attention import mosaic_tpu
from pallas_kernels.write_kv import mosaic_tpu as mosaic_tpu_write
from tests.kernels.fake_devices import device_like
from tests.kernels.oracle import TOLERANCE, Shape, attend, attention_call, expected, make_case
from tests.support.device_arrays import device_array

pytestmark = pytest.mark.codegen

# Rows of several steps of 256 keys with empty rows in between, where the next tile's first pages are not fetched ahead.
MANY_STEPS = ((1, 600), (0, 0), (1, 256), (1, 1), (0, 0), (0, 0), (1, 513))
LONG = Shape(kv_heads=4, block_size=32, tokens=0, rows=7)


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ((1, 256), (1, 128)),
        pytest.param((4, 128), (1, 256), marks=pytest.mark.slow),
        pytest.param((2, 256), (2, 128), marks=pytest.mark.slow),
        pytest.param((2, 128), (1, 128), marks=pytest.mark.slow),
    ],
    ids=["columns", "rows", "row", "one-row"],
)
def test_smaller_layers_have_parts_of_pages(stored, own):
    """Written and read in parts of larger pages: the results of pages of their own. Other parts do not change."""
    rng, (blocks, size, tokens) = np.random.default_rng(0), (6, 8, 24)
    whole = KVPages(jnp.asarray(np.full((blocks, 2, stored[0], size, stored[1]), 7, np.float32)))
    parts = whole.in_shape(*own)
    apart = KVPages(jnp.asarray(np.zeros((parts.num_blocks, 2, own[0], size, own[1]), np.float32)))
    k, v = (rng.standard_normal((tokens, *own)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((1, *own)).astype(np.float32)
    tables = np.array([[7, 2, 5]], np.int32)
    slots = (tables[0][:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
    rows = (tables, np.array([tokens], np.int32), np.array([0, 1], np.int32))

    @functools.partial(jax.jit, static_argnames=("write", "attend"))
    def run(pages, given, write, attend):
        q, k, v, slots, *rows = given
        pages = write_kv(pages, k, v, slots, implementation=write)
        return pages, paged_attention(q, pages, *rows, scale=0.1, max_query_len=1, implementation=attend)

    given = q, k, v, slots, *rows
    parts, out = run(parts, given, "mosaic_tpu", "mosaic_tpu")
    _, expected_out = run(apart, given, "xla", "reference")
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=0)
    written = np.asarray(parts.in_whole().data)
    assert (written != 7).sum() == 2 * k.size
    np.testing.assert_array_equal(np.sort(written[written != 7]), np.sort(np.concatenate([k, v], axis=None)))


@pytest.mark.parametrize(
    ("heads", "window", "kv_dtype"),
    [
        pytest.param(1, 300, None, id="head-by-head-300", marks=pytest.mark.slow),
        pytest.param(4, None, None, id="all-heads-None", marks=pytest.mark.slow),
        pytest.param(1, None, None, id="head-by-head-None", marks=pytest.mark.slow),
        pytest.param(4, 300, None, id="all-heads-300", marks=pytest.mark.slow),
        pytest.param(2, 300, "int8", id="two-heads-300-int8"),
        pytest.param(1, None, "float8_e4m3fn", id="head-by-head-None-fp8", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_tiles_of_long_and_empty_rows(window, heads, kv_dtype):
    """Programs of some KV heads, as with little fast memory, and programs of all KV heads."""
    shape = dataclasses.replace(LONG, window=window, kv_dtype=kv_dtype)
    case = make_case(shape, MANY_STEPS)
    with mock.patch.object(mosaic_tpu, "_heads", return_value=heads):
        result = attend(shape, case, "mosaic_tpu", heads)
    np.testing.assert_allclose(result, expected(shape, case), atol=TOLERANCE["float32"])


@pytest.mark.parametrize("kv_dtype", [pytest.param(None, marks=pytest.mark.slow), "int8"])  # int8 copies scales, too
def test_waits_for_the_pages_that_it_reads(kv_dtype):
    """JAX simulates a TPU's memory: a copy happens when the kernel waits for it, and races are reported."""
    shape = dataclasses.replace(LONG, kv_heads=2, window=300, kv_dtype=kv_dtype)
    case = make_case(shape, MANY_STEPS)
    call = functools.partial(mosaic_tpu.paged_attention, interpret=pltpu.InterpretParams(detect_races=True))
    result = jax.jit(call)(attention_call(shape, case))
    count = int(np.asarray(case["query_start_loc"])[-1])
    np.testing.assert_allclose(np.asarray(result)[:count], expected(shape, case), atol=TOLERANCE["float32"])
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    "kv_dtype", [None, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "float8_e4m3fn"))]
)
def test_bits_of_a_row_do_not_depend_on_other_rows(kv_dtype):
    """Steps are counted from position 0 of a row, so more rows, other rows or chunks do not change the bits."""
    for tokens, first, batches in (
        (0, (1, 600), (((1, 7), (1, 150)), ((0, 0), (1, 513)))),
        (64, (6, 600), (((1, 90),), ((1, 300), (1, 1)))),
    ):
        shape = Shape(block_size=32, tokens=tokens, kv_dtype=kv_dtype)
        alone = attend(shape, make_case(shape, (first,)), "mosaic_tpu")
        for others in batches:  # data and the first row's blocks do not depend on the others
            among = attend(shape, make_case(shape, (first, *others)), "mosaic_tpu")
            np.testing.assert_array_equal(among[: first[0]], alone)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": "float16"}, "queries are float16"),
        ({"block_size": 8, "dtype": "bfloat16"}, "multiples of 16 for bfloat16"),
        ({"block_size": 8}, None),
        ({"block_size": 64, "dtype": "bfloat16", "kv_dtype": "int8"}, None),
        ({"block_size": 16, "dtype": "bfloat16", "kv_dtype": "int8"}, "multiples of 32 for int8"),
        ({"block_size": 16, "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}, "multiples of 32 for float8_e4m3fn"),
        ({"width": 1 << 15}, None),
        ({"width": 1 << 16}, "use larger blocks"),
    ],
)
def test_refused_calls_are_named(change, reason):
    shape = {"block_size": 16, "dtype": "float32", "width": 20} | change
    pages = KVPages.shapes(64, shape["block_size"], 2, 16, shape.get("kv_dtype", shape["dtype"]))
    q = jax.ShapeDtypeStruct((64, 4, 16), jnp.dtype(shape["dtype"]))
    tables = jax.ShapeDtypeStruct((256, shape["width"]), np.int32)
    answer = mosaic_tpu.refuse(device_like("tpu"), q, pages, tables, 64)
    assert answer is None if reason is None else reason in str(answer)


@pytest.mark.parametrize(
    "dtype",
    ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("float32", "bfloat16", "float8_e4m3fn"))],
)
def test_write_puts_tokens_into_slabs_whatever_their_order(dtype):
    """Several tokens per slab and slabs per block, in any order, with NaN in other slots; and only padding."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((3, 2, 3, 64, 16))
    data[1] = np.nan
    scales, kind = None, dtype
    if dtype == "int8":
        data, kind = rng.integers(-127, 128, data.shape), "bfloat16"
        scales = rng.uniform(0.01, 0.04, data.shape[:-1])
        scales[1] = np.nan
        scales = device_array(scales, "bfloat16")
    elif dtype == "float8_e4m3fn":
        scales, kind = device_array([[0.5, 2.0, 1.0], [1.0, 0.01, 0.3]], "float32"), "bfloat16"
    pages = KVPages(device_array(data, dtype), scales)
    k, v = rng.standard_normal((2, 40, 3, 16))
    k[3] = np.nan  # NaN of one token must stay in its slot
    k[5] = 0.0
    k, v = (device_array(array, kind) for array in (k, v))
    slots = rng.permutation(3 * 64)[:40].astype(np.int32)
    slots[rng.permutation(40)[:9]] = -1
    slots[20:] = np.where(slots[20:] >= 0, np.arange(84, 104), -1)  # neighbouring slots, as in a prompt
    slots[:20][np.isin(slots[:20], slots[20:])] = -1
    by_xla, by_kernel = (
        jax.jit(functools.partial(write_kv, implementation=name)) for name in ("xla", "mosaic_tpu")
    )
    simulated = jax.jit(
        functools.partial(mosaic_tpu_write.write_kv, interpret=pltpu.InterpretParams(detect_races=True))
    )
    for given in (slots, np.full_like(slots, -1)):
        assert_same(by_kernel(pages, k, v, given), by_xla(pages, k, v, given))
    assert_same(simulated(pages, k, v, slots), by_xla(pages, k, v, slots))
    assert not interpret_pallas_call.races.races_found


def assert_same(result, wanted):
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
