"""Sampling masks of whole engines: the ids that an oracle keeps, for any batch, with preemption, drafts and streams.

`test_sampling_against_oracle.py` compares the masks of the sampler with the oracle for all pairs of parameters.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.params.sampling import RequestOutputKind
from jpaged.params.scoring import ScoringParams
from jpaged.speculation_config import SpeculationConfig
from tests.sampling.sampling_oracle import distribution, log_softmax
from tests.support.tiny_engine import SPECS, VOCAB_SIZE, make_engine, make_runner, run, sampling_programs

pytestmark = [pytest.mark.slow, pytest.mark.codegen]

MODE = {"logprobs_mode": "processed_logprobs", "return_sampling_mask": True}
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate((1, 9, 40, 70))]
PARAMS = [
    SamplingParams(**fields, seed=number, max_tokens=20, ignore_eos=True, logprobs=0)
    for number, fields in enumerate((
        {"temperature": 1.3, "top_k": 9},
        {"temperature": 4.0, "top_k": 100, "top_p": 0.99},  # more ids than candidates: the whole vocabulary is searched
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"typical_p": 0.7, "top_n_sigma": 2.5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 1.5, "top_p": 0.9},
        {"logit_bias": {5: 3.0, 9: -4.0}, "allowed_token_ids": range(0, 100, 3), "top_k": 50},
    ))
]  # fmt: skip
WORK = [(prompt, params) for prompt in PROMPTS for params in PARAMS]


@pytest.fixture(scope="module")
def runner():
    with sampling_programs(SamplerVariant.FULL):
        runner = make_runner(SPECS["full"], max_logprobs=-1, **MODE)
    yield runner
    assert runner.compiles_after_ready == 0
    runner.close()


@pytest.fixture(scope="module")
def answers(runner):
    done = run(make_engine(runner), WORK)
    return [done[str(number)].outputs[0] for number in range(len(WORK))]


def ids(answer):
    return [one.tolist() for one in answer.sampling_mask.token_ids]


def test_they_are_the_ids_that_the_oracle_keeps(runner, answers):
    """The oracle gets the model's log-probabilities of all ids as logits: filters depend only on differences."""
    texts = [prompt + answer.token_ids for (prompt, _), answer in zip(WORK, answers, strict=True)]
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    done = run(make_engine(runner), [(text, ask) for text in texts])
    checked = 0
    for number, ((prompt, params), answer) in enumerate(zip(WORK, answers, strict=True)):
        if params.repetition_penalty != 1:
            continue  # it depends on more than differences
        mask = answer.sampling_mask.dense(VOCAB_SIZE)
        entries = done[str(number)].prompt_logprobs[len(prompt) :]
        for i, (token_id, entry) in enumerate(zip(answer.token_ids, entries, strict=True)):
            logits = np.array([entry[each].logprob for each in range(VOCAB_SIZE)])
            output_ids = answer.token_ids[:i]
            oracle = distribution(logits, params=params, prompt_ids=prompt, output_ids=output_ids)
            assert oracle.accepts(mask[i]), params
            wanted = log_softmax(np.where(mask[i], oracle.scaled_logits, -np.inf))[token_id]
            assert answer.logprobs[i][token_id].logprob == pytest.approx(wanted, abs=2e-5)
            checked += 1
    assert checked == 20 * 20


def test_forms(answers):
    for answer in answers:
        mask, count = answer.sampling_mask, len(answer.token_ids)
        flat, offsets = mask.flat()
        assert [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)] == ids(answer)
        assert (flat.dtype, offsets.dtype, len(offsets)) == (np.int32, np.int32, count + 1)
        most = max(map(len, mask.token_ids))
        padded = mask.padded(most + 1)
        assert [row[row >= 0].tolist() for row in padded] == ids(answer)
        with pytest.raises(ValueError, match=f"width={most - 1}: a token has {most}"):
            mask.padded(most - 1)
        assert [np.flatnonzero(row).tolist() for row in mask.dense(VOCAB_SIZE)] == ids(answer)
        largest = max(map(max, mask.token_ids))
        assert mask.dense(largest + 1).shape == (count, largest + 1)
        with pytest.raises(ValueError, match=f"vocab_size={largest}: the mask has the id {largest:,}"):
            mask.dense(largest)


