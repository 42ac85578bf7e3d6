"""Pooling: from a vector to an output, and pooled requests in an engine without a device."""

import random

import numpy as np
import pytest

from jpaged import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingParams,
    RequestError,
    SamplingParams,
    TokenPoolingOutput,
)
from jpaged.engine.engine import Engine, EngineOptions, StepError
from jpaged.engine.strategies.pooled_outputs import Activation, Pooling, activation_of, labels_of
from jpaged.errors import LogitsError
from tests.engine.fake_runner import FakeRunner, PoolingRunner, next_token

EMBEDS = Pooling(2)


def raw(prompt, vocab_size=97):
    return EmbeddingOutput([float(next_token(prompt, vocab_size)), 1.0])


def given(pooled):
    return pooled.data.tolist() if isinstance(pooled, TokenPoolingOutput) else pooled


@pytest.mark.parametrize("num_blocks", [16, 64])
def test_every_prompt_is_pooled_at_its_end_and_all_blocks_are_freed(num_blocks):
    """Chunks, shared prefixes, aborted requests, vectors of all tokens, and a pool that fits one long prompt."""
    rng, runner = random.Random(1), PoolingRunner(num_blocks=num_blocks)
    engine, wanted, got = Engine(runner, options=EngineOptions(pooling=EMBEDS)), {}, {}
    shared = [rng.randrange(97) for _ in range(64)]
    for i in range(120):
        prompt = shared[: rng.choice([0, 8, 30])] + [rng.randrange(97) for _ in range(rng.randint(1, 34))]
        task = rng.choice([None, "embed", "token_embed"])
        wanted[str(i)] = [[token_id, 1] for token_id in prompt] if task == "token_embed" else raw(prompt)
        params = PoolingParams(normalize=False, task=task)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params, stream=i % 2 == 0)
        for _ in range(rng.choice([0, 1, 2])):
            got |= {output.request_id: output for output in engine.step()}
        if rng.random() < 0.1:
            for output in engine.abort([str(i)]):
                assert output.outputs is None
                assert output.finished
                got[str(i)] = output
                wanted[str(i)] = None
    while engine.has_work:
        got |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    assert {i: given(output.outputs) for i, output in got.items()} == wanted
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 100
    assert (stats.used_blocks, stats.generated_tokens, stats.finished_requests) == (0, 0, 120)


def test_a_prompt_may_fill_the_model():
    engine = Engine(PoolingRunner(), options=EngineOptions(pooling=EMBEDS))
    engine.add_request("a", {"prompt_token_ids": [5] * 64}, PoolingParams(normalize=False))
    with pytest.raises(RequestError, match="has 65 tokens, a prompt takes at most 64"):
        engine.add_request("b", {"prompt_token_ids": [5] * 65}, PoolingParams())
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.outputs for output in outputs] == [raw([5] * 64)]


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_vector_that_is_not_finite_ends_its_request_only(task):
    """Its JSON would have null in place of numbers, and a vector index would keep it."""

    class Damaged(PoolingRunner):
        def _result(self, plan, tokens):
            result = super()._result(plan, tokens)
            for vectors in (result.pooled, result.pooled_tokens):
                vectors[vectors[:, 0] == bad] = np.nan
            return result

    prompts = {"bad": [5, 7], "good": [6, 8, 9]}
    bad = 7 if task == "token_embed" else next_token(prompts["bad"], 97)
    engine = Engine(Damaged(), options=EngineOptions(pooling=EMBEDS))
    for name, prompt in prompts.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, PoolingParams(normalize=False, task=task))
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert (outputs["bad"].outputs, outputs["bad"].error) == (None, LogitsError.message)
    assert outputs["good"].error is None
    assert given(outputs["good"].outputs) == ([[6, 1], [8, 1], [9, 1]] if task == "token_embed" else raw([6, 8, 9]))
    assert engine.metrics().corrupted_requests == 1


