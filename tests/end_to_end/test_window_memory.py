"""KV memory of long requests, measured in a model with five sliding-window layers per full-attention layer."""

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.models.spec import DecoderSpec, Rope
from tests.support.random_decoder import dense_continuation, random_params
from tests.support.tiny_engine import sampling_programs

pytestmark = pytest.mark.slow

WINDOW, LENGTH, BLOCK, CHUNK = 64, 4096, 16, 128
SPEC = DecoderSpec(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_layers=6, num_heads=4, num_kv_heads=1, head_dim=16,
    max_position=LENGTH, rope=Rope(theta=100_000.0), sliding_window=(WINDOW,) * 5 + (None,), tie_embeddings=True,
)  # fmt: skip


# Blocks of the layer with full attention, and of each other layer: its window and a chunk, for any offset in a block.
IN_ALL, IN_CHUNKS = LENGTH // BLOCK, -(-(WINDOW - 1 + CHUNK - 1) // BLOCK) + 1
PAGE_BYTES = 2 * BLOCK * SPEC.head_dim * 4


@pytest.fixture(scope="module")
def llm():
    """A pool for one longest request. Full attention in every layer would need 4.8 times as much."""
    with sampling_programs(SamplerVariant.GREEDY), LLM(
        SPEC, params=random_params(SPEC), block_size=BLOCK, row_buckets=(8,), token_buckets=(CHUNK,), max_num_seqs=8,
        max_num_batched_tokens=CHUNK, max_model_len=LENGTH, kv_cache_memory_bytes=(IN_ALL + 5 * IN_CHUNKS) * PAGE_BYTES,
    ) as llm:  # fmt: skip
        yield llm


def test_kv_of_the_longest_request_is_limited_by_the_windows(llm):
    plan = llm.engine.runner.memory_plan
    # six KV groups over one page array
    assert (plan.block_bytes, plan.num_blocks) == (PAGE_BYTES, IN_ALL + 5 * IN_CHUNKS)
    assert 4.7 * plan.kv_bytes < plan.full_attention_bytes == 6 * IN_ALL * PAGE_BYTES
    engine, decoding = llm.engine, []
    prompt = np.random.default_rng(0).integers(0, 256, LENGTH - 60).tolist()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add_request("long", {"prompt_token_ids": prompt}, params)
    while engine.has_work:
        outputs = engine.step()
        if engine.has_work and engine.scheduler.running[0].schedule.decoding:
            decoding.append(engine.stats().used_blocks)
    assert len(outputs[0].outputs[0].token_ids) == 60
    assert engine.stats().peak_used_blocks <= plan.num_blocks
    assert max(decoding[1:]) <= IN_ALL + 5 * (WINDOW // BLOCK + 1)
    held = max(decoding[1:]) * PAGE_BYTES
    print(f"KV at {LENGTH} tokens: {held:,} bytes; with full attention in every layer {plan.full_attention_bytes:,}")
    assert plan.full_attention_bytes > 5.4 * held


def test_chunks_over_freed_blocks_agree_with_a_dense_forward_pass(llm):
    """The dense model has no pages, and a mask for its windows. The second run starts from the cached prefix."""
    prompt = np.random.default_rng(1).integers(0, 256, 100).tolist()
    dense = dense_continuation(SPEC, random_params(SPEC))(np.array(prompt), 20)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for cached in (0, 96):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert output.outputs[0].token_ids == dense
        assert output.num_cached_tokens == cached
