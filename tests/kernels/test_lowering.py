"""Every variant of the kernels lowers for its platform, on any machine.

This finds operations that interpret mode accepts and that Triton or Mosaic refuses.
"""

import re

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tests.kernels import lowered

DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
}


def lower_for(platform, call, arguments):
    """The StableHLO of `call` for an accelerator."""
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=DEVICES[platform])):
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


# A mixed step has the kernels of both.
@pytest.mark.parametrize(
    "max_query_len", [pytest.param(1, id="decode", marks=pytest.mark.slow), pytest.param(32, id="mixed")]
)
@pytest.mark.parametrize("name", lowered.ATTENTION)
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


@pytest.mark.parametrize("name", lowered.QKV)
def test_triton_fused_write_lowers(name):
    """Bias, norm, rope and write are one kernel."""
    text = lower_for("cuda", *lowered.writing_qkv(name, "triton"))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("max_query_len", [1, 32], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", lowered.TPU)
def test_tpu_kernel_lowers(name, max_query_len):
    text = lower_for("tpu", *lowered.attention(name, max_query_len, "mosaic_tpu", lowered.TPU))
    assert text.count("custom_call @tpu_custom_call") == 1
    assert "paged_attention_tpu" in text


@pytest.mark.parametrize("variant", lowered.TPU_WRITES, ids=lambda v: "-".join(str(x) for x in v))
def test_tpu_write_lowers(variant):
    text = lower_for("tpu", *lowered.writing(*variant, "mosaic_tpu", 64 if variant[3] else 16))
    assert text.count("custom_call @tpu_custom_call") == 1
    assert "write_kv_tpu" in text
