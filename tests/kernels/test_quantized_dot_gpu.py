"""quantized_dot for NVIDIA: numbers in interpret mode, the PTX of each code, and the machine code for an H200."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.runtime.targets import TARGETS
from pallas_kernels import QuantizedWeight, quantized_dot
from pallas_kernels.quantized_dot import reference, triton, triton_codes, xla
from pallas_kernels.quantized_dot.tiling import Tiling
from tests.kernels.fake_devices import device_like, gpu
from tests.kernels.lowering import lower_for
from tests.kernels.machine_code import DUMP_PTX, compile_for, kernels_of, tool
from tests.kernels.quantized_cases import Case, call_of, in_program, numbers_of, rounded_to_fp8, rows_of, x_of
from tests.support.device_arrays import device_array
from tests.support.deviceless import H200, deviceless

CPU = jax.devices("cpu")[0]


SMALL = Tiling(16, 32, 64)  # small tiles have edges in small shapes
NUMBERS = [
    # rows, splits, matrix
    (1, 2, Case("int4", 256, 64, zeros=True)),
    (5, 1, Case("int4", 64, 32, mins=True, outer=1, scales="uint8")),
    pytest.param(17, 1, Case("int4", 256, 128, dtype="float16"), marks=pytest.mark.slow),
    pytest.param(5, 1, Case("int4", 192), marks=pytest.mark.slow),
    (5, 1, Case("fp4", 64, 16, scales="float8_e4m3fn", outer=2, divides=True)),
    (17, 1, Case("int8", 50)),
    pytest.param(5, 1, Case("int8", 64, 32, zeros=True, dtype="float16"), marks=pytest.mark.slow),
    pytest.param(1, 2, Case("fp8", 384, 128), marks=pytest.mark.slow),
    (5, 2, Case("int8", 384, activations="int8")),
    pytest.param(17, 1, Case("int4", 64, 32, zeros=True, activations="int8"), marks=pytest.mark.slow),
]


def kernel(case, splits=1, dtype=jnp.float32):
    """The kernel in interpret mode, with small tiles, of (x, weight, num_rows)."""
    large = case.group is None or case.group >= 128  # loads of more than a chunk
    tiling = dataclasses.replace(SMALL, splits=splits, inputs=128 if large else 64)
    return jax.jit(functools.partial(triton.quantized_dot, dtype=dtype, tiling=tiling, interpret=True))


@pytest.mark.parametrize(("rows", "splits", "case"), NUMBERS, ids=str)
def test_matches_the_reference(rows, splits, case):
    x, weight = x_of(rows, case), rows_of(case.drawn())
    assert triton.refuse(CPU, x, weight, jnp.float32) is None
    got = np.asarray(kernel(case, splits)(x, weight, np.int32(rows)))
    expected = np.asarray(in_program(reference)(x, weight, np.int32(rows)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    if case.activations == "int8" and weight.groups == 1:
        np.testing.assert_array_equal(got, in_program(xla)(x, weight, np.int32(rows)))


FP8 = [
    pytest.param(5, 1, Case("fp8", 384, 128, scales="float32", activations="fp8"), marks=pytest.mark.slow),
    (17, 2, Case("fp8", 200, dtype="float16", activations="fp8")),
    pytest.param(1, 2, Case("fp8", 192, 64, dtype="float32", activations="fp8"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rows", "splits", "case"), FP8, ids=str)
def test_activations_in_fp8_match_float64(rows, splits, case):
    x, plain = x_of(rows, case), case.drawn()
    factors = 10.0 ** np.random.default_rng(1).integers(-4, 4, x.shape)
    x = device_array(np.asarray(x).astype(np.float64) * factors, x.dtype)  # subnormal codes, too
    weight, count = rows_of(plain), np.int32(rows)
    assert triton.refuse(CPU, x, weight, jnp.float32) is None
    wanted = rounded_to_fp8(x, weight.groups) @ numbers_of(plain).T
    assert np.abs(wanted - np.asarray(x).astype(np.float64) @ numbers_of(plain).T).max() > 1e-3 * np.abs(wanted).max()
    calls = {name: functools.partial(quantized_dot, implementation=name) for name in (None, "reference", "xla")}
    found = {name: jax.jit(functools.partial(call, dtype=jnp.float32)) for name, call in calls.items()}
    for name, call in (found | {"triton": kernel(case, splits)}).items():
        got = np.asarray(call(x, weight, count))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max(), err_msg=str(name))


@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_a_row_in_fp8_that_is_not_finite_stays_so_and_stays_alone(bad):
    """Rows of zeros and of the smallest numbers are zeros, and the largest numbers do not overflow."""
    case = Case("fp8", 256, 128, dtype="float32", activations="fp8")
    x, weight = np.array(x_of(16, case)), rows_of(case.drawn())
    x[5], x[6], x[7] = 0, 1e-38, x[7] * np.float32(1e35)
    harmed = x.copy()
    harmed[3, 5] = bad
    for call in (in_program(xla), kernel(case)):
        whole = np.asarray(call(x, weight, np.int32(16)))
        assert not whole[5:7].any()
        assert np.isfinite(whole).all()
        out = np.asarray(call(harmed, weight, np.int32(16)))
        assert not np.isfinite(out[3]).any()
        np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(whole, 3, 0))


@pytest.mark.codegen
@pytest.mark.parametrize(
    "case",
    [Case("int4", 256, 64), pytest.param(Case("fp8", 256, 128, activations="fp8"), marks=pytest.mark.slow)], ids=str,
)  # fmt: skip
def test_bits_of_a_row_do_not_depend_on_the_others(case):
    x, weight, call = np.asarray(x_of(20, case)), rows_of(case.drawn()), kernel(case, 2)
    first, last = x.copy(), x.copy()
    first[7:], last[:18] = np.inf, np.nan
    whole = np.asarray(call(x, weight, np.int32(20)))
    np.testing.assert_array_equal(call(x[18:19], weight, np.int32(1)), whole[18:19])
    company = np.asarray(call(last, weight, np.int32(20)))
    np.testing.assert_array_equal(company[18:], whole[18:])
    needed = np.asarray(call(first, weight, np.int32(7)))
    np.testing.assert_array_equal(needed[:7], whole[:7])
    assert not needed[16:].any()


def halves(word):
    return word & 0xFFFF, word >> 16


def run_ptx(text, operands):
    """A tiny interpreter of the instructions that `triton_codes` writes. operands: "$0" and so on -> bits."""
    registers = dict(operands)

    def read(name):
        name = name.strip()
        if name.startswith("0f"):
            return int(name[2:], 16)
        return int(name, 0) if name[0].isdigit() else registers[name]

    def fma(a, b, c, dtype):
        a, b, c = (np.array(halves(v), np.uint16).view(dtype).astype(np.float64) for v in (a, b, c))
        low, high = (a * b + c).astype(dtype).view(np.uint16).tolist()
        return low | high << 16

    def prmt(a, b, selector):
        both = a | b << 32
        return sum((both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4))

    def float32(bits):
        return np.array(bits, np.uint32).view(np.float32)

    def pack(high, low):
        high, low = (int(float32(v).astype(ml_dtypes.bfloat16).view(np.uint16)) for v in (high, low))
        return low | high << 16

    calls = {
        "cvt.u32.u16": lambda a: a, "mov.b32": lambda a: a, "prmt.b32": prmt, "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b, "xor.b32": lambda a, b: a ^ b, "shr.b32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF, "sub.u32": lambda a, b: (a - b) & 0xFFFFFFFF,
        "fma.rn.bf16x2": functools.partial(fma, dtype=ml_dtypes.bfloat16),
        "fma.rn.f16x2": functools.partial(fma, dtype=np.float16),
        "add.rn.f32": lambda a, b: int((float32(a) + float32(b)).view(np.uint32)), "cvt.rn.bf16x2.f32": pack,
    }  # fmt: skip
    for instruction in text.strip("{} ").split(";"):
        name, _, rest = instruction.strip().partition(" ")
        if name and not name.startswith(".reg"):
            target, *sources = rest.split(",")
            registers[target.strip()] = calls[name](*map(read, sources))
    return registers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "high", "zero"),
    [
        *(("int4", high, zero) for high in (False, True) for zero in (8, 0, None)),
        ("fp4", False, 8), ("fp4", True, 8), ("int8", False, 8),
    ],
)  # fmt: skip
def test_instructions_make_the_numbers_of_every_code(kind, high, zero, dtype):
    """Each byte in each of the four places, or two, of a register. zero=None: zeros are an operand."""
    codes = np.random.default_rng(0).permutation(np.tile(np.arange(256, dtype=np.uint8), 4)).reshape(-1, 4)
    text = triton_codes.instructions(kind, high, zero, dtype)
    real = np.dtype(getattr(ml_dtypes, dtype, dtype))
    addend = np.array([triton_codes.number_of_zero(zero or 5, real)] * 2, real).view(np.uint32)[0]
    found = []
    for word in codes.view(np.uint32)[:, 0].tolist():
        if kind == "int8":
            after = run_ptx(text, {"$2": word})
            found.append([after["$0"], after["$1"]])
        else:
            found.append([run_ptx(text, {"$1": half, "$2": int(addend)})["$0"] for half in halves(word)])
    found = np.array(found, np.uint32).view(real).astype(np.float32)
    stored = codes.view(np.int8) if kind == "int8" else codes
    plain = functools.partial(triton_codes.plain, kind=kind, high=high, zero=5 if zero is None else zero)
    expected = jax.jit(functools.partial(plain, dtype=jnp.float32))(stored)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("zero", [8, None])
def test_instructions_make_small_integers(high, zero):
    codes = np.random.default_rng(0).permutation(np.tile(np.arange(256, dtype=np.uint8), 4)).reshape(-1, 4)
    zeros = np.random.default_rng(1).integers(0, 16, codes.shape, np.uint8) if zero is None else np.full_like(codes, 8)
    text = triton_codes.instructions("int4", high, zero, "int8")
    words = zip(codes.view(np.uint32)[:, 0].tolist(), zeros.view(np.uint32)[:, 0].tolist(), strict=True)
    found = np.array([[run_ptx(text, {"$1": word, "$2": less})["$0"]] for word, less in words], np.uint32)
    nibbles = codes >> 4 if high else codes & 15
    np.testing.assert_array_equal(found.view(np.int8), nibbles.astype(np.int8) - zeros.astype(np.int8))


@pytest.mark.parametrize(
    ("case", "dtype", "device", "message"),
    [
        (Case("int4", 128, 64), "float32", gpu(), "x of float32: it multiplies bfloat16 and float16"),
        (Case("int4", 96, 32), "bfloat16", gpu(), "96 inputs of 4 bits: must be a multiple of 64"),
        (Case("int8", 96, 24), "bfloat16", gpu(), "groups of 24 inputs: must be 16, 32, a multiple of 64"),
        (Case("int8", 96, 16, activations="int8"), "bfloat16", gpu(), "groups of 16 inputs: must be 32"),
        (Case("fp8", 128, activations="int8"), "bfloat16", gpu(), "with weights of fp8: must be int8 or int4"),
        (Case("int8", 64, zeros=True, activations="int8"), "bfloat16", gpu(), "zero points of 8 bits"),
        (Case("fp8", 128), "bfloat16", gpu("8.6"), r"float8 needs compute capability 8\.9"),
        (Case("fp8", 128, activations="fp8"), "bfloat16", gpu("8.6"), "8.9 .* use activations=float and XLA"),
        (Case("fp8", 96, 16, activations="fp8"), "bfloat16", gpu(), "groups of 16 inputs: must be 32"),
        (Case("int4", 128, activations="fp8"), "bfloat16", gpu(), "activations=fp8 with weights of int4: must be"),
        (Case("fp8", 128, activations="fp8"), "float32", gpu("8.9"), None),
        (Case("int4", 128), "bfloat16", gpu("7.5"), r"compute capability 8\.0"),
        (Case("int4", 128), "bfloat16", device_like("tpu"), "for NVIDIA"),
        (Case("int4", 1 << 20, outputs=4096), "bfloat16", gpu(), "2147483648 bytes of codes: must be less"),
        (Case("int4", 128, 64), "bfloat16", gpu(), None),
    ],
)  # fmt: skip
def test_refuses(case, dtype, device, message):
    x = jax.ShapeDtypeStruct((3, case.inputs), jnp.dtype(dtype))
    reason = triton.refuse(device, x, case.shapes(), x.dtype)
    assert (reason is None) if message is None else re.search(message, reason)
    plain = case.shapes().into(QuantizedWeight)
    assert "not plain" in triton.refuse(device, x, plain, x.dtype)


@pytest.mark.parametrize(
    ("outputs", "inputs", "programs", "splits"),
    [(6144, 4096, 384, 4), (4096, 4096, 256, 4), (28672, 4096, 448, 1), (4096, 14336, 256, 4), (512, 512, 8, 1)],
)
def test_splits_keep_a_card_busy_and_do_not_depend_on_the_rows(outputs, inputs, programs, splits):
    made = {Tiling.by_rule(rows, inputs, outputs, multiprocessors=132) for rows in (1, 2, 15, 16)}
    (tiling,) = made
    assert (-(-outputs // tiling.outputs) * tiling.splits, tiling.splits) == (programs, splits)


@pytest.mark.parametrize(
    ("platform", "case", "kernels"),
    [
        ("cuda", Case("int4", 256, 64, zeros=True), 1), ("cuda", Case("int8", 256, activations="int8"), 1),
        ("cuda", Case("fp8", 256, 128, activations="fp8"), 1), ("tpu", Case("fp8", 256, 128, activations="fp8"), 0),
        ("cuda", Case("int4", 256, 64, dtype="float32"), 0), ("tpu", Case("int4", 256, 64), 0),
    ],
)  # fmt: skip
def test_the_kernel_is_chosen_on_its_platform(platform, case, kernels):
    text = lower_for(platform, *call_of(case, 5))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == kernels


DECODE = [
    # of a layer of Llama 3.1 8B; the most instructions of an iteration
    (310, Case("int4", 4096, 128, zeros=True, outputs=4096)),
    (440, Case("fp4", 4096, 32, outputs=4096)),
    (310, Case("fp8", 4096, 128, outputs=4096)),
    (100, Case("int8", 4096, outputs=4096, activations="int8")),
    (190, Case("fp8", 4096, 128, outputs=4096, scales="float32", activations="fp8")),
    (190, Case("fp8", 4096, outputs=4096, activations="fp8")),
]


@deviceless(H200)
@pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(("most", "case"), DECODE, ids=str)
def test_machine_code(most, case, tmp_path):
    """16 rows. Each byte of the codes is copied once, numbers are made in registers, and nothing is spilled."""
    call, arguments = call_of(case, 16)
    (kernel,) = kernels_of(call, arguments, tmp_path, only="quantized_dot").values()
    (loop,) = kernel.loops
    print(f"{case.kind}: {len(loop)} instructions, {kernel.registers} registers, {kernel.resident_blocks} programs")
    assert (kernel.blocks, kernel.spilled_bytes, kernel.threads) == (256, 0, 128)  # 64 tiles and 4 splits
    assert kernel.resident_blocks >= 3
    copies = [int(size) for i in loop if "LDGSTS" in i for size in re.findall(r"\.(64|128)\b", i.split("[")[0])]
    x_bytes = 16 * 128 * (2 if case.activations == "float" else 1)
    code_bytes = 64 * 128 // (2 if case.kind in ("int4", "fp4") else 1)
    assert sum(copies) // 8 * kernel.threads == code_bytes + x_bytes, copies
    # Triton multiplies fp8 on Hopper as float16
    assert any(("HMMA.16816" if case.activations == "fp8" else "GMMA") in i for i in loop)
    assert len(loop) < most


@deviceless(H200)
@pytest.mark.parametrize(
    ("rows", "parts", "case"),
    [(16, 4, Case("int4", 14336, 128, zeros=True, outputs=4096)), (2048, 0, Case("int8", 14336, outputs=4096))],
)
def test_no_copy_of_the_matrix_is_made(rows, parts, case):
    program = compile_for(H200, *call_of(case, rows))
    assert re.findall(r'name = "(\w+)", num_stages', program.as_text()) == ["quantized_dot"]
    assert program.memory_analysis().temp_size_in_bytes <= parts * rows * case.outputs * 4 + 4096
    assert not re.search(r"(f16|bf16|f32)\[4096,14336\]", program.as_text())


@deviceless(H200)
@pytest.mark.parametrize("rows", [16, 2048])
def test_fp8_has_products_of_its_own_on_ada(rows, tmp_path):
    case = Case("fp8", 4096, 128, outputs=4096, scales="float32", activations="fp8")
    options = {"xla_dump_to": str(tmp_path), **DUMP_PTX}
    program = compile_for(TARGETS["l4"], *call_of(case, rows), compiler_options=options)
    (text,) = [text for path in tmp_path.glob("*.ptx") if ".entry quantized_dot" in (text := path.read_text())]
    products = re.findall(r"\bmma\.[\w.]+", text)
    assert set(products) == {"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"}
    assert not re.search(r"\bcvt\.\S*e4m3", text)  # no code is converted
    assert not re.search(r"(f16|bf16|f32)\[4096,4096\]", program.as_text())


@deviceless(H200)
def test_an_older_card():
    program = compile_for(TARGETS["l4"], *call_of(Case("int4", 4096, 128, zeros=True, outputs=4096), 16))
    assert 'name = "quantized_dot"' in program.as_text()
