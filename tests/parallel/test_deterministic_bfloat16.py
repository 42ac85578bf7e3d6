"""deterministic=True in bfloat16: NVIDIA's kernels, interpreted on CPU. A request always has the same bits."""

import dataclasses

import numpy as np
import pytest

from jpaged import LLM
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.model import check_deterministic
from jpaged.models.fused_layer import refuse_fused
from jpaged.models.spec import Activation, DecoderSpec, Norm, NormPosition, QKNorm, Rope
from tests.golden.checkpoints import VARIANTS, write_checkpoint
from tests.support.random_requests import OPTIONS, answers, workload

FIXED = OPTIONS | {
    "dtype": "bfloat16", "deterministic": True, "attention_implementation": "triton_fixed", "max_model_len": 128,
}  # fmt: skip
SPEC = DecoderSpec(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=128, rope=Rope(),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.codegen
def test_bits_do_not_depend_on_batch_chunks_cache_preemption_or_devices(tmp_path):
    """Greedy, seeded and with log-probabilities. One device; alone, from the cache; two devices with small chunks.

    The pool of the two devices has room for some of the requests only.
    """
    write_checkpoint(next(v for v in VARIANTS if v.name == "qwen3"), 0, tmp_path)
    prompts, params = workload(8, seed=4, longest=40)
    params = [dataclasses.replace(one, max_tokens=min(one.max_tokens, 10)) for one in params]
    cached = FIXED | {"enable_prefix_caching": True}
    with LLM(str(tmp_path), **cached) as llm:
        first = answers(llm.generate(prompts, params, use_tqdm=False))
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == first
        assert llm.stats().prefix_hit_tokens > 0
        each = zip(prompts, params, strict=True)
        assert [answers(llm.generate(*one, use_tqdm=False))[0] for one in each] == first
        block = 2 * 16 * llm.spec.num_kv_heads // 2 * llm.spec.head_dim * 2 * llm.spec.num_layers  # of one device
    small = {"token_buckets": (16,), "max_num_batched_tokens": 16, "max_model_len": 64}
    small["kv_cache_memory_bytes"] = 5 * block
    with LLM(str(tmp_path), **FIXED | small, tensor_parallel_size=2) as llm:
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == first
        assert llm.stats().preemptions > 0


@pytest.mark.parametrize(
    ("dtype", "platform", "implementation", "message"),
    [
        ("bfloat16", "gpu", None, None),
        ("bfloat16", "cpu", "triton_fixed", None),
        ("bfloat16", "cpu", None, "the model is bfloat16 on cpu"),
        ("float32", "gpu", None, "the model is float32 on gpu"),
        ("bfloat16", "tpu", None, "the model is bfloat16 on tpu"),
    ],
)
def test_dtypes_and_platforms(dtype, platform, implementation, message):
    config = EngineConfig(model="x", deterministic=True, attention_implementation=implementation)
    if message is None:
        check_deterministic(config, None, np.dtype(dtype), platform, SPEC)
        return
    with pytest.raises(ModelLoadError, match=message):
        check_deterministic(config, None, np.dtype(dtype), platform, SPEC)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"norm": Norm.LAYER}, "norms that are not RMS norms"),
        ({"norm_position": NormPosition.POST}, "norms after attention"),
        ({"qk_norm": QKNorm.PROJECTION}, "norms of queries and keys"),
        ({"activation": Activation.GELU}, "exact GELU"),
        ({"gated": False}, "no gate"),
        ({"residual_scale": 0.5}, "a factor of the residual"),
    ],
)
def test_models_that_are_refused(change, reason):
    spec = dataclasses.replace(SPEC, **change)
    assert reason in refuse_fused(spec)
    with pytest.raises(ModelLoadError, match=f"cannot serve this model in bfloat16, because it has {reason}"):
        check_deterministic(EngineConfig(model="x", deterministic=True), None, np.dtype("bfloat16"), "gpu", spec)
    assert refuse_fused(SPEC) is None
