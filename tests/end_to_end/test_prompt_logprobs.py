"""Log-probabilities of prompts equal those of generation, bit for bit, for any chunk size and after preemption."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import RequestError
from jpaged.models import decoder
from jpaged.params.scoring import ScoringParams
from tests.support.tiny_engine import (
    BLOCK_SIZE,
    SPECS,
    VOCAB_SIZE,
    alone,
    make_engine,
    make_runner,
    run,
    sampling_programs,
)

pytestmark = pytest.mark.codegen

TOLERANCE = 1e-4  # float32, over logits of some tens


@pytest.fixture(scope="module", params=["full", pytest.param("windows", marks=pytest.mark.slow)])
def runner(request):
    runner = make_runner(SPECS[request.param])
    yield runner
    assert runner.compiles_after_ready == 0
    runner.close()


PROMPTS = [np.random.default_rng(i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate((1, 2, 9, 40, 77, 100))]
ASKED = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=4)


@pytest.fixture(scope="module")
def wanted(runner):
    engine = make_engine(runner, caching=False)
    return [run(engine, [(prompt, ASKED)], check=False)["0"].prompt_logprobs for prompt in PROMPTS]


def test_they_equal_a_dense_pass_over_the_prompt(runner, wanted):
    """The dense pass uses no pages."""
    spec = runner.spec
    params = runner.params

    @jax.jit
    def dense(ids):
        shape = jnp.zeros((1, len(ids)), jnp.int32)
        hidden, *_ = decoder.decode(
            spec, params, ids, jnp.arange(len(ids)), [None] * spec.num_layers, shape, decoder.dense_causal_attend
        )
        return jax.nn.log_softmax(decoder.lm_head(spec, params, hidden).astype(jnp.float32), axis=-1)

    for prompt, entries in zip(PROMPTS, wanted, strict=True):
        padded = np.zeros(len(PROMPTS[-1]), np.int32)  # one program for all lengths
        padded[: len(prompt)] = prompt
        exact = np.asarray(dense(padded))[: len(prompt)]
        assert entries[0] is None
        assert len(entries) == len(prompt)
        for before, token_id, entry in zip(exact, prompt[1:], entries[1:], strict=False):
            assert next(iter(entry)) == token_id
            assert set(np.argsort(-before, kind="stable")[:4]) <= set(entry)
            for other, value in entry.items():
                assert value.logprob == pytest.approx(before[other], abs=TOLERANCE)
                assert value.rank == 1 + (before > before[other]).sum()


@pytest.mark.parametrize("budget", [64, 20, 8])
def test_chunk_size_batch_and_a_full_cache_change_nothing(runner, wanted, budget):
    engine = make_engine(runner, budget=budget)
    others = [(prompt, SamplingParams(max_tokens=12, temperature=1, seed=1)) for prompt in PROMPTS]
    run(engine, others)  # now all prompts are cached; scoring must recompute them
    done = run(engine, [*((prompt, ASKED) for prompt in PROMPTS), *others])
    assert [done[str(i)].prompt_logprobs for i in range(len(PROMPTS))] == wanted
    assert all(done[str(i)].num_cached_tokens == 0 for i in range(len(PROMPTS)))
    assert sum(done[str(i)].num_cached_tokens for i in range(len(PROMPTS), 2 * len(PROMPTS))) > 0


def test_preempted(runner, wanted):
    engine = make_engine(runner, num_blocks=16 if len(runner.windows) == 1 else 26, budget=20)
    work = [(prompt, SamplingParams(max_tokens=28, temperature=0, prompt_logprobs=4)) for prompt in PROMPTS]
    done = run(engine, work)
    assert engine.stats().preemptions > 0
    assert [done[str(i)].prompt_logprobs for i in range(len(PROMPTS))] == wanted


def test_scoring_an_answer_equals_generation(runner):
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=3, logprobs=2)
    for prompt in PROMPTS[1:5]:
        [[(token_ids, _, _, logprobs)]] = alone(make_engine(runner), [(prompt, params)])
        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
        output = run(make_engine(runner, budget=25), [(prompt + token_ids, asked)])["0"]
        assert output.prompt_logprobs[len(prompt) :] == logprobs


def test_scoring_only_the_answer(runner):
    """The values of generation, and the prompt's KV is found in the prefix cache. `test_scores.py` has more."""
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, n=2, seed=3, logprobs=0)
    engine = make_engine(runner, budget=25)
    prompt = PROMPTS[-2]
    output = run(engine, [(prompt, params)])["0"]
    texts = [(prompt + answer.token_ids, ScoringParams(params, len(prompt))) for answer in output.outputs]
    for number, scored in run(engine, texts).items():
        answer = output.outputs[int(number)]
        wanted = [entry[token_id].logprob for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert scored.score.logprobs.tolist() == wanted
        assert scored.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


TEXT = "def area(width, height):\n    return width * height\n"
DEMO = {
    "max_model_len": 256, "max_logprobs": 5, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,),
    "token_buckets": (64,),
}  # fmt: skip


