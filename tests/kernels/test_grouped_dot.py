"""grouped_dot: every implementation against float64, and lowered for accelerators with real models' shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dot, grouped_dot
from pallas_kernels.grouped_dot import IMPLEMENTATIONS, cpu
from tests.kernels.lowering import lower_for
from tests.support.device_arrays import device_array

pytestmark = pytest.mark.codegen

# blocks, rows, in, out, matrices, used blocks: sizes that are not multiples of the tiles, and unused blocks
SHAPES = {"small": (5, 8, 96, 40, 3, 4), "tiles": (4, 16, 256, 200, 4, 4), "one": (3, 8, 32, 16, 2, 1)}


def inputs(shape, dtype=np.float32):
    blocks, rows, width, out, matrices, used = SHAPES[shape]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((blocks, rows, width)).astype(np.float32)
    weights = rng.standard_normal((matrices, out, width)).astype(np.float32)
    matrix = np.sort(rng.integers(0, matrices, blocks)).astype(np.int32)
    return device_array(x, dtype), device_array(weights, dtype), matrix, np.int32(used)


@functools.cache
def product(implementation):
    """grouped_dot in a program."""
    return jax.jit(functools.partial(grouped_dot, implementation=implementation))


def skip_refused(implementation, x):
    """Skip a test of the native kernel where it cannot run."""
    reason = cpu.refuse(jax.devices("cpu")[0], x) if implementation == "cpu" else None
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("small", "float32"), ("one", "float32"), ("tiles", "bfloat16"),
        *(pytest.param(*c, marks=pytest.mark.slow)
          for c in (("small", "bfloat16"), ("one", "bfloat16"), ("tiles", "float32"))),
    ],
)  # fmt: skip
def test_matches_float64(implementation, shape, dtype):
    x, weights, matrix, used = inputs(shape, dtype)
    skip_refused(implementation, x)
    x = np.array(x)
    x[used:] = np.nan  # unused blocks must not change used ones
    got = product(implementation)(x, weights, matrix, used)
    wide = [np.asarray(a).astype(np.float64) for a in (x, weights)]
    want = np.einsum("bri,boi->bro", wide[0], wide[1][matrix])
    assert got.dtype == x.dtype
    atol, rtol = (1e-4, 1e-5) if dtype == "float32" else (0.05, 0.005)  # results are rounded to 8 bits
    np.testing.assert_allclose(np.asarray(got).astype(np.float32)[:used], want[:used], rtol, atol)


@pytest.mark.parametrize("implementation", ["xla_loop", "cpu"])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_bits_of_a_row_do_not_depend_on_the_rows_of_its_block(rows, implementation):
    """Decodes and prefills have blocks of different sizes, and give the same bits."""
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((3, 192, 256)).astype(np.float32)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    skip_refused(implementation, x)
    call = product(implementation)
    large = np.asarray(call(x[None], weights, np.array([2], np.int32), np.int32(1)))[0]
    small = call(x.reshape(-1, 8, 256), weights, np.full(rows // 8, 2, np.int32), np.int32(rows // 8))
    np.testing.assert_array_equal(large, np.asarray(small).reshape(rows, -1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_rows_have_the_bits_of_dot_in_any_company(dtype):
    """Matrices of one row to several blocks, rows that are not needed, and matrices that come back later."""
    rng = np.random.default_rng(2)
    x = np.asarray(device_array(rng.standard_normal((9, 8, 192)), dtype))
    skip_refused("cpu", x)
    weights = np.asarray(device_array(rng.standard_normal((5, 131, 192)), dtype))
    matrices = np.array([3, 3, 3, 0, 1, 1, 3, 2, 4], np.int32)
    counts = np.array([8, 8, 3, 1, 8, 5, 8, 0, 8], np.int32)
    out = np.asarray(product("cpu")(x, weights, matrices, np.int32(8), rows_of_block=counts))
    plain = jax.jit(functools.partial(dot, implementation="cpu"))
    for block, (matrix, count) in enumerate(zip(matrices, counts, strict=True)):
        needed = count if block < 8 else 0
        expected = np.asarray(plain(x[block], weights[matrix], np.int32(8)))
        np.testing.assert_array_equal(out[block, :needed], expected[:needed])
        assert not out[block, needed:].any()


def test_native_indices_out_of_range_are_clipped():
    x, weights, matrix, _ = inputs("small")
    skip_refused("cpu", x)
    call = functools.partial(product("cpu"), x, weights)
    clipped = call(np.array([0, 2, 2, 0, 1], np.int32), np.int32(5), rows_of_block=np.array([8, 8, 0, 0, 8], np.int32))
    wild = call(np.array([-7, 2**30, 2, 0, 1], np.int32), np.int32(99), rows_of_block=np.array([9, 2**30, -1, 0, 8]))
    np.testing.assert_array_equal(wild, clipped)
    assert not np.asarray(call(matrix, np.int32(-3))).any()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_kernels_lower(platform, dtype, rows):
    """Shapes of Qwen3-30B-A3B and of gpt-oss, whose width of 2,880 is not a power of two."""
    for matrices, out, width in ((128, 1536, 2048), (32, 5760, 2880)):
        shapes = [(40, rows, width), (matrices, out, width)]
        call = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
        call += [jax.ShapeDtypeStruct((40,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)]
        text = lower_for(platform, grouped_dot, call)
        assert text.count("custom_call @__gpu$xla.gpu.triton" if platform == "cuda" else "@tpu_custom_call") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.zeros((5, 96), np.float32)}, r"x \(5, 96\): must be"),
        ({1: np.zeros((3, 40, 95), np.float32)}, r"weights \(3, 40, 95\) of float32: must be \[matrices, out, 96\]"),
        ({1: np.zeros((3, 40, 96), jnp.bfloat16)}, "of bfloat16: must be .* of float32"),
        ({2: np.zeros(4, np.int32)}, r"matrix_of_block \(4,\): must be \[5\]"),
        ({4: np.zeros(4, np.int32)}, r"rows_of_block \(4,\): must be \[5\]"),
        ({4: np.zeros(5, np.float32)}, "rows_of_block of float32: must be int32"),
        ({2: np.zeros(5, np.float32)}, "matrix_of_block of float32: must be int32"),
    ],
)
def test_refuses(plain_errors, change, message):
    call = [change.get(i, value) for i, value in enumerate(inputs("small"))]
    with pytest.raises(ValueError, match=message):
        grouped_dot(*call, rows_of_block=change.get(4))


def test_the_native_kernel_refuses_other_rows():
    x, weights, matrix, used = map(np.asarray, inputs("small"))
    skip_refused("cpu", x)
    for given, message in ((x.astype(np.float16), "multiplies bfloat16 or float32"), (x[..., :90], "not a multiple")):
        call = (given, weights[..., : given.shape[2]].astype(given.dtype), matrix, used)
        with pytest.raises(ValueError, match=f"implementation='cpu' cannot take this: .*{message}"):
            product("cpu")(*call)
        out = product(None)(*call)  # by XLA
        assert out.shape == (5, 8, 40)
