"""`score` returns the log-probabilities of generation: every difference is exactly 0.

In all `logprobs_mode`s, for all parameters that it applies, with prefix hits, any chunk size, preemption, several
answers and drafts.
"""

import dataclasses

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import LOGPROBS_MODES
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import RequestError
from jpaged.params.scoring import ScoringParams
from jpaged.speculation_config import SpeculationConfig
from tests.support.tiny_engine import SPECS, VOCAB_SIZE, make_engine, make_runner, run, sampling_programs

pytestmark = [pytest.mark.slow, pytest.mark.codegen]

PROMPTS = [np.random.default_rng(i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate((1, 9, 40, 70))]
PARAMS = [
    SamplingParams(**fields, seed=number, max_tokens=24, ignore_eos=True, logprobs=2)
    for number, fields in enumerate((
        {"temperature": 0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 9},
        {"temperature": 2.5, "top_k": 100, "top_p": 0.99},  # more ids than candidates: the whole vocabulary is searched
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"typical_p": 0.7, "top_n_sigma": 2.5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "temperature": 0.8},
        {"repetition_penalty": 1.5, "temperature": 0},
        {"logit_bias": {5: 3.0, 9: -4.0}, "allowed_token_ids": range(100)},
        {"min_tokens": 9, "stop_token_ids": range(0, 256, 3), "temperature": 0.8, "top_k": 40},
    ))
]  # fmt: skip


@pytest.fixture(scope="module", params=LOGPROBS_MODES)
def runner(request):
    with sampling_programs(SamplerVariant.FULL):
        runner = make_runner(SPECS["full"], logprobs_mode=request.param)
    yield runner
    assert runner.compiles_after_ready == 0
    runner.close()


@pytest.fixture(scope="module")
def answers(runner):
    """(prompt, parameters, answer) of all prompts with all parameters, from a batch."""
    return generated(make_engine(runner), [(prompt, params) for prompt in PROMPTS for params in PARAMS])


def generated(engine, work, **options):
    done = run(engine, work, **options)
    return [
        (prompt, params, answer)
        for number, (prompt, params) in enumerate(work) for answer in done[str(number)].outputs
    ]  # fmt: skip


