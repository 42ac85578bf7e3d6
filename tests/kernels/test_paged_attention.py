"""paged_attention: against float64 with random lengths, and with the same bits in any batch."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import paged_attention
from pallas_kernels.native import library
from pallas_kernels.paged_attention import cpu
from pallas_kernels.paged_attention.tiling import Tiling
from tests.kernels.oracle import DECODES, RAGGED, TOLERANCE, Shape, attend, expected, make_case
from tests.support.device_arrays import device_array

pytestmark = pytest.mark.codegen

# At most 30 shapes: each one needs a program per implementation, and compiling in interpret mode takes seconds.
SHAPES = {
    "ragged": Shape(),
    "decodes": Shape(tokens=0),
    "window": Shape(window=40),
    "window-1": Shape(tokens=0, window=1),
    "softcap": Shape(softcap=2.0),
    "sinks": Shape(sinks=True),
    "alibi": Shape(slopes=True),
    "all-options": Shape(tokens=0, window=100, softcap=3.0, sinks=True, slopes=True),
    "ragged-all-options": Shape(window=40, softcap=2.0, sinks=True, slopes=True),
    "mha-64-bf16": Shape(heads=2, head_dim=64, dtype="bfloat16"),
    "gqa-7-64-block-32": Shape(heads=14, head_dim=64, block_size=32, width=10, dtype="bfloat16"),
    "gqa-7-64-decodes": Shape(heads=14, head_dim=64, tokens=0, dtype="bfloat16"),
    "mqa-20": Shape(heads=20, kv_heads=1, head_dim=40),
    "mqa-80-block-64": Shape(heads=3, kv_heads=1, head_dim=80, block_size=64, width=5, num_blocks=24),
    "96-block-128": Shape(head_dim=96, block_size=128, width=3, num_blocks=16, tokens=0),
    "128-bf16": Shape(heads=8, head_dim=128, dtype="bfloat16"),
    "128-decodes": Shape(heads=8, head_dim=128, tokens=0, dtype="bfloat16"),
    "256": Shape(head_dim=256),
    "512": Shape(head_dim=512, heads=6),
    "512-bf16": Shape(heads=4, kv_heads=1, head_dim=512, dtype="bfloat16", sinks=True, window=40),
    "512-decodes": Shape(heads=8, head_dim=512, tokens=0, dtype="bfloat16"),
    "2048-keys": Shape(tokens=0, width=128, num_blocks=160, rows=3),  # four splits by the rule
    "fp16": Shape(head_dim=64, dtype="float16"),
    "tiny-scale": Shape(scale=1e-31, window=40),  # all keys in the window weigh the same
    "int8": Shape(kv_dtype="int8"),
    "int8-decodes-bf16": Shape(
        heads=8, head_dim=64, block_size=32, width=10, tokens=0, dtype="bfloat16", kv_dtype="int8"
    ),
    "int8-all-options": Shape(
        block_size=32, width=10, kv_dtype="int8", window=40, softcap=2.0, sinks=True, slopes=True
    ),
    "fp8": Shape(block_size=32, width=10, kv_dtype="float8_e4m3fn"),
    "fp8-decodes-bf16": Shape(heads=8, head_dim=64, tokens=0, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    "latent": Shape(heads=8, kv_heads=1, head_dim=72, v_dim=64),
    "latent-decodes": Shape(heads=8, kv_heads=1, head_dim=72, v_dim=64, tokens=0, dtype="bfloat16"),
    "latent-576": Shape(heads=40, kv_heads=1, head_dim=576, v_dim=512, dtype="bfloat16"),
}
# The kernels and the CPU implementation run every shape. The other two implementations run some of them.
SOME = ("ragged", "decodes", "window", "sinks", "all-options", "gqa-7-64-decodes", "int8", "fp8", "latent")
IMPLEMENTED = {
    "reference": SOME,
    "xla": SOME,
    "xla_loop": tuple(SHAPES),
    "cpu": tuple(SHAPES),
    "triton": tuple(SHAPES),
    "triton_small": ("ragged-all-options", "decodes", "int8"),
    "mosaic_tpu": tuple(
        name for name, shape in SHAPES.items()
        if shape.v_dim is None and shape.dtype != "float16" and (shape.kv_dtype is None or shape.block_size >= 32)
    ),
}
# Splits of 24 keys, and of 48 for rows of more than 8 * 24 keys: neither is a multiple of the 32 keys per iteration.
SMALL_TILES = Tiling(decode_keys=32, prefill_rows=16, prefill_keys=32, min_split_keys=24)
SPLIT = ("ragged", "decodes", "window", "all-options", "int8-decodes-bf16")


def rows_of(shape):
    """Strategy for lists of (tokens, keys): empty rows, one key, block edges, full block tables."""
    edges = [1, shape.block_size - 1, shape.block_size, shape.block_size + 1, shape.table_keys]

    def with_past(count):
        lens = st.one_of(st.sampled_from([n for n in edges if n >= count]), st.integers(count, shape.table_keys))
        return st.tuples(st.just(count), lens if count else st.just(0))

    most = max(1, shape.tokens // shape.rows)
    counts = st.integers(0, 1) if not shape.tokens else st.one_of(st.just(1), st.integers(0, most))
    return st.lists(counts.flatmap(with_past), min_size=1, max_size=shape.rows)


# The default run takes the shapes with several options, types and odd sizes at once. The gate runs all of them, each
# option alone among them: a failure there says which option it is.
FIRST = {
    "reference": ("ragged",),
    "xla": ("all-options",),
    "xla_loop": ("ragged-all-options", "int8-decodes-bf16"),
    "cpu": tuple(SHAPES),  # a second in all
    "triton": ("ragged-all-options", "fp8-decodes-bf16", "latent-576"),
    "triton_small": ("decodes",),
    "mosaic_tpu": ("int8-all-options",),  # test_mosaic_tpu.py has decodes and fp8
    "triton-splits": ("all-options",),
}


def case_of(name, implementation, tiling=None, split=""):
    """A case of test_matches_float64."""
    marks = [pytest.mark.slow] * (name not in FIRST[implementation + split])
    return pytest.param(name, implementation, tiling, id=f"{name}-{implementation}{split}", marks=marks)


CASES = [case_of(name, implementation) for implementation, names in IMPLEMENTED.items() for name in names]
CASES += [case_of(name, "triton", SMALL_TILES, "-splits") for name in SPLIT]


@pytest.mark.parametrize(("name", "implementation", "tiling"), CASES)
def test_matches_float64(name, implementation, tiling):
    """Unused slots and unused entries of block tables have no effect: `make_case` poisons them."""
    shape = SHAPES[name]
    if implementation == "cpu" and library.native(cpu.KERNEL).name is None:
        pytest.skip(library.native(cpu.KERNEL).reason)
    long_sums = shape.table_keys > 1024 or shape.head_dim > 256  # a sum of 512 products has an error of 2.2e-6
    tolerance = 1e-5 if shape.dtype == "float32" and long_sums else TOLERANCE[shape.dtype]

    def compare(rows, seed, shared):
        case = make_case(shape, rows, seed=seed, shared=shared)
        np.testing.assert_allclose(
            attend(shape, case, implementation, tiling), expected(shape, case), atol=tolerance, rtol=0
        )

    @settings(max_examples=8)
    @given(rows=rows_of(shape), seed=st.integers(0, 2**16), shared=st.integers(0, 2))
    def drawn(rows, seed, shared):
        compare(rows, seed, shared)

    choose = mock.patch.object(Tiling, "choose", return_value=tiling) if tiling else mock.MagicMock()
    with choose:
        compare((RAGGED if shape.tokens else DECODES)[: shape.rows], 0, 0)
        drawn()


@pytest.mark.parametrize(
    ("name", "others"),
    [("all-options", ((1, 7), (1, 150))), pytest.param("ragged", ((1, 7), (6, 150)), marks=pytest.mark.slow)],
)
def test_bits_of_a_triton_decode_do_not_depend_on_other_rows(name, others):
    """Splits begin at fixed positions, so more rows, other rows or chunks do not change the bits."""
    with mock.patch.object(Tiling, "choose", return_value=SMALL_TILES):
        shape = SHAPES[name]
        alone, first = (make_case(shape, rows) for rows in (((1, 300),), ((1, 300), *others)))
        # the first row's blocks and the data do not depend on the other rows
        np.testing.assert_array_equal(*(np.asarray(case["block_tables"])[0] for case in (alone, first)))
        np.testing.assert_array_equal(
            *(attend(shape, case, "triton", SMALL_TILES)[:1] for case in (alone, first))
        )


BATCHED = {
    "plain": Shape(heads=6, tokens=200, rows=8),
    "window": Shape(heads=6, tokens=200, rows=8, window=50),
    "32-bf16": Shape(head_dim=32, dtype="bfloat16", tokens=200, rows=8),
    "64": Shape(heads=2, head_dim=64, tokens=200, rows=8),
    "mqa-20": Shape(heads=20, kv_heads=1, head_dim=40, tokens=200, rows=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHED)
def test_bits_of_a_query_do_not_depend_on_the_batch(name):
    """On CPU the bits are the same for a whole prompt, in chunks, token by token, and with other rows."""
    shape, length = BATCHED[name], 150
    whole_case = make_case(shape, ((length, length),))
    whole = attend(shape, whole_case, "xla_loop")

    def part(first, count, others):
        """Queries first to first + count - 1, followed by the rows of `others`, in a call of exactly this size."""
        case = make_case(shape, ((count, first + count), *others))
        q = np.zeros((-(-(count + sum(c for c, _ in others)) // 8) * 8, *whole_case["q"].shape[1:]), case["q"].dtype)
        q[:count] = np.asarray(whole_case["q"])[first : first + count]
        rows = 1 + len(others)
        call = jax.jit(functools.partial(
            paged_attention, implementation="xla_loop", scale=shape.head_dim**-0.5, sliding_window=shape.window,
            max_query_len=int(max(count, *(c for c, _ in others), 1)),
        ))  # fmt: skip
        out = call(
            q, case["pages"], *(np.asarray(case[name])[:rows] for name in ("block_tables", "context_lens")),
            np.asarray(case["query_start_loc"])[: rows + 1],
        )
        return np.asarray(out, np.float32)[:count]

    neighbours = ((1, 300), (40, 41), (1, 1), (1, 7))
    for first, count, others in ((71, 1, ()), (100, 50, ()), (0, 7, neighbours), (71, 1, neighbours)):
        np.testing.assert_array_equal(part(first, count, others), whole[first : first + count])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"context_lens": jnp.zeros(5, jnp.int32)}, "context_lens"),
        ({"q": jnp.zeros((64, 3, 16))}, "multiple of 2 heads"),
        ({"q": jnp.zeros((64, 64))}, r"q \(64, 64\): must be \[tokens, q_heads, head_dim\]"),
        ({"q": jnp.zeros((64, 4, 16), int)}, "q of int32"),
        ({"block_tables": jnp.zeros(6, int)}, r"block_tables \(6,\): must be \[rows, width\]"),
        ({"block_tables": jnp.zeros((6, 20))}, "block_tables of float32: must be int32"),
        ({"context_lens": [1] * 6}, "context_lens of type list"),
        ({"pages": jnp.zeros((64, 2, 2, 16, 16))}, "pages of type"),
        ({"max_query_len": np.int32(64), "sliding_window": np.int32(9)}, None),
        ({"scale": jnp.inf}, "scale=inf"),
        ({"max_query_len": 0}, "max_query_len=0"),
        ({"max_query_len": 2.5}, "max_query_len=2.5: must be a whole number"),
        ({"sliding_window": 2.5}, "sliding_window=2.5: must be a whole number"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0"),
        ({"sinks": jnp.zeros(3)}, r"sinks \(3,\)"),
    ],
)
@pytest.mark.usefixtures("plain_errors")
def test_wrong_arguments_are_named(change, message):
    if message is None:  # accepted
        paged_attention(**{**make_case(Shape()), "scale": 1.0, "max_query_len": 64} | change)
        return
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**make_case(Shape()), "scale": 1.0, "max_query_len": 64} | change)


@pytest.mark.parametrize("implementation", ["xla_loop", "triton", "mosaic_tpu"])
@pytest.mark.slow
@pytest.mark.usefixtures("plain_errors")
def test_index_types_and_64_bits_change_nothing(implementation):
    shape = SHAPES["ragged"]
    case = make_case(shape, RAGGED)
    wanted = attend(shape, case, implementation)
    call = jax.jit(functools.partial(
        paged_attention, scale=shape.head_dim**-0.5, max_query_len=64, implementation=implementation
    ))  # fmt: skip
    unsigned = case | {"query_start_loc": device_array(case["query_start_loc"], "uint32")}
    tokens = len(wanted)
    np.testing.assert_array_equal(np.asarray(call(**unsigned))[:tokens], wanted)
    with jax.enable_x64(True):
        long = {name: device_array(case[name], "int64") for name in ("block_tables", "context_lens", "query_start_loc")}
        np.testing.assert_array_equal(np.asarray(call(**case | long))[:tokens], wanted)


@pytest.mark.parametrize("implementation", ["reference", "xla", "xla_loop", "triton", "mosaic_tpu"])
def test_empty_calls_give_zeros(implementation):
    q, pages, tables, lens, starts = make_case(Shape(), ()).values()
    call = jax.jit(
        functools.partial(paged_attention, scale=1.0, max_query_len=1, implementation=implementation)
    )
    nothing = call(np.asarray(q)[:0], pages, tables, lens, starts)
    assert nothing.shape == (0, 4, 16)
    nobody = call(q, pages, np.asarray(tables)[:0], np.asarray(lens)[:0], np.asarray(starts)[:1])
    assert nobody.shape == q.shape


WRONG_INDICES = [
    ({"context_lens": jnp.asarray([5, 400, 0, 40, 200, 16])}, "context_lens="),
    ({"context_lens": jnp.asarray([5, 300, 0, 20, 200, 16])}, "context_lens="),
    ({"block_tables": jnp.full((6, 20), 64)}, "blocks are 0 to 63"),
    ({"max_query_len": 8}, "max_query_len=8"),
    ({"query_start_loc": jnp.asarray([0, 1, 2, 2, 35, 42, 99])}, "query_start_loc="),
]


@pytest.mark.parametrize(("change", "message"), WRONG_INDICES)
def test_debug_names_wrong_indices(change, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**make_case(Shape()), "scale": 1.0, "max_query_len": 64, "debug": True} | change)
