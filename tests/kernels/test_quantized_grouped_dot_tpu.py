"""quantized_grouped_dot for TPU: numbers in interpret mode against float64, and programs compiled for a v5e."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantized_grouped_dot
from pallas_kernels.quantized_grouped_dot import mosaic_tpu
from tests.kernels.quantized_cases import BLOCKS, Case, in_tpu_layout, numbers_of, shapes_of, x_blocks_of
from tests.support.deviceless import V5E, compile_for_v5e, deviceless

CPU = jax.devices("cpu")[0]
KINDS = [
    (8, Case("int4", 256, 64, zeros=True, matrices=4, outputs=128)),
    pytest.param(24, Case("int4", 256, 128, matrices=4, outputs=256), marks=pytest.mark.slow),
    pytest.param(16, Case("int4", 128, 32, mins=True, outer=1, scales="uint8", matrices=4, outputs=128),
                 marks=pytest.mark.slow),
    (8, Case("int8", 256, matrices=4, outputs=128)),
    pytest.param(64, Case("int8", 256, 64, matrices=4, outputs=384), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "case"), KINDS, ids=str)
def test_matches_float64(rows, case):
    """Unused blocks change nothing. Matrices come in any order, and one is in no block."""
    matrices, used = BLOCKS
    x, plain = x_blocks_of(rows, case), case.drawn()
    weight = in_tpu_layout(plain)
    assert mosaic_tpu.refuse(CPU, x, weight) is None
    expected = np.einsum("bri,boi->bro", np.asarray(x).astype(np.float64), numbers_of(plain)[matrices])[:used]
    x = np.array(x)
    x[used:] = np.nan
    kernel = functools.partial(mosaic_tpu.quantized_grouped_dot, interpret=True)
    for call in (kernel, quantized_grouped_dot, functools.partial(quantized_grouped_dot, implementation="reference")):
        got = jax.jit(call)(x, weight, matrices, used)
        assert got.dtype == x.dtype
        atol = np.abs(expected).max() * 2**-7  # the result is rounded to 8 bits. XLA rounds the weights as well
        np.testing.assert_allclose(np.asarray(got).astype(np.float64)[:used], expected, rtol=0, atol=atol)


@pytest.mark.codegen
def test_bits_of_a_row_do_not_depend_on_the_other_rows():
    case = Case("int4", 256, 64, zeros=True, matrices=4, outputs=128)
    x, weight = x_blocks_of(8, case), in_tpu_layout(case.drawn())
    call = jax.jit(functools.partial(mosaic_tpu.quantized_grouped_dot, interpret=True))
    whole = np.asarray(call(x, weight, *BLOCKS))
    x = np.asarray(x)
    company = np.full_like(x, np.nan)
    company[1, 3:5] = x[1, 3:5]
    moved = np.asarray(call(company[::-1], weight, np.array([0, 1, 3, 2, 2], np.int32), np.int32(5)))
    np.testing.assert_array_equal(moved[3, 3:5], whole[1, 3:5])


def test_refused():
    x, device = jax.ShapeDtypeStruct((2, 8, 256), jnp.bfloat16), CPU
    small = shapes_of(Case("int4", 256, 64, zeros=True, matrices=4, outputs=96))
    assert "96 outputs of a matrix: must be a multiple of 128" in mosaic_tpu.refuse(device, x, small)
    weight = shapes_of(Case("int4", 256, 16, zeros=True, matrices=4, outputs=128))
    many, wide = (jax.ShapeDtypeStruct((2, rows, 256), jnp.float32) for rows in (256, 8))
    assert "256 rows in a block: must be at most 128" in mosaic_tpu.refuse(device, many, weight)
    assert "lanes" in mosaic_tpu.refuse(device, x, Case("int4", 256, 64, matrices=4, outputs=128).shapes())
    assert "float32" in mosaic_tpu.refuse(device, wide, weight)


@deviceless(V5E)
@pytest.mark.parametrize(("rows", "case"), [
    (16, Case("int4", 2048, 64, zeros=True, matrices=8, outputs=1536)),   # gate and up of Qwen3 30B A3B
    (64, Case("int4", 768, 128, matrices=8, outputs=2048)),               # down
    (16, Case("int8", 2048, matrices=8, outputs=1536)),
])  # fmt: skip
def test_compiles_for_v5e(rows, case):
    """The codes are read in their bits: no array of numbers as large as a matrix is made."""
    x = jax.ShapeDtypeStruct((10, rows, case.inputs), jnp.bfloat16)  # less than a matrix, and so is the result
    weight = jax.eval_shape(lambda: in_tpu_layout(case.drawn()))
    scalars = jax.ShapeDtypeStruct((10,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_for_v5e(quantized_grouped_dot, (x, weight, *scalars))
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    numbers = case.outputs * case.inputs
    for shape in re.findall(r"= (?:bf16|f32)\[([\d,]+)\]", text):
        assert np.prod([int(size) for size in shape.split(",")]) < numbers
    assert compiled.memory_analysis().temp_size_in_bytes < numbers // 2
