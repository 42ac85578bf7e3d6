"""quantized_grouped_dot: every implementation against float64, and the kernel compiled for an H200."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runtime.targets import TARGETS
from pallas_kernels import quantized_grouped_dot
from pallas_kernels.quantized_dot.tiling import Tiling
from pallas_kernels.quantized_grouped_dot import triton
from tests.kernels.lowering import lower_for
from tests.kernels.machine_code import compile_for, kernels_of, tool
from tests.kernels.quantized_cases import BLOCKS, Case, numbers_of, rounded_to_fp8, rows_of, x_blocks_of
from tests.support.deviceless import H200, deviceless

pytestmark = pytest.mark.codegen

KINDS = [
    # rows of a block; outputs and inputs that are not multiples of the tiles
    (8, Case("int4", 192, 64, zeros=True, matrices=4)),
    (24, Case("fp8", 256, 128, scales="float32", activations="fp8", matrices=4)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (8, Case("int8", 50, matrices=4)),
        (16, Case("fp4", 64, 16, scales="float8_e4m3fn", outer=1, dtype="float16", matrices=4)),  # NVFP4
        (16, Case("fp8", 256, 128, scales="float32", dtype="float16", matrices=4)),
        (24, Case("fp4", 64, 32, matrices=4)),  # MXFP4
        (16, Case("fp4", 64, 16, scales="float8_e4m3fn", outer=1, matrices=4)),
        (8, Case("int4", 256, 128, matrices=4)), (8, Case("int8", 192, 64, matrices=4)),
        (16, Case("int4", 128, 32, mins=True, outer=1, scales="uint8", matrices=4)),
        (24, Case("fp4", 64, 16, scales="float8_e4m3fn", outer=1, divides=True, matrices=4)),
        (8, Case("fp8", 96, activations="fp8", matrices=4)),
    )),
]  # fmt: skip


def kernel(case):
    """The kernel in interpret mode, with small tiles: two of rows for more than 16."""
    tiling = Tiling(16, 32, 128 if case.group in (None, 128) else 64)
    return functools.partial(triton.quantized_grouped_dot, tiling=tiling, interpret=True)


@pytest.mark.parametrize(("rows", "case"), KINDS, ids=str)
def test_matches_float64(rows, case):
    """Unused blocks change nothing. Matrices come in any order, and one is in no block."""
    matrices, used = BLOCKS
    x, plain = x_blocks_of(rows, case), case.drawn()
    rows = rounded_to_fp8(x, plain.groups) if case.activations == "fp8" else np.asarray(x).astype(np.float64)
    expected = np.einsum("bri,boi->bro", rows, numbers_of(plain)[matrices])[:used]
    x, weight = np.array(x), rows_of(plain)
    x[used:] = np.nan
    calls = {name: functools.partial(quantized_grouped_dot, implementation=name) for name in (None, "reference")}
    for name, call in (calls | {"triton": kernel(case)}).items():
        got = jax.jit(call)(x, weight, matrices, used)
        assert got.dtype == x.dtype
        got = np.asarray(got).astype(np.float64)
        # The result is rounded to 8 or 11 bits. XLA rounds the weights as well.
        atol = np.abs(expected).max() * (2**-7 if case.dtype == "bfloat16" else 2**-9)
        np.testing.assert_allclose(got[:used], expected, rtol=0, atol=atol, err_msg=str(name))


def test_bits_of_a_row_do_not_depend_on_the_other_rows():
    """Rows with NaN in the same block and in others, other matrices for the other blocks, and another place."""
    case = Case("int4", 192, 64, zeros=True, matrices=4)
    x, weight, call = x_blocks_of(8, case), rows_of(case.drawn()), jax.jit(kernel(case))
    whole = np.asarray(call(x, weight, *BLOCKS))
    x = np.asarray(x)
    company = np.full_like(x, np.nan)
    company[1, 3:5] = x[1, 3:5]
    moved = np.asarray(call(company[::-1], weight, np.array([0, 1, 3, 2, 2], np.int32), np.int32(5)))
    np.testing.assert_array_equal(moved[3, 3:5], whole[1, 3:5])
    assert np.isnan(moved[3, :3].astype(np.float32)).all()


def test_an_order_of_inputs_and_activations_that_are_not_rounded():
    case = Case("int8", 64, 32, matrices=4)
    x, plain, call = x_blocks_of(8, case), case.drawn(), jax.jit(quantized_grouped_dot)
    order = np.random.default_rng(0).permutation(64).astype(np.int32)
    weight = dataclasses.replace(rows_of(plain), order=order, activations="int8")
    found, expected = call(x, weight, *BLOCKS), call(np.asarray(x)[..., order], rows_of(plain), *BLOCKS)
    np.testing.assert_array_equal(np.asarray(found)[:4], np.asarray(expected)[:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((5, 64), jnp.bfloat16)}, r"x \(5, 64\): must be"),
        ({"x": np.zeros((5, 8, 96), jnp.bfloat16)}, r"weight \(4, 37, 64\) .*: must be \[matrices, ..., 96\]"),
        ({"weight": Case("int4", 64).shapes()}, r"weight \(37, 64\) .*: must be \[matrices"),
        ({"weight": Case("int4", 64, matrices=4).drawn()}, "in the layout plain: must be .* rows, tiles or lanes"),
        ({"matrix_of_block": np.zeros(4, np.int32)}, r"matrix_of_block \(4,\): must be \[5\]"),
        ({"matrix_of_block": np.zeros(5, np.float32)}, "matrix_of_block of float32: must be int32"),
        (
            {"weight": dataclasses.replace(Case("int4", 64, matrices=4).shapes(), activations="fp8")},
            r"weight \(4, 37, 64\): activations=fp8 with weights of int4: must be",
        ),
        ({"implementation": "cuda"}, "must be one of reference, xla, cpu, triton"),
        (
            {"x": np.zeros((5, 8, 64), np.float32), "implementation": "triton"},
            "implementation='triton' cannot take this: x of float32: it multiplies bfloat16 and float16",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("plain_errors")
def test_wrong_arguments_are_named(change, message):
    case = Case("int4", 64, 32, matrices=4)
    matrices, used = BLOCKS
    given = {"x": x_blocks_of(8, case), "weight": rows_of(case.drawn())}
    given |= {"matrix_of_block": matrices, "num_blocks_used": used}
    with pytest.raises(ValueError, match=message):
        quantized_grouped_dot(**given | change)


def call_of(case, blocks, rows):
    """A product, and its arguments."""
    leaves, tree = jax.tree.flatten(case.shapes())
    call = lambda x, m, n, *arrays: quantized_grouped_dot(x, jax.tree.unflatten(tree, arrays), m, n)  # noqa: E731
    x = jax.ShapeDtypeStruct((blocks, rows, case.inputs), jnp.dtype(case.dtype))
    return call, (x, jax.ShapeDtypeStruct((blocks,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32), *leaves)


@pytest.mark.parametrize(
    ("platform", "dtype", "kernels"), [("cuda", "bfloat16", 1), ("cuda", "float32", 0), ("tpu", "bfloat16", 0)]
)
def test_the_kernel_is_chosen_on_its_platform(platform, dtype, kernels):
    text = lower_for(platform, *call_of(Case("fp4", 192, 32, dtype=dtype, matrices=4), 5, 8))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == kernels


QWEN_UP, OSS_UP = {"outputs": 1536, "matrices": 128}, {"outputs": 5760, "matrices": 32}
EXPERTS = [
    # the most instructions of an iteration: Qwen3 30B A3B, and gpt-oss 20B with its width of 2,880
    (330, Case("int4", 2048, 128, **QWEN_UP)), (370, Case("int4", 2048, 64, zeros=True, **QWEN_UP)),
    (460, Case("int8", 2048, **QWEN_UP)), (330, Case("fp8", 2048, 128, scales="float32", **QWEN_UP)),
    (200, Case("fp8", 2048, 128, scales="float32", activations="fp8", **QWEN_UP)),
    (460, Case("fp4", 2880, 32, **OSS_UP)),
    (700, Case("fp4", 2048, 16, scales="float8_e4m3fn", outer=1, **QWEN_UP)),
]  # fmt: skip


@deviceless(H200)
@pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(("most", "case"), EXPERTS, ids=str)
def test_machine_code(most, case, tmp_path):
    """8 rows. Each byte of the codes is copied once, numbers are made in registers, and nothing is spilled."""
    (kernel,) = kernels_of(*call_of(case, 64, 8), tmp_path, only="quantized_grouped_dot").values()
    loop = max(kernel.loops, key=len)
    print(f"{case.kind}: {len(loop)} instructions, {kernel.registers} registers, {kernel.resident_blocks} programs")
    assert (kernel.blocks, kernel.spilled_bytes, kernel.threads) == (64 * case.outputs // 64, 0, 128)
    assert kernel.resident_blocks >= 3
    # bits of a copy are in the instruction's name, if it is not 32
    names = [i.split("[")[0] for i in loop if "LDGSTS" in i]
    copies = [next((size for size in (64, 128) if f".{size}" in name), 32) for name in names]
    code_bytes = 64 * 128 // (2 if case.kind in ("int4", "fp4") else 1)
    x_bytes = 16 * 128 * (1 if case.activations == "fp8" else 2)
    assert sum(copies) // 8 * kernel.threads == code_bytes + x_bytes, copies
    # Triton multiplies fp8 on Hopper as float16
    assert any(("HMMA.16816" if case.activations == "fp8" else "GMMA") in i for i in loop)
    assert len(loop) < most


@deviceless(H200)
@pytest.mark.parametrize(
    ("rows", "case"), [(8, EXPERTS[0][1]), (32, EXPERTS[5][1]), (64, EXPERTS[3][1]), (64, EXPERTS[4][1])], ids=str
)
def test_no_copy_of_a_matrix_is_made(rows, case):
    program = compile_for(H200, *call_of(case, 64, rows))
    assert re.findall(r'name = "(\w+)", num_stages', program.as_text()) == ["quantized_grouped_dot"]
    rounded = 64 * rows * case.inputs * 1.25 if case.activations == "fp8" else 0  # x in fp8, and its scales
    assert program.memory_analysis().temp_size_in_bytes <= 4096 + rounded
    assert not re.search(rf"(f16|bf16|f32)\[[\d,]*{case.outputs},{case.inputs}\]", program.as_text())


@deviceless(H200)
def test_an_older_card():
    program = compile_for(TARGETS["l4"], *call_of(EXPERTS[1][1], 64, 64))
    assert 'name = "quantized_grouped_dot"' in program.as_text()