def check(engine, answers, **options):
    """Scoring the answers gives the values of generation, and their ranks. Returns cached tokens of all texts."""
    work = [(prompt + answer.token_ids, ScoringParams(params, len(prompt))) for prompt, params, answer in answers]
    done = run(engine, work, **options)
    for number, (prompt, _, answer) in enumerate(answers):
        score = done[str(number)].score
        entries = [entry[token_id] for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert score.num_prompt_tokens == len(prompt)
        assert done[str(number)].outputs[0].finish_reason in ("length", "stop")
        np.testing.assert_array_equal(score.logprobs, np.array([entry.logprob for entry in entries], np.float32))
        assert score.ranks.tolist() == [entry.rank for entry in entries]
    return sum(output.num_cached_tokens for output in done.values())


@pytest.mark.parametrize("budget", [64, 20, 8])
def test_chunks_and_prefix_hits(runner, answers, budget):
    assert check(make_engine(runner, budget=budget, caching=False), answers) == 0
    engine = make_engine(runner, budget=budget)
    generated(engine, [(prompt, params) for prompt, params, _ in answers[: len(PARAMS)]])
    assert check(engine, answers) >= (len(PARAMS) - 1) * (32 + 64)  # all texts but the first of each prompt


def test_preemption(runner, answers):
    engine = make_engine(runner, num_blocks=18, budget=20)
    check(engine, answers[2 * len(PARAMS) :])
    work = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    again = generated(make_engine(runner, num_blocks=18), work)
    assert [each[2].logprobs for each in again] == [each[2].logprobs for each in answers]
    last = answers[2 * len(PARAMS) :]
    scored = [(prompt + answer.token_ids, ScoringParams(params, 1)) for prompt, params, answer in last]
    others = [(prompt, dataclasses.replace(params, max_tokens=40)) for prompt, params, _ in last]
    first = run(make_engine(runner), scored)
    engine = make_engine(runner, num_blocks=18, budget=12)
    second = run(engine, [*others[:6], *scored])
    assert engine.stats().preemptions > 0
    for number in range(len(scored)):
        np.testing.assert_array_equal(first[str(number)].score.logprobs, second[str(number + 6)].score.logprobs)


def test_several_answers(runner):
    work = [(PROMPTS[2], dataclasses.replace(params, n=3)) for params in PARAMS[1:7:2]]
    answers = generated(make_engine(runner), work)
    assert len(answers) == 9
    check(make_engine(runner), answers)


def test_the_models_own_distribution(runner, answers):
    """Without sampling parameters, and in raw modes with any, the values are those of `prompt_logprobs`."""
    text = answers[-1][0] + answers[-1][2].token_ids
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    entries = run(make_engine(runner), [(text, ask)])["0"].prompt_logprobs
    wanted = [entry[token_id].logprob for entry, token_id in zip(entries[1:], text[1:], strict=True)]
    given = [ScoringParams()] if "processed" in runner.logprobs_mode else [ScoringParams(), ScoringParams(PARAMS[6])]
    for params in given:
        assert run(make_engine(runner), [(text, params)])["0"].score.logprobs.tolist() == wanted
    whole = ScoringParams(None, len(text))
    assert len(run(make_engine(runner), [(text, whole)])["0"].score.logprobs) == 0


def test_what_is_refused(runner):
    def refused(match, params, count=1):
        with pytest.raises(RequestError, match=match):
            make_engine(runner).add_request("0", {"prompt_token_ids": [1, 2, 3]}, ScoringParams(params, count))

    refused("^num_prompt_tokens.*integer from 1", None, 0)
    refused("^num_prompt_tokens.*at most 3", None, 4)
    refused("^sampling_params", {"temperature": 1})
    if "processed" in runner.logprobs_mode:
        refused("^use_beam_search", SamplingParams(use_beam_search=True, n=2))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_drafts(mode):
    fields = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    runner = make_runner(SPECS["full"], logprobs_mode=mode, speculative_config=SpeculationConfig.from_fields(fields))
    engine = make_engine(runner, drafts=fields)
    answers = generated(engine, [(prompt * 2, params) for prompt in PROMPTS[:3] for params in PARAMS])
    assert engine.stats().speculation.draft_tokens > 0
    check(make_engine(runner), answers)
    runner.close()


@pytest.fixture(scope="module")
def demo():
    """The demo model, which has a tokenizer."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,)}
    with (
        sampling_programs(SamplerVariant.FULL),
        LLM("demo", logprobs_mode="processed_logprobs", max_model_len=256, **options) as llm,
    ):
        yield llm


CODE = "def area(width, height):\n    return "
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=120, ignore_eos=True, logprobs=0)
OBJECT = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "value": {"type": "integer"}}}
CHANGING = {
    "bad words": {"bad_words": ["self.", "os.", ")"]},  # not drawn after their other tokens
    "schema": {"structured_outputs": {"json": OBJECT | {"required": ["name", "value"]}}},
    "schema, then an end token": {"structured_outputs": {"json": OBJECT}, "ignore_eos": False},
    "regex": {"structured_outputs": {"regex": r"[a-c]{2,9}-\d+"}, "repetition_penalty": 1.3},
    "choice": {"structured_outputs": {"choice": ["width * height", "height"]}},
    "budget": {"reasoning_tags": ("return", "height"), "thinking_token_budget": 4},  # the prompt opens the reasoning
    "grammar after reasoning": {
        "reasoning_tags": ("return", "height"), "thinking_token_budget": 9,
        "structured_outputs": {"regex": "[a-c]{2,9}"},
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", CHANGING.values(), ids=CHANGING)
def test_masks_that_change_with_every_token(demo, fields):
    """With the prefix cache, which has the prompt, and without. The demo model's chunks have 64 tokens."""
    params = dataclasses.replace(DRAWN, n=3, **fields)
    [output] = demo.generate(CODE, params, use_tqdm=False)
    prompt = output.prompt_token_ids
    values = [
        [entry[token_id].logprob for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
        for answer in output.outputs
    ]
    texts = [prompt + answer.token_ids for answer in output.outputs]

    def scores(params):
        scored = demo.score(texts, params, num_prompt_tokens=len(prompt), use_tqdm=False)
        return [one.logprobs.tolist() for one in scored]

    assert scores(params) == values
    demo.reset_prefix_cache()
    assert scores(params) == values
    assert all(a != b for a, b in zip(scores(DRAWN), values, strict=True))


def test_text_that_its_grammar_does_not_allow(demo):
    """It has the probability 0 from there on. After the end of the grammar only the end token can be drawn."""
    encode = demo.get_tokenizer().encode
    params = SamplingParams(temperature=0.7, structured_outputs={"regex": "[a-z]{3}-[0-9]"})
    prompt, end = encode(CODE), demo.get_tokenizer().eos_token_id

    def score(answer):
        scored = demo.score([prompt + answer], params, num_prompt_tokens=len(prompt), use_tqdm=False)[0]
        return scored.logprobs.tolist()

    letter, dash, digit = (encode(text)[-1:] for text in ("a", "-", "7"))
    inside = score(letter * 3 + dash + digit)
    assert all(-np.inf < value <= 0 for value in inside)
    assert score(letter * 3 + dash + digit + [end, end]) == [*inside, 0, -np.inf]
    assert score(letter * 3 + digit + dash + digit) == [*inside[:3], -np.inf, -np.inf, -np.inf]
    assert score(letter * 3 + dash + digit + digit + letter) == [*inside, -np.inf, -np.inf]
    assert all(value > -np.inf for value in score(letter))
