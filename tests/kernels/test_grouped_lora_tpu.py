"""The Mosaic kernels of grouped_lora lower for TPU with real models' shapes."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import lora_expand
from pallas_kernels.grouped_lora import mosaic_tpu
from tests.kernels.lora_cases import llama_call
from tests.kernels.lowering import lower_for


@pytest.mark.parametrize(
    ("name", "rows", "rank", "dtype"),
    [
        ("qkv", 32, 16, "bfloat16"), ("gate_up", 2048, 64, "bfloat16"),
        pytest.param("down", 8, 8, "float32", marks=pytest.mark.slow),
        pytest.param("lm_head", 64, 64, "bfloat16", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_two_kernels_lower(name, rows, rank, dtype):
    text = lower_for("tpu", *llama_call(name, rows, rank, dtype))
    assert text.count("custom_call @tpu_custom_call") == 2


def test_expand_is_one_kernel():
    shapes = llama_call("down", 64, 16)[1]
    h = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    text = lower_for("tpu", lambda *args: lora_expand(*args[:-1], layer=args[-1]), [h, shapes[1], *shapes[3:]])
    assert text.count("custom_call @tpu_custom_call") == 1


def test_refuses():
    x, base, a = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 65_536), (8, 192), (2, 4, 1, 64, 65_536)))
    device = jax.devices("cpu")[0]
    assert "16777216 bytes, more than" in mosaic_tpu.refuse(device, x, base, a, ((0, 128),))
    assert mosaic_tpu.refuse_expand(device, x, base, a) == "192 outputs are not a multiple of 128"
    half = jax.ShapeDtypeStruct((8, 128), jnp.float16)
    assert mosaic_tpu.refuse_expand(device, half, base, a) == "it computes bfloat16 or float32, not float16"
