"""TPU kernels: fetching pages ahead, waiting for them, writing slabs, and refused calls."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # holds whether a race was found
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KVPages, write_kv
from pallas_kernels.paged_attention import mosaic_tpu
from pallas_kernels.write_kv import mosaic_tpu as mosaic_tpu_write
from tests.kernels.oracle import TOLERANCE, Shape, attend, expected, make_case
from tests.kernels.test_choice import device_like

pytestmark = pytest.mark.codegen

# Rows of several steps of 256 keys with empty rows in between, where the next tile's first pages are not fetched ahead.
MANY_STEPS = ((1, 600), (0, 0), (1, 256), (1, 1), (0, 0), (0, 0), (1, 513))
LONG = Shape(kv_heads=4, block_size=32, tokens=0, rows=7)


@pytest.mark.parametrize(
    ("heads", "window"),
    [
        pytest.param(1, 300, id="head-by-head-300"), pytest.param(4, None, id="all-heads-None"),
        pytest.param(1, None, id="head-by-head-None", marks=pytest.mark.slow),
        pytest.param(4, 300, id="all-heads-300", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_tiles_of_long_and_empty_rows(window, heads):
    """Programs of one KV head, as with little fast memory, and programs of all KV heads."""
    shape = dataclasses.replace(LONG, window=window)
    case = make_case(shape, MANY_STEPS)
    with mock.patch.object(mosaic_tpu, "_heads", return_value=heads):
        result = attend(shape, case, "mosaic_tpu", heads)
    np.testing.assert_allclose(result, expected(shape, case), atol=TOLERANCE["float32"])


def test_waits_for_the_pages_that_it_reads():
    """JAX simulates a TPU's memory: a copy happens when the kernel waits for it, and races are reported."""
    shape = dataclasses.replace(LONG, kv_heads=2, window=300)
    case = make_case(shape, MANY_STEPS)
    result = mosaic_tpu.paged_attention(
        *case.values(), **shape.options, max_query_len=1, interpret=pltpu.InterpretParams(detect_races=True)
    )
    count = int(case["query_start_loc"][-1])
    np.testing.assert_allclose(np.asarray(result)[:count], expected(shape, case), atol=TOLERANCE["float32"])
    assert not interpret_pallas_call.races.races_found


def test_bits_of_a_row_do_not_depend_on_other_rows():
    """Steps are counted from position 0 of a row, so more rows, other rows or chunks do not change the bits."""
    for tokens, first, batches in (
        (0, (1, 600), (((1, 7), (1, 150)), ((0, 0), (1, 513)))),
        (64, (6, 600), (((1, 90),), ((1, 300), (1, 1)))),
    ):
        shape = Shape(block_size=32, tokens=tokens)
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
        ({"width": 1 << 15}, None),
        ({"width": 1 << 16}, "use larger blocks"),
    ],
)
def test_refused_calls_are_named(change, reason):
    shape = {"block_size": 16, "dtype": "float32", "width": 20} | change
    pages = KVPages.shapes(64, shape["block_size"], 2, 16, shape["dtype"])
    q = jax.ShapeDtypeStruct((64, 4, 16), pages.dtype)
    tables = jax.ShapeDtypeStruct((256, shape["width"]), np.int32)
    answer = mosaic_tpu.refuse(device_like("tpu"), q, pages, tables, 64)
    assert answer is None if reason is None else reason in str(answer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_puts_tokens_into_slabs_whatever_their_order(dtype):
    """Several tokens per slab and slabs per block, in any order, with NaN in other slots; and only padding."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((6, 2, 3, 32, 16))
    data[2] = np.nan
    pages = KVPages(jnp.asarray(data, dtype))
    k, v = jnp.asarray(rng.standard_normal((2, 40, 3, 16)), dtype)
    k = k.at[3].set(jnp.nan)  # NaN of one token must stay in its slot
    slots = rng.permutation(6 * 32)[:40].astype(np.int32)
    slots[rng.permutation(40)[:9]] = -1
    slots[20:] = np.where(slots[20:] >= 0, np.arange(64, 84), -1)  # neighbouring slots, as in a prompt
    slots[:20][np.isin(slots[:20], slots[20:])] = -1
    slots = jnp.asarray(slots)
    for given in (slots, jnp.full_like(slots, -1)):
        wanted = write_kv(pages, k, v, given, implementation="xla")
        result = write_kv(pages, k, v, given, implementation="mosaic_tpu")
        np.testing.assert_array_equal(np.asarray(result.data, np.float32), np.asarray(wanted.data, np.float32))
    simulated = mosaic_tpu_write.write_kv(pages, k, v, slots, interpret=pltpu.InterpretParams(detect_races=True))
    wanted = write_kv(pages, k, v, slots, implementation="xla")
    np.testing.assert_array_equal(np.asarray(simulated.data, np.float32), np.asarray(wanted.data, np.float32))
    assert not interpret_pallas_call.races.races_found
