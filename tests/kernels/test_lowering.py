"""Every variant of the kernels lowers for its platform, on any machine.

This finds operations that interpret mode accepts and Triton or Mosaic refuses.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dot, grouped_dot, quantize, quantized_dot
from pallas_kernels.native import library
from pallas_kernels.row_ops import argmax_rows, gather_rows, rms_norm_rows, silu_and_mul
from tests.kernels import lowered
from tests.kernels.lowering import DEVICES, lower_for


@pytest.mark.parametrize("platform", DEVICES)
def test_a_program_for_an_accelerator_asks_no_native_kernel(platform, monkeypatch):
    """On an H200, a start compiled kernels for the host's processor, which took seconds and failed."""

    def native(kernel, check=None):
        raise AssertionError(f"{kernel} was asked for")

    monkeypatch.setattr(library, "native", native)
    rows, matrix = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    weight = jax.jit(functools.partial(quantize, bits=8))(np.ones((128, 64), jnp.bfloat16))  # in the layout of CPU
    lower_for(platform, lambda x, w: dot(x, w, 8), (rows, matrix))
    lower_for(platform, lambda x: quantized_dot(x, weight, 8), (rows,))
    lower_for(platform, lambda x: silu_and_mul(rms_norm_rows(x, jnp.ones(64), 1e-6, 8), 8), (rows,))
    lower_for(platform, lambda x: gather_rows(x, argmax_rows(x.astype(jnp.float32), 8), 8), (rows,))
    lower_for(platform, lambda x: grouped_dot(x[None], x[None], jnp.zeros(1, jnp.int32), jnp.int32(1)), (rows,))


# Cases of the default run. The others combine their dtypes, sizes and options in other ways.
QKV_DEFAULT = ("partial-80", "int8")
TRITON_DEFAULT = ("llama-3-8b", "gqa-7-64-sinks", "mha-256", "int8-float32", "fp8")


# A mixed step has the kernels of both.
@pytest.mark.parametrize(
    "max_query_len", [pytest.param(1, id="decode", marks=pytest.mark.slow), pytest.param(32, id="mixed")]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in TRITON_DEFAULT)) for name in lowered.ATTENTION],
)
def test_triton_kernels_lower(name, max_query_len):
    text = lower_for("cuda", *lowered.attention(name, max_query_len, "triton"))
    names = set(re.findall(r"paged_(?:prefill|decode_merge|decode)\b", text))
    expected = {"paged_decode", "paged_decode_merge"} | ({"paged_prefill"} if max_query_len > 1 else set())
    assert names == expected
    assert text.count("custom_call @__gpu$xla.gpu.triton") == len(expected)


@pytest.mark.parametrize("variant", lowered.WRITES, ids=lambda v: "-".join(str(x) for x in v))
def test_triton_write_lowers(variant):
    text = lower_for("cuda", *lowered.writing(*variant, "triton"))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QKV_DEFAULT)) for name in lowered.QKV]
)
def test_triton_fused_write_lowers(name):
    """Bias, norm, rope and write are one kernel."""
    text = lower_for("cuda", *lowered.writing_qkv(name, "triton"))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


# Cases of the default run. The others combine their dtypes, sizes and options in other ways.
TPU_DECODES = ("llama-3-8b", "int8-float32-window", "mqa-20-block-8")
TPU_MIXED = (
    *TPU_DECODES, "gqa-7-64-sinks", "mha-32-in-blocks-of-heads", "float32-pages", "fp8-softcap-sinks",
)  # fmt: skip


# Decodes and mixed steps have the same kernel, with other tiles.
@pytest.mark.parametrize(
    ("name", "max_query_len"),
    [
        pytest.param(name, count, id=f"{name}-{step}", marks=[pytest.mark.slow] * (name not in default))
        for step, count, default in (("decode", 1, TPU_DECODES), ("mixed", 32, TPU_MIXED)) for name in lowered.TPU
    ],
)  # fmt: skip
def test_tpu_kernel_lowers(name, max_query_len):
    text = lower_for("tpu", *lowered.attention(name, max_query_len, "mosaic_tpu", lowered.TPU))
    assert text.count("custom_call @tpu_custom_call") == 1
    assert "paged_attention_tpu" in text


@pytest.mark.parametrize("variant", lowered.TPU_WRITES, ids=lambda v: "-".join(str(x) for x in v))
def test_tpu_write_lowers(variant):
    text = lower_for("tpu", *lowered.writing(*variant, "mosaic_tpu", 64 if variant[3] else 16))
    assert text.count("custom_call @tpu_custom_call") == 1
    assert "write_kv_tpu" in text
