"""quantized_grouped_dot on CPU: against int64 and float64, with the bits of quantized_dot, in any block."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize, quantized_dot, quantized_grouped_dot
from pallas_kernels.quantized_dot.weight import quantize_plain, to_tiles
from pallas_kernels.quantized_grouped_dot import cpu
from tests.kernels.integer_matmul import oracle

CPU = jax.devices("cpu")[0]


@pytest.fixture(scope="module", autouse=True)
def _native():
    """Skip the module where the native kernel cannot run."""
    reason = cpu.refuse(CPU, jnp.zeros((1, 8, 64)), quantize(jnp.ones((1, 16, 64)), 8))
    if reason is not None:
        pytest.skip(reason)


def arrays(blocks, rows, inputs, matrices, outputs, bits, group, dtype):
    rng = np.random.default_rng(blocks + inputs)
    x, numbers = rng.standard_normal((blocks, rows, inputs)), rng.standard_normal((matrices, outputs, inputs))
    return jnp.asarray(x, dtype), quantize(jnp.asarray(numbers, dtype), bits, group)


# blocks, rows, inputs, matrices, outputs, bits, group, matrix of each block, rows of each block, blocks used, dtype,
# and True if XLA's operations, which compile slowly, are compared too
CASES = [
    (1, 8, 64, 2, 16, 8, None, [1], [1], 1, "float32", True),
    (4, 8, 96, 3, 48, 4, 48, [2, 2, 0, 1], [8, 5, 8, 8], 3, "bfloat16", True),
    (5, 16, 128, 4, 80, 8, 32, [0, 0, 0, 3, 3], [16, 16, 3, 16, 1], 5, "float32", False),
    (3, 64, 256, 2, 160, 4, 64, [1, 0, 0], [64, 0, 9], 3, "float32", False),  # a block without rows
    (2, 8, 704, 2, 32, 4, 64, [9, -1], [8, 99], 2, "bfloat16", True),  # out of range: clipped
]


@pytest.mark.parametrize("case", CASES)
def test_each_row_is_a_row_of_quantized_dot(case):
    blocks, rows, inputs, matrices, outputs, bits, group, of_block, counts, used, dtype, has_xla = case
    x, weight = arrays(blocks, rows, inputs, matrices, outputs, bits, group, dtype)
    given = (jnp.asarray(of_block, jnp.int32), jnp.int32(used))
    found = {
        name: np.asarray(
            quantized_grouped_dot(
                x, weight, *given, rows_of_block=jnp.asarray(counts, jnp.int32), implementation=name
            )
        )
        for name in ("cpu", *(("xla",) if has_xla else ()))
    }
    limit = 2e-6 if dtype == "float32" else 4e-3
    for block in range(used):
        matrix = weight.matrix(min(max(of_block[block], 0), matrices - 1))
        expected, count = oracle(x[block], matrix), min(max(counts[block], 0), rows)
        plain = np.asarray(quantized_dot(x[block], matrix, rows, implementation="cpu"))
        for out in found.values():
            np.testing.assert_array_equal(out[block, :count], plain[:count])
        error = np.abs(found["cpu"][block, :count].astype(np.float64) - expected[:count])
        assert error.max(initial=0) <= limit * np.abs(expected).max()
        assert not found["cpu"][block, count:].any()
    assert not found["cpu"][used:].any()


@pytest.mark.parametrize("kind", ["zeros", "mins", "order", "fp4"])
def test_all_kinds_of_tiles(kind):
    rng = np.random.default_rng(3)
    x, weight = arrays(3, 8, 128, 3, 32, 8 if kind == "mins" else 4, 32, "float32")
    if kind == "mins":
        mins = jnp.asarray(rng.uniform(0, 3, weight.scales.shape), jnp.float32)
        weight = dataclasses.replace(weight, zeros=None, mins=mins)
    elif kind == "order":
        weight = dataclasses.replace(weight, order=jnp.asarray(rng.permutation(128), jnp.int32))
    elif kind == "fp4":
        plain = quantize_plain(jnp.asarray(rng.standard_normal((3, 32, 128)), jnp.float32), "int8", 32)
        codes = jnp.asarray(rng.integers(0, 16, (3, 32, 128)), jnp.uint8)
        weight = to_tiles(dataclasses.replace(plain, codes=codes, kind="fp4"))
    of_block = jnp.asarray([2, 0, 1], jnp.int32)
    ours, xla = (
        np.asarray(quantized_grouped_dot(x, weight, of_block, jnp.int32(3), implementation=name))
        for name in ("cpu", "xla")
    )
    np.testing.assert_array_equal(ours, xla)
    sorted_x = x if weight.order is None else x[..., weight.order]
    for block, index in enumerate((2, 0, 1)):
        expected = oracle(sorted_x[block], weight.matrix(index))
        np.testing.assert_allclose(ours[block], expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


def test_many_threads_and_rows_give_the_same_bits():
    """Units of many runs are shared; a row alone has the bits that it has in its block."""
    x, weight = arrays(12, 16, 512, 6, 256, 4, 64, "float32")
    of_block = jnp.asarray(np.repeat(np.arange(6), 2), jnp.int32)
    whole = np.asarray(jax.jit(quantized_grouped_dot)(x, weight, of_block, jnp.int32(12)))
    for block, row in ((0, 0), (7, 5), (11, 15)):
        alone = quantized_grouped_dot(
            jnp.tile(x[block, row], (1, 8, 1)), weight, of_block[block : block + 1], jnp.int32(1),
            rows_of_block=jnp.ones(1, jnp.int32),
        )  # fmt: skip
        np.testing.assert_array_equal(np.asarray(alone)[0, 0], whole[block, row])


def test_refused():
    x, weight = arrays(1, 8, 64, 2, 16, 8, None, "float32")
    with pytest.raises(ValueError, match="must be one of reference, xla, cpu, triton"):
        quantized_grouped_dot(x, weight, jnp.zeros(1, jnp.int32), jnp.int32(1), implementation="gpu")
    half = jnp.zeros((1, 8, 64), jnp.float16)
    with pytest.raises(ValueError, match="it multiplies bfloat16 or float32, not float16"):
        quantized_grouped_dot(half, weight, jnp.zeros(1, jnp.int32), jnp.int32(1), implementation="cpu")
