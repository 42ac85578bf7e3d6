"""Every variant of the kernels lowers for its platform, on a machine that has none: what interpret mode accepts and
Triton refuses is found here."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tests.kernels import lowered


def lower_for_cuda(call, arguments):
    """The StableHLO of `call` for NVIDIA."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("max_query_len", [1, 32], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", lowered.ATTENTION)
def test_triton_kernels_lower(name, max_query_len):
    text = lower_for_cuda(*lowered.attention(name, max_query_len, "triton"))
    names = {name for name in ("paged_prefill", "paged_decode_splits", "paged_decode_merge") if name in text}
    expected = {"paged_decode_splits", "paged_decode_merge"} | ({"paged_prefill"} if max_query_len > 1 else set())
    assert names == expected
    assert text.count("custom_call @__gpu$xla.gpu.triton") == len(expected)


@pytest.mark.parametrize("variant", lowered.WRITES, ids=lambda v: "-".join(str(x) for x in v))
def test_triton_write_lowers(variant):
    text = lower_for_cuda(*lowered.writing(*variant, "triton"))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("name", lowered.QKV)
def test_triton_fused_write_lowers(name):
    """Bias, norm, rotation and write are one kernel."""
    text = lower_for_cuda(*lowered.writing_qkv(name, "triton"))
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
