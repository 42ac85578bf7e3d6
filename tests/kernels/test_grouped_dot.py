"""grouped_dot: every implementation against float64, and lowered for accelerators with real models' shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_dot
from pallas_kernels.grouped_dot import IMPLEMENTATIONS
from tests.kernels.test_lowering import lower_for

pytestmark = pytest.mark.codegen

# blocks, rows, in, out, matrices, used blocks: sizes that are not multiples of the tiles, and unused blocks
SHAPES = {"small": (5, 8, 72, 40, 3, 4), "tiles": (4, 16, 256, 200, 4, 4), "one": (3, 8, 16, 16, 2, 1)}


def inputs(shape, dtype=np.float32):
    blocks, rows, width, out, matrices, used = SHAPES[shape]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((blocks, rows, width)).astype(np.float32)
    weights = rng.standard_normal((matrices, out, width)).astype(np.float32)
    matrix = np.sort(rng.integers(0, matrices, blocks)).astype(np.int32)
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype), matrix, np.int32(used)


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
    x = x.at[used:].set(jnp.nan)  # unused blocks must not change used ones
    got = jax.jit(functools.partial(grouped_dot, implementation=implementation))(x, weights, matrix, used)
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weights)]
    want = np.einsum("bri,boi->bro", wide[0], wide[1][matrix])
    assert got.dtype == x.dtype
    atol, rtol = (1e-4, 1e-5) if dtype == "float32" else (0.05, 0.005)  # results are rounded to 8 bits
    np.testing.assert_allclose(np.asarray(got.astype(jnp.float32))[:used], want[:used], rtol, atol)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_bits_of_a_row_do_not_depend_on_the_rows_of_its_block(rows):
    """Decodes and prefills have blocks of different sizes, and give the same bits."""
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.standard_normal((3, 192, 256)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((rows, 256)), jnp.float32)
    call = jax.jit(functools.partial(grouped_dot, implementation="xla_loop"))
    large = call(x[None], weights, np.array([2], np.int32), np.int32(1))[0]
    small = call(x.reshape(-1, 8, 256), weights, np.full(rows // 8, 2, np.int32), np.int32(rows // 8))
    np.testing.assert_array_equal(large, small.reshape(rows, -1))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [16, 64])
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
        ({0: jnp.zeros((5, 72))}, r"x \(5, 72\): must be"),
        ({1: jnp.zeros((3, 40, 71))}, r"weights \(3, 40, 71\) of float32: must be \[matrices, out, 72\]"),
        ({1: jnp.zeros((3, 40, 72), jnp.bfloat16)}, "of bfloat16: must be .* of float32"),
        ({2: jnp.zeros(4, jnp.int32)}, r"matrix_of_block \(4,\): must be \[5\]"),
        ({2: jnp.zeros(5)}, "matrix_of_block of float32: must be int32"),
    ],
)
def test_refuses(plain_errors, change, message):
    call = [change.get(i, value) for i, value in enumerate(inputs("small"))]
    with pytest.raises(ValueError, match=message):
        grouped_dot(*call)
