"""quantized_grouped_dot on CPU: against int64 and float64, with the bits of quantized_dot, in any block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize, quantized_grouped_dot
from pallas_kernels.quantized_dot.weight import TilesWeight, quantize_plain
from pallas_kernels.quantized_grouped_dot import cpu
from tests.kernels.integer_matmul import oracle, product, quantize_in_program
from tests.support.device_arrays import device_array

CPU = jax.devices("cpu")[0]


@pytest.fixture(scope="module", autouse=True)
def _native():
    """Skip the module where the native kernel cannot run."""
    x, numbers = (jax.ShapeDtypeStruct((1, rows, 64), jnp.float32) for rows in (8, 16))
    reason = cpu.refuse(CPU, x, jax.eval_shape(functools.partial(quantize, bits=8), numbers))
    if reason is not None:
        pytest.skip(reason)


matrix_of = jax.jit(lambda weight, index: weight.matrix(index))


@functools.cache
def grouped_product(implementation=None):
    """quantized_grouped_dot in a program of (x, weight, matrix_of_block, num_blocks, rows_of_block)."""
    return jax.jit(
        lambda x, weight, of_block, used, counts: quantized_grouped_dot(
            x, weight, of_block, used, rows_of_block=counts, implementation=implementation
        )
    )


def arrays(blocks, rows, inputs, matrices, outputs, bits, group, dtype):
    rng = np.random.default_rng(blocks + inputs)
    x, numbers = rng.standard_normal((blocks, rows, inputs)), rng.standard_normal((matrices, outputs, inputs))
    return device_array(x, dtype), quantize_in_program(device_array(numbers, dtype), bits, group)


# blocks, rows, inputs, matrices, outputs, bits, group, matrix of each block, rows of each block, blocks used, dtype,
# and True if XLA's operations, which compile slowly, are compared too
CASES = [
    (1, 8, 64, 2, 16, 8, None, [1], [1], 1, "float32", True),
    (4, 8, 96, 3, 48, 4, 48, [2, 2, 0, 1], [8, 5, 8, 8], 3, "bfloat16", True),
    (5, 16, 128, 4, 80, 8, 32, [0, 0, 0, 3, 3], [16, 16, 3, 16, 1], 5, "float32", False),
    (3, 64, 256, 2, 160, 4, 64, [1, 0, 0], [64, 0, 9], 3, "float32", False),  # a block without rows
    (2, 8, 704, 2, 32, 4, 64, [9, -1], [8, 99], 2, "bfloat16", True),  # out of range: clipped
]


@pytest.mark.codegen
@pytest.mark.parametrize("case", CASES)
def test_each_row_is_a_row_of_quantized_dot(case):
    blocks, rows, inputs, matrices, outputs, bits, group, of_block, counts, used, dtype, has_xla = case
    x, weight = arrays(blocks, rows, inputs, matrices, outputs, bits, group, dtype)
    given = (np.array(of_block, np.int32), np.int32(used), np.array(counts, np.int32))
    names = ("cpu", "xla") if has_xla else ("cpu",)
    found = {name: np.asarray(grouped_product(name)(x, weight, *given)) for name in names}
    x, limit = np.asarray(x), 2e-6 if dtype == "float32" else 4e-3
    for block in range(used):
        matrix = matrix_of(weight, np.int32(min(max(of_block[block], 0), matrices - 1)))
        expected, count = oracle(x[block], matrix), min(max(counts[block], 0), rows)
        plain = np.asarray(product("cpu")(x[block], matrix, np.int32(rows)))
        for out in found.values():
            np.testing.assert_array_equal(out[block, :count], plain[:count])
        error = np.abs(found["cpu"][block, :count].astype(np.float64) - expected[:count])
        assert error.max(initial=0) <= limit * np.abs(expected).max()
        assert not found["cpu"][block, count:].any()
    assert not found["cpu"][used:].any()


@pytest.mark.codegen
@pytest.mark.parametrize("kind", ["zeros", "mins", "order", "fp4"])
def test_all_kinds_of_tiles(kind):
    rng = np.random.default_rng(3)
    x, weight = arrays(3, 8, 128, 3, 32, 8 if kind == "mins" else 4, 32, "float32")
    if kind == "mins":
        mins = device_array(rng.uniform(0, 3, weight.scales.shape), "float32")
        weight = dataclasses.replace(weight, zeros=None, mins=mins)
    elif kind == "order":
        weight = dataclasses.replace(weight, order=device_array(rng.permutation(128), "int32"))
    elif kind == "fp4":
        numbers, codes = rng.standard_normal((3, 32, 128)).astype(np.float32), rng.integers(0, 16, (3, 32, 128))

        def fp4_tiles(numbers, codes):
            return TilesWeight.of(dataclasses.replace(quantize_plain(numbers, "int8", 32), codes=codes, kind="fp4"))

        weight = jax.jit(fp4_tiles)(numbers, codes.astype(np.uint8))
    given = (np.array([2, 0, 1], np.int32), np.int32(3), np.full(3, 8, np.int32))
    ours, xla = (np.asarray(grouped_product(name)(x, weight, *given)) for name in ("cpu", "xla"))
    np.testing.assert_array_equal(ours, xla)
    sorted_x = np.asarray(x) if weight.order is None else np.asarray(x)[..., np.asarray(weight.order)]
    for block, index in enumerate((2, 0, 1)):
        expected = oracle(sorted_x[block], matrix_of(weight, np.int32(index)))
        np.testing.assert_allclose(ours[block], expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.codegen
def test_many_threads_and_rows_give_the_same_bits():
    """Units of many runs are shared; a row alone has the bits that it has in its block."""
    x, weight = arrays(12, 16, 512, 6, 256, 4, 64, "float32")
    x, of_block, call = np.asarray(x), np.repeat(np.arange(6, dtype=np.int32), 2), grouped_product()
    whole = np.asarray(call(x, weight, of_block, np.int32(12), np.full(12, 16, np.int32)))
    for block, row in ((0, 0), (7, 5), (11, 15)):
        alone = call(
            np.tile(x[block, row], (1, 8, 1)), weight, of_block[block : block + 1], np.int32(1), np.ones(1, np.int32)
        )
        np.testing.assert_array_equal(np.asarray(alone)[0, 0], whole[block, row])


def test_refused():
    x, weight = arrays(1, 8, 64, 2, 16, 8, None, "float32")
    with pytest.raises(ValueError, match="must be one of reference, xla, cpu, triton"):
        quantized_grouped_dot(x, weight, jnp.zeros(1, jnp.int32), jnp.int32(1), implementation="gpu")
    half = jnp.zeros((1, 8, 64), jnp.float16)
    with pytest.raises(ValueError, match="it multiplies bfloat16 or float32, not float16"):
        quantized_grouped_dot(half, weight, jnp.zeros(1, jnp.int32), jnp.int32(1), implementation="cpu")