def test_llm_score():
    text = TEXT
    with sampling_programs(SamplerVariant.GREEDY), LLM("demo", **DEMO) as llm:
        good, bad = llm.score([text, text[::-1]], use_tqdm=False)
        assert good.prompt_token_ids == llm.get_tokenizer().encode(text)
        assert len(good.logprobs) == len(good.ranks) == len(good.prompt_token_ids) - 1
        assert good.cumulative_logprob / len(good.logprobs) > bad.cumulative_logprob / len(bad.logprobs) + 2
        assert (good.ranks == 1).sum() > len(good.ranks) / 3
        ids = good.prompt_token_ids
        [part] = llm.score([ids], num_prompt_tokens=5, use_tqdm=False)
        assert part.logprobs.tolist() == good.logprobs[4:].tolist()
        assert (part.logprobs.dtype, part.ranks.dtype) == (np.float32, np.int32)
        with pytest.raises(RequestError, match=r"num_prompt_tokens.* at most 5.*in prompt 1 of 2"):
            llm.score([ids, ids[:5]], num_prompt_tokens=6, use_tqdm=False)
        [output] = llm.generate(text, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3), use_tqdm=False)
        names = [next(iter(entry.values())).decoded_token for entry in output.prompt_logprobs[1:]]
        assert "".join(names) == text[len(text) - sum(map(len, names)) :]
        with pytest.raises(RequestError, match=r"^prompt_logprobs.* at most 5.*, got 6"):
            llm.generate(text, SamplingParams(temperature=0, prompt_logprobs=6), use_tqdm=False)
        assert llm.stats().compiles_after_ready == 0


def test_several_answers_score_the_prompt_once(runner, wanted):
    """Also if there are more answers than rows: the prompt is computed and scored once."""
    prompt = PROMPTS[-1]
    engine = make_engine(runner)
    several = SamplingParams(max_tokens=4, n=24, seed=1, prompt_logprobs=2, ignore_eos=True)
    one = run(make_engine(runner), [(prompt, dataclasses.replace(several, n=1))])["0"]
    output = run(engine, [(prompt, several)])["0"]
    assert output.prompt_logprobs == one.prompt_logprobs
    assert output.outputs[0].token_ids == one.outputs[0].token_ids
    assert engine.stats().prompt_tokens < 2 * len(prompt)


@pytest.mark.parametrize("mode", ["raw_logprobs", pytest.param("processed_logprobs", marks=pytest.mark.slow)])
def test_async_score_equals_score(mode):
    """Bit for bit, for several texts at a time."""
    params = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    asked = [(TEXT * count, one) for count in (1, 5) for one in (None, params)]

    async def scored(engine):
        return await asyncio.gather(*(engine.score(text, one, num_prompt_tokens=3) for text, one in asked))

    with sampling_programs(SamplerVariant.GREEDY):
        with LLM("demo", logprobs_mode=mode, **DEMO) as llm:
            wanted = [llm.score(text, one, num_prompt_tokens=3, use_tqdm=False)[0] for text, one in asked]
        engine = AsyncLLM("demo", logprobs_mode=mode, **DEMO)
        try:
            found = asyncio.run(scored(engine))
        finally:
            engine.close()
    for one, other in zip(found, wanted, strict=True):
        assert (one.prompt_token_ids, one.num_prompt_tokens) == (other.prompt_token_ids, 3)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.ranks, other.ranks)
    assert (wanted[0].logprobs.tolist() == wanted[1].logprobs.tolist()) == (mode == "raw_logprobs")
