"""The Triton kernels of grouped_lora: blocks of many adapters, and lowering with real models' shapes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_lora, lora_expand
from pallas_kernels.grouped_lora import triton
from tests.kernels.lora_cases import LAYER, Case, in_float64, llama_call, make
from tests.kernels.lowering import lower_for


@pytest.mark.codegen
def test_large_blocks_match_float64_and_rows_keep_their_bits():
    """Runs of rows with one adapter, blocks of 64 rows with many adapters, and a last block that is not full."""
    case = Case(96, ((0, 32), (1, 16)), rows=300, rank=5, slots=9, num_rows=290)
    call = make(case)
    program = jax.jit(functools.partial(grouped_lora, layer=LAYER, pattern=case.pattern, implementation="triton"))
    found = np.asarray(program(*call))
    np.testing.assert_allclose(found[:290], in_float64(case, call), rtol=1e-5, atol=1e-5)
    shuffled = np.concatenate([np.random.default_rng(1).permutation(290), np.arange(290, 300)])
    mixed = [np.asarray(array)[shuffled] for array in call[:2]] + call[2:6] + [call[6][shuffled], call[7]]
    np.testing.assert_array_equal(np.asarray(program(*mixed))[:290], found[shuffled[:290]])


def test_decodes_have_many_programs():
    """A row of Llama 3.1 8B's o projection is split over 16 programs, and each adapter of a block has its own."""
    assert triton.Tiling.of(32, 4096) == triton.Tiling(16, 16, 16, 256)
    assert triton.Tiling.of(8, 14336) == triton.Tiling(16, 8, 32, 448)
    assert triton.Tiling.of(2048, 4096) == triton.Tiling(64, 8, 2, 2048)


@pytest.mark.parametrize(
    ("name", "rows", "rank", "dtype"),
    [
        ("qkv", 32, 16, "bfloat16"), ("gate_up", 2048, 64, "bfloat16"), ("down", 256, 16, "float32"),
        pytest.param("qkv", 2048, 16, "bfloat16", marks=pytest.mark.slow),
        pytest.param("lm_head", 64, 64, "bfloat16", marks=pytest.mark.slow),
        pytest.param("gate_up", 1, 256, "bfloat16", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_two_kernels_lower_and_nothing_else_is_computed(name, rows, rank, dtype):
    text = lower_for("cuda", *llama_call(name, rows, rank, dtype))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 2
    assert not re.search(r"stablehlo\.(sort|gather|dynamic_slice|while|dot_general)\b", text)


def test_expand_is_one_kernel():
    shapes = llama_call("down", 64, 16)[1]
    h = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    text = lower_for("cuda", lambda *args: lora_expand(*args[:-1], layer=args[-1]), [h, shapes[1], *shapes[3:]])
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


def test_refuses():
    x, base, a = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (8, 128), (2, 4, 1, 512, 64)))
    device = jax.devices("cpu")[0]
    assert triton.refuse(device, x, base, a, ((0, 128),)) == "rank 512 is larger than 256"
    assert triton.refuse(device, x, base, a, ((0, 24), (0, 8))) == "24 outputs are not a multiple of 16"
