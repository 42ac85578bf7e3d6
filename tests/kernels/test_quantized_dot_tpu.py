"""quantized_dot for TPU: numbers in interpret mode against float64, and programs compiled for a v5e."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QuantizedWeight, quantized_dot
from pallas_kernels.quantized_dot import mosaic_tpu, xla
from pallas_kernels.quantized_dot.mosaic_tpu import Tiling
from tests.kernels.lowering import lower_for
from tests.kernels.quantized_cases import Case, in_program, in_tpu_layout, shapes_of, x_of
from tests.support.deviceless import V5E, compile_for_v5e, deviceless

CPU = jax.devices("cpu")[0]


def numbers(plain):
    """The weights [out, in] in float64, by the definition in `QuantizedWeight`."""
    codes = np.asarray(plain.codes, np.float64).reshape(*plain.scales.shape, -1)

    def by_group(array, outer):
        values = np.asarray(array, np.float64)
        if outer is None:
            return values[..., None]
        outer = np.repeat(np.asarray(outer, np.float64), values.shape[1] // outer.shape[1], 1)
        return (values / outer if plain.divides else values * outer)[..., None]

    zero = 8 if plain.kind == "int4" and plain.mins is None else 0
    if plain.zeros is not None:
        zero = np.asarray(plain.zeros, np.float64)[..., None]
    found = by_group(plain.scales, plain.outer) * (codes - zero)
    if plain.mins is not None:
        found -= by_group(plain.mins, plain.outer_mins)
    return found.reshape(plain.shape)


def oracle(x, plain):
    x = np.asarray(x, np.float32)
    if plain.activations == "int8":
        largest = np.abs(x).max(1, keepdims=True)
        x = np.round(x * (np.float32(127) / largest)) * (largest.astype(np.float64) / 127)
    return x.astype(np.float64) @ numbers(plain).T


def kernel(tiling=None, dtype=jnp.float32):
    """The kernel in interpret mode, of (x, weight, num_rows)."""
    return jax.jit(functools.partial(mosaic_tpu.quantized_dot, dtype=dtype, tiling=tiling, interpret=True))


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)  # JAX takes a second or more to compile each
# rows, tiling, matrix. Small tiles have edges in small shapes.
NUMBERS = [
    SLOW(1, None, Case("int4", 256, 128)),
    (8, Tiling(16, 128, 128), Case("int4", 256, 64, zeros=True, outputs=200)),
    SLOW(200, Tiling(64, 128, 256), Case("int4", 256, 32, mins=True, outer=2, scales="uint8", outputs=130)),
    SLOW(5, None, Case("int4", 128, 32, zeros=True, scales="float16", outer=1, divides=True)),
    SLOW(8, Tiling(16, 37, 512), Case("int4", 1024)),
    SLOW(8, None, Case("int4", 5120, 32, outputs=16)),  # more groups than lanes
    (1, None, Case("int4", 640, zeros=True)),
    (32, Tiling(32, 128, 128), Case("int8", 384, outputs=150)),
    SLOW(5, None, Case("int8", 256, 16, zeros=True)),
    SLOW(5, None, Case("int8", 512, 256, mins=True, scales="float32")),
    (200, Tiling(96, 128, 256), Case("int8", 256, activations="int8", outputs=150)),
    SLOW(1, None, Case("int8", 384, 128, activations="int8")),
    SLOW(8, None, Case("int8", 256, 32, activations="int8")),
    SLOW(8, None, Case("int8", 512, 256, activations="int8")),
]


@pytest.mark.parametrize(("rows", "tiling", "case"), NUMBERS, ids=str)
def test_matches_float64(rows, tiling, case):
    x, plain = x_of(rows, case), case.drawn()
    weight = in_tpu_layout(plain)
    assert mosaic_tpu.refuse(CPU, x, weight, jnp.float32) is None
    got = np.asarray(kernel(tiling)(x, weight, np.int32(rows)))
    expected = oracle(x, plain)
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * np.abs(expected).max())
    if case.activations == "int8":
        np.testing.assert_array_equal(got, in_program(xla)(x, weight, np.int32(rows)))


@pytest.mark.parametrize("case", [
    Case("int4", 256, 64, zeros=True), SLOW(Case("int8", 384)), SLOW(Case("int8", 256, activations="int8")),
])  # fmt: skip
@pytest.mark.codegen
def test_bits_of_a_row_do_not_depend_on_the_others(case):
    x, weight, call = np.asarray(x_of(64, case)), in_tpu_layout(case.drawn()), kernel(Tiling(32, 128, case.inputs))
    last, row, first = x.copy(), np.zeros_like(x), x.copy()
    last[:60], row[5], first[7:] = np.nan, x[60], np.inf
    whole = np.asarray(call(x, weight, np.int32(64)))
    company = np.asarray(call(last, weight, np.int32(64)))
    np.testing.assert_array_equal(company[60:], whole[60:])
    alone = np.asarray(call(row, weight, np.int32(6)))
    np.testing.assert_array_equal(alone[5], whole[60])
    assert not alone[32:].any()  # a tile that is not needed
    needed = np.asarray(call(first, weight, np.int32(7)))
    np.testing.assert_array_equal(needed[:7], whole[:7])
    assert not np.asarray(call(x, weight, np.int32(0))).any()


def device(platform="tpu"):
    return types.SimpleNamespace(platform=platform, device_kind=f"a {platform}")


@pytest.mark.parametrize(
    ("case", "dtype", "platform", "message"),
    [
        (Case("int4", 128, 64), "float32", "tpu", "x of float32: it multiplies bfloat16"),
        (Case("int8", 192), "bfloat16", "tpu", "192 inputs: must be a multiple of 128"),
        (Case("int8", 384, 96), "bfloat16", "tpu", "groups of 96 inputs: must be 16, 32, 64, a multiple of 128 up to"),
        (Case("int4", 4096, 2048), "bfloat16", "tpu", "groups of 2048 inputs"),
        (Case("int8", 128, zeros=True, activations="int8"), "bfloat16", "tpu", "without zero points and minima"),
        (Case("int4", 128, activations="int8"), "bfloat16", "tpu", "activations=int8 with weights of int4"),
        (Case("fp8", 128), "bfloat16", "tpu", "it multiplies weights of int8 and int4, not fp8"),
        (Case("int4", 128), "bfloat16", "gpu", "for TPU"),
        (Case("int4", 128, 64), "bfloat16", "tpu", None),
        (Case("int8", 128, activations="int8"), "float32", "tpu", None),
    ],
)  # fmt: skip
def test_refuses(case, dtype, platform, message):
    x, weight = jax.ShapeDtypeStruct((3, case.inputs), jnp.dtype(dtype)), shapes_of(case)
    reason = mosaic_tpu.refuse(device(platform), x, weight, x.dtype)
    assert (reason is None) if message is None else message in reason
    assert "layout" in mosaic_tpu.refuse(device(), x, weight.into(QuantizedWeight), x.dtype) or (
        case.kind == "fp8"
    )


def call_of(case, rows):
    """A product, and its arguments. The result has x's dtype."""
    x = jax.ShapeDtypeStruct((rows, case.inputs), jnp.dtype(case.dtype))
    return quantized_dot, (x, shapes_of(case), jax.ShapeDtypeStruct((), jnp.int32))


