"""All recorded beam searches of a model run in parallel. Each gives the answer that Transformers gave for it alone."""

import json

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from tests.golden.beams import cases
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.support.tiny_engine import sampling_programs

TOLERANCE = 1e-4  # on natural logarithms
ROOMY = {"row_buckets": (32,), "token_buckets": (64,), "max_num_seqs": 32, "max_num_batched_tokens": 64}
# Blocks for little more than one search: beams are preempted often, and find part of their KV in the prefix index.
FEW_BLOCKS = {"llama": 34}
# Fewer rows than the widest search has beams.
FEW_ROWS = {"gpt2": {"row_buckets": (8,), "max_num_seqs": 8}}
# The usual run takes three: few blocks, few rows, layers of two kinds.
SLOW = ("gpt2", "gemma3", "qwen3", "gemma2", "mistral-window", "qwen3-moe")
VARIANTS = [pytest.param(v, marks=[pytest.mark.slow] * (v in SLOW)) for v in dict.fromkeys(c.variant for c in cases())]


def sampling_params(wanted):
    """The same search as sampling parameters."""
    return SamplingParams(
        use_beam_search=True, beam_width=wanted.width, n=wanted.num_return_sequences, temperature=0,
        length_penalty=wanted.length_penalty, early_stopping=wanted.early_stopping, max_tokens=wanted.max_new_tokens,
        stop_token_ids=list(wanted.end_token_ids), ignore_eos=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_searches_at_once_give_transformers_answers(variant, tmp_path):
    searches = [case for case in cases() if case.variant == variant]
    seed = json.loads(BY_NAME[variant].answers.read_text())["seed"]
    write_checkpoint(BY_NAME[variant], seed, tmp_path)
    options = ROOMY | FEW_ROWS.get(variant, {})
    blocks = FEW_BLOCKS.get(variant)
    if blocks is not None:
        options["kv_cache_memory_bytes"] = blocks * _block_bytes(BY_NAME[variant].config)
    options |= {"dtype": "float32", "max_model_len": 80}
    with sampling_programs(SamplerVariant.FULL), LLM(str(tmp_path), **options) as llm:
        prompts = [{"prompt_token_ids": case.prompt} for case in searches]
        outputs = llm.generate(prompts, [sampling_params(case.params) for case in searches], use_tqdm=False)
        stats = llm.stats()
    for case, output in zip(searches, outputs, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in case.answers], case
        for given, answer in zip(output.outputs, case.answers, strict=True):
            assert given.cumulative_logprob == pytest.approx(answer.cumulative_logprob, abs=TOLERANCE), case
            ended = given.token_ids[-1] in case.params.end_token_ids
            assert given.finish_reason == ("stop" if ended else "length"), case
            # the score that Transformers compares: the sum over the length, end token included
            score = given.cumulative_logprob / len(given.token_ids) ** case.params.length_penalty
            assert score == pytest.approx(answer.score, abs=TOLERANCE), case
    assert stats.copied_blocks > 0
    assert stats.used_blocks == stats.compiles_after_ready == 0
    if blocks is not None:
        assert stats.preemptions > 5
        assert stats.peak_used_blocks > 0.9 * blocks
    if variant in FEW_ROWS:
        assert stats.preemptions > 20


def _block_bytes(config):
    """Bytes of a block: keys and values of 16 tokens in all layers, in float32."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * 16 * config["num_key_value_heads"] * head_dim * 4 * config["num_hidden_layers"]
