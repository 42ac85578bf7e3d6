"""Native CPU kernels against float64, over drawn shapes, lengths, options and dtypes. Stale slots hold NaN."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import KVPages, dot, grouped_dot, paged_attention, write_qkv
from pallas_kernels.native import library
from pallas_kernels.paged_attention import cpu
from tests.kernels.oracle import TOLERANCE, Shape, expected, make_case, numpy_qkv, slot_values
from tests.support.device_arrays import device_array

pytestmark = pytest.mark.skipif(library.native(cpu.KERNEL).name is None, reason="native kernels cannot run here")

EXAMPLES = [20, pytest.param(60, marks=pytest.mark.slow)]  # each example compiles a program
# A number above 1 is rounded relative to its size.
STORED = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def product_limit():
    """Largest error of a product, in its standard deviations. A chain of sums is twice as long without AVX-512."""
    return 1e-6 if "avx512f" in library.processor().features else 2e-6


@st.composite
def attention_calls(draw):
    """A shape with any options, and its rows of (tokens, keys)."""
    kv_heads, latent = draw(st.integers(1, 4)), draw(st.integers(0, 5)) == 0
    head_dim = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 96, 128, 192, 256])))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    rows = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 260)), min_size=1, max_size=6))
    rows = [(tokens, tokens + past if tokens else 0) for tokens, past in rows]
    block_size = draw(st.sampled_from([1, 3, 8, 16, 32, 48]))
    options = {
        "window": draw(st.none() | st.integers(1, 150)), "softcap": draw(st.none() | st.floats(0.5, 30)),
        "sinks": draw(st.booleans()), "slopes": draw(st.booleans()),
    }  # fmt: skip
    if latent:
        options |= {"v_dim": draw(st.integers(1, head_dim))}
    else:
        options |= {"kv_dtype": draw(st.sampled_from([None, None, "int8", "float8_e4m3fn"]))}
    width = 300 // block_size + 1
    shape = Shape(
        heads=kv_heads * draw(st.integers(1, 9)), kv_heads=1 if latent else kv_heads, head_dim=head_dim, dtype=dtype,
        block_size=block_size, width=width, num_blocks=width * len(rows) + 1, rows=len(rows),
        tokens=max(1, sum(tokens for tokens, _ in rows)), **options,
    )  # fmt: skip
    return shape, tuple(rows)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_attention_of_drawn_calls(examples):
    @settings(max_examples=examples)
    @given(call=attention_calls(), seed=st.integers(0, 2**16))
    def drawn(call, seed):
        shape, rows = call
        case = make_case(shape, rows, seed=seed)
        arrays = {name: a for name, a in shape.options.items() if isinstance(a, np.ndarray)}
        others = {name: value for name, value in shape.options.items() if name not in arrays}
        longest = max(1, *(tokens for tokens, _ in rows))
        call = functools.partial(paged_attention, **others, max_query_len=longest, implementation="cpu")
        out = jax.jit(call)(**case, **arrays)
        wanted = expected(shape, case)
        out = np.asarray(out, np.float64)[: len(wanted)]
        scale = max(1.0, np.abs(wanted).max(initial=0))  # the scales of 8-bit pages make values larger than 1
        np.testing.assert_allclose(out, wanted, atol=TOLERANCE[shape.dtype] * scale, rtol=0)

    drawn()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_products_of_drawn_shapes(examples):
    """Padding rows of NaN change nothing."""

    @settings(max_examples=examples)
    @given(
        rows=st.integers(1, 90), inputs=st.integers(1, 40), outputs=st.integers(1, 200), padding=st.integers(0, 9),
        dtype=st.sampled_from(["float32", "bfloat16"]), result=st.sampled_from(["float32", "bfloat16"]),
        seed=st.integers(0, 2**16),
    )  # fmt: skip
    def drawn(rows, inputs, outputs, padding, dtype, result, seed):
        rng = np.random.default_rng(seed)
        x, weight = (rng.standard_normal((count, 32 * inputs)) for count in (rows + padding, outputs))
        x[rows:] = np.nan
        x, weight = device_array(x, dtype), device_array(weight, dtype)
        call = jax.jit(functools.partial(dot, dtype=result, implementation="cpu"))
        out = np.asarray(call(x, weight, np.int32(rows)), np.float64)
        wanted = np.asarray(x, np.float64)[:rows] @ np.asarray(weight, np.float64).T
        limit = product_limit() * np.sqrt(32 * inputs)  # the root is the standard deviation of a result
        np.testing.assert_allclose(out[:rows], wanted, atol=limit, rtol=4e-3 if result == "bfloat16" else 0)
        assert not out[rows:].any()

    drawn()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_grouped_products_of_drawn_blocks(examples):
    """Rows that are not needed, and blocks that are not used, are NaN and change nothing."""

    @settings(max_examples=examples)
    @given(
        # matrix and number of needed rows of each block
        blocks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 16)), min_size=1, max_size=9),
        used=st.integers(0, 9), inputs=st.integers(1, 12), outputs=st.integers(1, 200),
        dtype=st.sampled_from(["float32", "bfloat16"]), seed=st.integers(0, 2**16),
    )  # fmt: skip
    def drawn(blocks, used, inputs, outputs, dtype, seed):
        rng = np.random.default_rng(seed)
        matrices, counts = np.array(blocks, np.int32).T
        needed = (np.arange(16) < counts[:, None]) & (np.arange(len(blocks)) < used)[:, None]
        x = np.where(needed[:, :, None], rng.standard_normal((len(blocks), 16, 32 * inputs)), np.nan)
        x, weights = device_array(x, dtype), device_array(rng.standard_normal((4, outputs, 32 * inputs)), dtype)
        call = jax.jit(functools.partial(grouped_dot, implementation="cpu"))
        out = call(x, weights, matrices, np.int32(used), rows_of_block=counts)
        wanted = np.einsum("bri,boi->bro", np.asarray(x, np.float64), np.asarray(weights, np.float64)[matrices])
        out, spread = np.asarray(out, np.float64), np.sqrt(32 * inputs)
        rounding = 4e-3 if dtype == "bfloat16" else 0
        np.testing.assert_allclose(out[needed], wanted[needed], atol=product_limit() * spread, rtol=rounding)
        assert not out[~needed].any()

    drawn()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_writes_of_drawn_shapes(examples):
    """Slots that are not written keep their NaN."""

    @settings(max_examples=examples)
    @given(
        tokens=st.integers(1, 70), heads=st.integers(1, 4), q_per_kv=st.integers(1, 5), dim=st.integers(1, 140),
        block_size=st.sampled_from([1, 8, 16]), options=st.sets(st.sampled_from(["bias", "norm", "rotation"])),
        dtype=st.sampled_from(list(STORED)), pages=st.sampled_from(list(STORED)), seed=st.integers(0, 2**16),
    )  # fmt: skip
    def drawn(tokens, heads, q_per_kv, dim, block_size, options, dtype, pages, seed):
        rng = np.random.default_rng(seed)
        half = int(rng.integers(1, dim // 2 + 1)) if "rotation" in options and dim > 1 else 0
        shape = (heads, q_per_kv + 2, dim)
        qkv, bias = rng.standard_normal((tokens, *shape)), rng.standard_normal(shape)
        norms, angles = rng.uniform(0.5, 2, (2, dim)), rng.uniform(0, 6, (tokens, half))
        given = {"cos": np.cos(angles), "sin": np.sin(angles)} if half else {}
        if "bias" in options:
            given["bias"] = bias
        if "norm" in options:
            given |= {"q_norm": norms[0], "k_norm": norms[1]}
        arrays = {name: device_array(a, "float32" if name in ("cos", "sin") else dtype) for name, a in given.items()}
        qkv, blocks = device_array(qkv, dtype), tokens // block_size + 2
        slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int32)
        slots[rng.random(tokens) < 0.2] = -1
        stale = KVPages(device_array(np.full((blocks, 2, heads, block_size, dim), np.nan), pages))
        q, written = jax.jit(functools.partial(write_qkv, implementation="cpu"))(stale, qkv, slots, **arrays)
        wanted_q, k, v = numpy_qkv(qkv, **{name: np.asarray(array, np.float64) for name, array in arrays.items()})
        values, real = slot_values(written), slots >= 0
        rounding = STORED[dtype] + STORED[pages]
        np.testing.assert_allclose(np.asarray(q, np.float64)[real], wanted_q[real], atol=rounding, rtol=rounding)
        np.testing.assert_allclose(values[slots[real], 0], k[real], atol=rounding, rtol=rounding)
        np.testing.assert_allclose(values[slots[real], 1], v[real], atol=rounding, rtol=rounding)
        assert np.isnan(values[np.setdiff1d(np.arange(len(values)), slots[real])]).all()

    drawn()
