"""DeepSeek V4 in the engine: cached prefixes change no bit, and the kernels for NVIDIA give Transformers' answers."""

import json

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from tests.golden.checkpoints import BY_NAME, write_checkpoint


@pytest.mark.slow
def test_cold_equals_warm(tmp_path):
    """Prefixes end at entries of 32 tokens and between them. The next turn of a chat starts after its answer."""
    write_checkpoint(BY_NAME["deepseek-v4"], 0, tmp_path)
    ids = np.random.default_rng(0).integers(3, 320, 150).tolist()
    prompts = [ids, ids[:100] + ids[:20], ids[:37] + ids[50:90], ids[:64], ids[:65]]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=5)
    options = {"row_buckets": (8,), "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(str(tmp_path), dtype="float32", max_model_len=256, **options) as llm:

        def answer(prompt):
            output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
            steps = [{token: each.logprob for token, each in step.items()} for step in output.outputs[0].logprobs]
            return (output.outputs[0].token_ids, steps), output.num_cached_tokens

        cold = []
        for prompt in prompts:
            llm.reset_prefix_cache()
            found, cached = answer(prompt)
            assert cached == 0
            cold.append(found)
        prompts.append(prompts[1] + cold[1][0] + [7, 8, 9])
        llm.reset_prefix_cache()
        cold.append(answer(prompts[-1])[0])
        llm.reset_prefix_cache()
        hits = []
        for _ in range(3):
            for prompt, wanted in zip(prompts, cold, strict=True):
                found, cached = answer(prompt)
                assert found == wanted
                hits.append(cached)
        assert {cached % 32 for cached in hits if cached} == {0, 16}
        assert hits[-1] >= 128


@pytest.mark.slow
@pytest.mark.timeout(600)  # in interpret mode the programs of three buckets compile for a minute
def test_kernels_for_nvidia_give_the_recorded_answers(tmp_path):
    """The programs of a GPU, in interpret mode: prompts of 1 to 131 tokens, in chunks next to decodes."""
    variant = BY_NAME["deepseek-v4"]
    golden = json.loads(variant.answers.read_text())
    assert write_checkpoint(variant, golden["seed"], tmp_path) == golden["sha256"], "another checkpoint"
    params = SamplingParams(temperature=0, max_tokens=variant.num_tokens, ignore_eos=True, logprobs=5)
    options = {"row_buckets": (8,), "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(str(tmp_path), dtype="float32", max_model_len=256, attention_implementation="triton", **options) as llm:
        prompts = [{"prompt_token_ids": answer["prompt"]} for answer in golden["answers"]]
        for answer, output in zip(golden["answers"], llm.generate(prompts, params, use_tqdm=False), strict=True):
            completion = output.outputs[0]
            assert completion.token_ids == answer["tokens"]
            for token, wanted, step in zip(answer["tokens"], answer["logprobs"], completion.logprobs, strict=True):
                assert step[token].logprob == pytest.approx(wanted, abs=1e-4)
