"""quantized_dot of fp8 and fp8 for Hopper: in Pallas' GPU interpreter against float64, and compiled for an H200."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.runtime.targets import TARGETS
from pallas_kernels.quantized_dot import mosaic_gpu
from pallas_kernels.quantized_dot.weight import RowsWeight
from tests.kernels.fake_devices import gpu
from tests.kernels.machine_code import compile_for, mosaic_kernel, tool
from tests.kernels.quantized_cases import Case, call_of, numbers_of, rounded_to_fp8
from tests.support.deviceless import H200, deviceless

has_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="JAX 0.10 has no interpreter for these kernels"
)
BLOCKS = Case("fp8", 256, 128, scales="float32", outputs=256, activations="fp8")


def drawn(rows, case):
    x = np.random.default_rng(0).standard_normal((rows, case.inputs))
    return jnp.asarray(x, case.dtype), case.drawn()


def kernel(x, weight, count, *options):
    with plgpu.force_gpu_interpret_mode(*options):
        return np.asarray(jax.jit(functools.partial(mosaic_gpu.quantized_dot, dtype=jnp.float32))(x, weight, count))


@has_interpreter
@pytest.mark.parametrize(
    ("rows", "case"),
    [
        (130, BLOCKS),
        # more tiles than shared memory holds
        (5, Case("fp8", 896, dtype="float16", outputs=128, activations="fp8")),
        pytest.param(64, Case("fp8", 768, 384, outputs=128, activations="fp8"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_matches_float64(rows, case):
    x, plain = drawn(rows, case)
    weight = RowsWeight.of(plain)
    wanted = rounded_to_fp8(x, weight.groups) @ numbers_of(plain).T
    got = kernel(x, weight, jnp.int32(rows))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@has_interpreter
@pytest.mark.slow
def test_the_interpreter_finds_no_race(capsys):
    """Between the copies and the reads of scales. Reads of a product are not compared: the detector ignores them."""
    x, plain = drawn(64, Case("fp8", 768, 128, outputs=128, activations="fp8"))
    kernel(x, RowsWeight.of(plain), jnp.int32(64), plgpu.InterpretGPUParams(detect_races=True))
    assert "RACE" not in capsys.readouterr().out


@has_interpreter
@pytest.mark.slow
def test_bits_of_a_row_do_not_depend_on_the_others():
    x, plain = drawn(140, BLOCKS)
    weight = RowsWeight.of(plain)
    whole = kernel(x, weight, jnp.int32(140))
    np.testing.assert_array_equal(kernel(x[75:76], weight, jnp.int32(1)), whole[75:76])
    needed = kernel(x.at[7:].set(jnp.nan), weight, jnp.int32(7))
    np.testing.assert_array_equal(needed[:7], whole[:7])
    assert not needed[128:].any()


@pytest.mark.parametrize(
    ("case", "device", "message"),
    [
        (Case("fp8", 256, 128, outputs=128), gpu(), "with activations=fp8, not rows, float"),
        (Case("int8", 256, outputs=128, activations="fp8"), gpu(), "activations=fp8 with weights of int8"),
        (Case("fp8", 256, outputs=576, activations="fp8"), gpu(), "576 outputs and 256 inputs: must be multiples"),
        (Case("fp8", 256, 64, outputs=128, activations="fp8"), gpu(), "groups of 64 inputs: must be a multiple"),
        (BLOCKS, gpu("8.9"), "for NVIDIA's Hopper"),
        (BLOCKS, gpu("10.0"), "for NVIDIA's Hopper"),
        (BLOCKS, gpu(), None),
    ],
)
def test_refuses(case, device, message, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    reason = mosaic_gpu.refuse(device, None, case.shapes(), jnp.bfloat16)
    assert (reason is None) if message is None else re.search(message, reason)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert reason is not None or "it needs JAX 0.11" in mosaic_gpu.refuse(device, None, case.shapes(), jnp.bfloat16)


def large(group):
    return Case("fp8", 4096, group, outputs=4096, scales="float32", activations="fp8")


@deviceless(H200)
@pytest.mark.skipif(tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("group", [128, None])
def test_machine_code(group, tmp_path, monkeypatch):
    """Products of fp8 of warp groups, copies by the tensor memory accelerator, no conversion, and nothing spilled."""
    kernel = mosaic_kernel(*call_of(large(group), 2048), tmp_path, monkeypatch)
    count = lambda *names: [sum(name in i for i in kernel.code) for name in names]  # noqa: E731
    print(f"{kernel.registers} registers, {len(kernel.code)} instructions")
    assert (kernel.registers, kernel.spilled_bytes) == (168, 0)  # 3 warp groups fill a multiprocessor
    assert count("QGMMA.64x128x32.F32.E4M3.E4M3") == [4]  # 128 inputs
    assert count("HGMMA", "HMMA", "E4M3.UNPACK", "LDL", "STL", "LDGSTS") == [0] * 6
    assert count("UTMALDG")[0] % 6 == 0  # codes, two of x, and their scales


@deviceless(H200)
@pytest.mark.parametrize(
    ("target", "rows", "name"),
    [(H200, 2048, "quantized_dot_mosaic"), (H200, 64, "quantized_dot"), (TARGETS["l4"], 2048, "quantized_dot")],
)
def test_the_kernel_is_chosen_and_no_copy_of_the_matrix_is_made(target, rows, name):
    case = large(128)
    program = compile_for(target, *call_of(case, rows))
    text = program.as_text()
    assert ("mosaic_gpu" in text) == (name == "quantized_dot_mosaic")
    assert name in text
    assert not re.search(r"(f16|bf16|f32)\[4096,4096\]", text)
    # x in fp8, its scales, the weights' scales by group, and up to 4 parts of the sums
    parts = 4 * rows * case.outputs * 4 if rows <= 64 else 0
    limit = rows * case.inputs + 2 * (rows + case.outputs) * 32 * 4 + parts + 8192
    assert program.memory_analysis().temp_size_in_bytes <= limit
