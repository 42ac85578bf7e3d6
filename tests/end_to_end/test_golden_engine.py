"""Every family and variant through the engine: a batch of all prompts gives Transformers' answer to each prompt."""

import json

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from tests.golden.checkpoints import FULL_SIZE, VARIANTS, write_checkpoint
from tests.support.tiny_engine import sampling_programs

TOLERANCE = 1e-4  # on natural logarithms


# Slow: the default run compares the models without the engine (tests/models), and two of them in it (tests/loading).
@pytest.mark.slow
@pytest.mark.timeout(900)  # FULL_SIZE writes 1 GB, loads it as 4 GB, and computes in float32
@pytest.mark.parametrize(
    "variant",
    # 5 GB of memory for 1 to 3 minutes: not in the gate, which has the same format with small matrices
    [
        *(pytest.param(v, id=v.name) for v in VARIANTS),
        pytest.param(FULL_SIZE, id=FULL_SIZE.name, marks=pytest.mark.soak),
    ],
)
def test_one_batch_gives_transformers_answers(variant, tmp_path):
    """Prompts of 1 to 131 tokens, prefilled in chunks in the same steps as decodes, over blocks in any order."""
    golden = json.loads(variant.answers.read_text())
    assert write_checkpoint(variant, golden["seed"], tmp_path) == golden["sha256"], "another checkpoint"
    options = {"row_buckets": (8,), "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}
    options["max_model_len"] = 256
    if variant.name == "gpt-oss-mxfp4":  # its experts would be multiplied by activations in 8 bits
        options["quantized_activations"] = "float"
    with sampling_programs(SamplerVariant.FULL), LLM(str(tmp_path), dtype="float32", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=variant.num_tokens, ignore_eos=True, logprobs=5)
        prompts = [{"prompt_token_ids": answer["prompt"]} for answer in golden["answers"]]
        for outputs in (llm.generate(prompts, params, use_tqdm=False), llm.generate(prompts[::-1], params)[::-1]):
            for answer, output in zip(golden["answers"], outputs, strict=True):
                completion = output.outputs[0]
                assert completion.token_ids == answer["tokens"]
                for i, step in enumerate(completion.logprobs):
                    recorded = {answer["tokens"][i]: answer["logprobs"][i]}
                    recorded |= dict(zip(answer["top_tokens"][i], answer["top_logprobs"][i], strict=True))
                    assert max(abs(step[token].logprob - value) for token, value in recorded.items()) < TOLERANCE
        assert llm.stats().compiles_after_ready == 0
        assert llm.stats().used_blocks == 0