@pytest.mark.parametrize(("case", "kernels"), [
    (Case("int4", 256, 64, zeros=True), 1), (Case("int8", 256, activations="int8"), 1),
    (Case("int4", 256, 64, dtype="float32"), 0), (Case("fp8", 256), 0),
])  # fmt: skip
def test_the_kernel_is_chosen_on_its_platform(case, kernels):
    text = lower_for("tpu", *call_of(case, 5))
    assert text.count("custom_call @tpu_custom_call") == kernels


def test_the_rule_keeps_fast_memory_and_finds_large_blocks():
    """The bytes are those that `Tiling` names, for the widths of models up to Llama 3.1 405B."""
    for inputs in (896, 2048, 4096, 8192, 11008, 14336, 18944, 29568, 53248):
        for bits in (4, 8):
            for size in (32, 64, 128, inputs):
                tiling = Tiling.by_rule(4096, inputs, 8192, bits=bits, group_size=size)
                rows, outputs, block, groups = tiling.rows, tiling.outputs, tiling.inputs, inputs // size
                twice = 2 * rows * block + outputs * block * bits // 8 + 8 * outputs * groups + 4 * rows * outputs
                once = 4 * (rows * outputs + outputs * groups + rows * groups + max(1, 128 // size) * rows * outputs)
                assert inputs % block == block % 128 == 0
                assert 2 * twice + once < 13e6
                assert outputs * block * bits // 8 >= 2**18 or inputs == 896 or (size, inputs) == (32, 53248)


MATRICES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # of a layer of Llama 3.1 8B


@deviceless(V5E)
# most: bytes of the weights, as a part of those of bfloat16
@pytest.mark.parametrize(("most", "case", "rows"), [
    *((0.32, Case("int4", i, 128, outputs=o), 16) for o, i in MATRICES),
    (0.32, Case("int4", 14336, 128, zeros=True, outputs=4096), 256),
    (0.40, Case("int4", 8192, 32, mins=True, scales="float32", outputs=4096), 2048),  # the most fast memory
    *((0.53, Case("int8", i, outputs=o), 16) for o, i in MATRICES[2:]),
    (0.53, Case("int8", 4096, activations="int8", outputs=28672), 16),
    (0.76, Case("int8", 14336, 16, outer=56, scales="int8", outputs=4096), 256),  # Q6_K
], ids=str)  # fmt: skip
def test_no_copy_of_the_matrix_is_made(most, case, rows):
    call, arguments = call_of(case, rows)
    program = compile_for_v5e(call, arguments)
    text, memory = program.as_text(), program.memory_analysis()
    assert re.findall(r"%(\w+)\S* = \S+ custom-call\(.*tpu_custom_call", text) == ["quantized_dot_tpu"]
    x_bytes = 2 * rows * case.inputs
    weights = memory.argument_size_in_bytes - x_bytes
    plain = 2 * case.outputs * case.inputs
    print(f"{weights / plain:.3f} of bfloat16, temporaries {memory.temp_size_in_bytes}")
    assert weights <= most * plain
    assert program.cost_analysis()["bytes accessed"] <= most * plain + 5 * x_bytes + 3 * 2 * rows * case.outputs
    assert memory.temp_size_in_bytes <= x_bytes + 4096
    assert not re.search(rf"(bf16|f32)\[({case.outputs},{case.inputs}|{case.inputs},{case.outputs})\]", text)