def test_batch_chunks_preemption_and_several_answers_change_nothing(runner, answers):
    engine = make_engine(runner, num_blocks=18, budget=12)
    done = run(engine, WORK)
    assert engine.stats().preemptions > 0
    assert [ids(done[str(number)].outputs[0]) for number in range(len(WORK))] == list(map(ids, answers))
    several = run(make_engine(runner), [(PROMPTS[1], dataclasses.replace(PARAMS[1], n=3))])["0"].outputs
    assert ids(several[0]) == ids(answers[len(PARAMS) + 1])
    assert ids(several[1]) != ids(several[0])


def test_only_requests_that_drop_ids_have_one(runner):
    plain = SamplingParams(seed=1, max_tokens=4)
    others = [
        plain, SamplingParams(temperature=0, top_k=5, max_tokens=4),
        dataclasses.replace(PARAMS[0], return_sampling_mask=False),
        SamplingParams(use_beam_search=True, n=2, max_tokens=4),
    ]  # fmt: skip
    done = run(make_engine(runner), [(PROMPTS[1], params) for params in (PARAMS[0], *others)])
    masks = [done[str(number)].outputs[0].sampling_mask for number in range(5)]
    assert masks[0] is not None
    assert masks[1:] == [None] * 4


def test_without_log_probabilities(runner, answers):
    params = [dataclasses.replace(params, logprobs=None) for params in PARAMS]
    done = run(make_engine(runner), [(PROMPTS[0], one) for one in params])
    for number in range(len(PARAMS)):
        assert ids(done[str(number)].outputs[0]) == ids(answers[number])
        assert done[str(number)].outputs[0].logprobs is None


def test_streams(runner, answers):
    engine, parts = make_engine(runner), []
    params = dataclasses.replace(PARAMS[0], output_kind=RequestOutputKind.DELTA)
    engine.add_request("0", {"prompt_token_ids": PROMPTS[0]}, params, stream=True)
    while engine.has_work:
        parts += engine.step()
    assert len(parts) > 10
    assert [one for part in parts for one in ids(part.outputs[0])] == ids(answers[0])
    joined = parts[0].followed_by(parts[1])
    assert ids(joined.outputs[0]) == ids(answers[0])[: len(joined.outputs[0].token_ids)]


def test_a_trainer_computes_the_same_distribution(runner, answers):
    """Scores of new weights use the new filter. The mask keeps the old one, so that ratios are of one set of ids."""
    (prompt, params), answer = WORK[0], answers[0]
    text = prompt + answer.token_ids
    whole = run(make_engine(runner), [(text, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1))])["0"]
    output = run(make_engine(runner), [(text, ScoringParams(params, len(prompt)))])["0"]
    score = output.score
    assert (output.outputs[0].finish_reason, output.outputs[0].sampling_mask) == ("length", None)
    for i, entry in enumerate(whole.prompt_logprobs[len(prompt) :]):
        kept = [math.exp(entry[each].logprob / params.temperature) for each in ids(answer)[i]]
        own = math.exp(entry[answer.token_ids[i]].logprob / params.temperature)
        assert score.logprobs[i] == pytest.approx(math.log(own / sum(kept)), abs=1e-5)


def test_drafts():
    fields = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    runner = make_runner(SPECS["full"], speculative_config=SpeculationConfig.from_fields(fields), **MODE)
    work = [(prompt * 2, params) for prompt in PROMPTS[:3] for params in PARAMS]
    plain, engine = run(make_engine(runner), work), make_engine(runner, drafts=fields)
    drafted = run(engine, work)
    assert engine.stats().speculation.draft_tokens > 0
    for number, output in plain.items():
        assert ids(drafted[number].outputs[0]) == ids(output.outputs[0])
    runner.close()