def test_a_failed_step_ends_its_requests_only():
    runner = PoolingRunner(max_num_seqs=1, fail_at=frozenset({("collect", 0)}))
    engine = Engine(runner, options=EngineOptions(pooling=EMBEDS))
    for name in "ab":
        engine.add_request(name, {"prompt_token_ids": [5] * 10}, PoolingParams(normalize=False))
    engine.step()
    with pytest.raises(StepError) as caught:
        engine.step()
    assert caught.value.request_ids == ("a",)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [(output.request_id, output.outputs) for output in outputs] == [("b", raw([5] * 10))]


def test_sampling_and_pooling_requests_need_their_own_engine():
    prompt = {"prompt_token_ids": [5]}
    with pytest.raises(RequestError, match=r"^runner: the engine does not generate: call embed\(\).*, got 'pooling'"):
        Engine(PoolingRunner(), options=EngineOptions(pooling=EMBEDS)).add_request("a", prompt, SamplingParams())
    with pytest.raises(RequestError, match=r"^runner: the engine generates.*, got 'generate'"):
        Engine(FakeRunner()).add_request("a", prompt, PoolingParams())


def test_embeddings():
    state = np.array([3.0, 4.0], np.float32)
    assert EMBEDS.output(state, PoolingParams()) == EmbeddingOutput(np.float32([0.6, 0.8]).tolist())
    assert EMBEDS.output(state, PoolingParams(normalize=False)) == EmbeddingOutput([3.0, 4.0])
    assert EMBEDS.output(state, PoolingParams(dimensions=1)) == EmbeddingOutput([1.0])
    assert EMBEDS.output(np.zeros(2, np.float32), PoolingParams()) == EmbeddingOutput([0.0, 0.0])


def test_probabilities_of_any_scores():
    scores = np.array([1000.0, -1000.0, 998.0], np.float32)
    softmax = Pooling(3, Activation.SOFTMAX).output(scores, PoolingParams())
    assert np.allclose(softmax.probs, [1 / (1 + np.exp(-2)), 0, 1 / (1 + np.exp(2))])
    sigmoid = Pooling(3, Activation.SIGMOID).output(np.array([1000, -1000, 1], np.float32), PoolingParams())
    assert np.allclose(sigmoid.probs, [1, 0, 1 / (1 + np.exp(-1))])
    for pooling, params in (
        (Pooling(3, Activation.NONE), PoolingParams()),
        (Pooling(3, Activation.SOFTMAX), PoolingParams(activation=False)),
    ):
        assert pooling.output(scores, params) == ClassificationOutput(scores.tolist())


def test_the_activation_is_read_from_the_config():
    assert activation_of({}, 1) is Activation.SIGMOID
    assert activation_of({"problem_type": None}, 2) is Activation.SOFTMAX
    assert activation_of({"problem_type": "single_label_classification"}, 1) is Activation.SOFTMAX


def test_labels_have_the_names_of_the_config():
    assert labels_of({"id2label": {"0": "bad", "1": "good"}}, 2) == ("bad", "good")
    assert labels_of({"id2label": {"1": "good"}}, 2) == ("LABEL_0", "good")
    assert labels_of({}, 1) == ("LABEL_0",)


def test_a_prompt_is_cut_to_the_tokens_to_keep():
    engine = Engine(PoolingRunner(num_blocks=64), options=EngineOptions(pooling=EMBEDS))
    prompt = list(range(90))
    for given, wanted in (
        ({"truncate_prompt_tokens": 3}, prompt[:3]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, prompt[-3:]),
        ({"truncate_prompt_tokens": -1}, prompt[: engine.runner.max_model_len]),
        ({"truncate_prompt_tokens": engine.runner.max_model_len}, prompt[: engine.runner.max_model_len]),
    ):
        engine.add_request("a", prompt, PoolingParams(normalize=False, **given))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [(output.prompt_token_ids, output.outputs) for output in outputs] == [(wanted, raw(wanted))]
    with pytest.raises(RequestError, match="truncation_side"):
        PoolingParams(truncation_side="left")
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        engine.add_request("a", prompt, PoolingParams(truncate_prompt_tokens=engine.runner.max_model_len + 1))
