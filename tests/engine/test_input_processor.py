"""Accepted forms of prompts, and the errors for bad prompts and parameters."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.engine.input.input_processor import InputProcessor, ModelLimits
from jpaged.engine.strategies.pooled_outputs import Pooling
from jpaged.errors import RequestError
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.params.scoring import ScoringParams

LIMITS = ModelLimits(vocab_size=100, max_model_len=16, max_logprobs=5, eos_token_ids=(7, 8), eos_token_id=9)


class Letters:
    """A tokenizer with one token per letter. The model has no token for `Z`."""

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool = True) -> list[int]:
        assert not verbose, "warns of lengths that are checked here"
        return [ord(letter) - ord("A") if letter != "Z" else 100 for letter in text]

    def get_vocab(self) -> dict[str, int]:
        return {"A": 0, "BB": 1}


INPUTS = InputProcessor(LIMITS, Letters())


def process(prompt: Any, **fields: Any):
    return INPUTS.process("r", prompt, SamplingParams(**fields))


@pytest.mark.parametrize(
    "prompt",
    [
        "ABC",
        {"prompt": "ABC"},
        [0, 1, 2],
        (0, 1, 2),
        np.array([0, 1, 2], np.uint16),
        jnp.array([0, 1, 2]),
        {"prompt_token_ids": [0, np.int64(1), 2]},
        {"prompt_token_ids": np.arange(3)},
        {"prompt_token_ids": range(3), "prompt": None, "cache_salt": None},
    ],
)
def test_all_kinds_of_prompts(prompt: Any):
    group = process(prompt)
    assert group.prompt_token_ids == group.first.token_ids == [0, 1, 2]
    assert all(type(token_id) is int for token_id in group.prompt_token_ids)
    assert group.prompt == ("ABC" if "ABC" in str(prompt) else None)


class Framed(Letters):
    """Adds a token before and after every text."""

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool = True) -> list[int]:
        inner = super().encode(text, verbose=verbose)
        return [50, *inner, 51] if add_special_tokens else inner


@pytest.mark.parametrize(
    ("fields", "prompt", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [1, 2, 3, 4, 5], [3, 4, 5]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, np.arange(9), [6, 7, 8]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, range(40), [0, 1, 2]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3], [1, 2, 3]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, range(40), [36, 37, 38, 39]),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, range(40), list(range(25, 40))),
        ({"truncate_prompt_tokens": -1, "max_tokens": 99}, range(40), [39]),
        ({"truncate_prompt_tokens": 4}, "ABCDEF", [50, 4, 5, 51]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "ABCDEF", [50, 0, 1, 51]),
        ({"truncate_prompt_tokens": 2}, "ABCDEF", [5, 51]),
        ({"truncate_prompt_tokens": 8}, "ABCDEF", [50, 0, 1, 2, 3, 4, 5, 51]),
        ({"truncate_prompt_tokens": 3}, "A" * 100_000 + "B", [50, 1, 51]),
    ],
)
def test_truncated_prompts(fields: dict[str, Any], prompt: Any, kept: list[int]):
    """The added tokens of a text are kept while there is room for at least one token of its own."""
    group = InputProcessor(LIMITS, Framed()).process("r", prompt, SamplingParams(**fields))
    assert group.prompt_token_ids == kept
    assert all(type(token_id) is int for token_id in group.prompt_token_ids)


def test_truncation_has_its_limits():
    with pytest.raises(RequestError, match="at most 15 tokens") as caught:
        process([1], truncate_prompt_tokens=16)
    assert caught.value.parameter == "truncate_prompt_tokens"
    with pytest.raises(RequestError, match="takes at most 131,072 at once: shorten it"):
        process("A" * 131_073, truncate_prompt_tokens=3)


def test_a_text_given_with_token_ids_is_kept_for_the_output():
    group = process({"prompt": "shown", "prompt_token_ids": [1]})
    assert (group.prompt, group.prompt_token_ids) == ("shown", [1])


@pytest.mark.parametrize(
    ("prompt", "parameter", "says"),
    [
        ("", "prompt", "must not be empty"),
        ([], "prompt_token_ids", "must not be empty"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "must not be empty"),
        ("A" * 16, "prompt", "has 16 tokens, a prompt takes at most 15"),
        ([1] * 17, "prompt_token_ids", "at most 15: shorten it"),
        ("B" * 1000, "prompt", "1,000 characters"),
        ([1, -1], "prompt_token_ids", "0 to 99"),
        ([100], "prompt_token_ids", "0 to 99"),
        ([2**70], "prompt_token_ids", "0 to 99"),
        (np.array([200]), "prompt_token_ids", "0 to 99"),
        ("AZ", "prompt_token_ids", "0 to 99"),
        ([1.0], "prompt_token_ids", "token 0 is not an integer"),
        ([1, True], "prompt_token_ids", "token 1 is not an integer"),
        ([1, "a"], "prompt_token_ids", "token 1 is not an integer"),
        (np.ones((2, 2), int), "prompt_token_ids", "one axis"),
        (np.ones(2), "prompt_token_ids", "not an integer"),
        ({"prompt_token_ids": "ABC"}, "prompt_token_ids", "list of token ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids", "list of token ids"),
        ({"prompt_token_ids": {1, 2}}, "prompt_token_ids", "list of token ids"),
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": "A", "cache_salt": 1}, "cache_salt", "must be a string"),
        ({}, "prompt", "must be a string"),
        ({"prompt": "A", "multi_modal_data": 1}, "multi_modal_data", "unknown field"),
        ({"prompt": "A", "prediction": 1}, "prediction", "must be a string, or a list of token ids"),
        ({"prompt": "A", "prediction": b"A"}, "prediction", "must be a string, or a list of token ids"),
        ({"prompt": "A", "prediction": ["A"]}, "prediction", "token 0 is not an integer"),
        ({"prompt": "A", "prediction": [1, 100]}, "prediction", "token 1: ids of this model are 0 to 99"),
        ({"prompt": "A", "prediction": "x\ud800"}, "prediction", "not valid Unicode: .* at character 1"),
        (None, "prompt", "must be a string"),
        (5, "prompt", "must be a string"),
        (b"ABC", "prompt", "must be a string"),
        ("A\ud800", "prompt", "not valid Unicode"),
        ({"prompt": "\udcff", "prompt_token_ids": [1]}, "prompt", "not valid Unicode"),
        ({"prompt": "A", "cache_salt": "x\ud800"}, "cache_salt", "not valid Unicode: .* at character 1"),
        (range(10**12), "prompt_token_ids", "has 1,000,000,000,000 tokens"),
        ([100] * 17, "prompt_token_ids", "has 17 tokens"),
        (np.full(17, 100), "prompt_token_ids", "has 17 tokens"),
    ],
)
def test_bad_prompts(prompt: Any, parameter: str, says: str):
    with pytest.raises(RequestError, match=says) as caught:
        process(prompt)
    assert caught.value.parameter == parameter


def test_the_longest_prompt_that_fits():
    assert process([1] * 15).first.max_total_tokens == 16


def test_text_needs_a_tokenizer():
    with pytest.raises(RequestError, match="no tokenizer"):
        InputProcessor(LIMITS).process("r", "ABC", SamplingParams())


def test_what_depends_on_the_model():
    with pytest.raises(RequestError, match="at most 5"):
        process("A", logprobs=6)
    with pytest.raises(RequestError, match="0 to 99") as caught:
        process("A", stop_token_ids=[99, 100])
    assert (caught.value.parameter, caught.value.value) == ("stop_token_ids", 100)
    with pytest.raises(RequestError, match="SamplingParams"):
        INPUTS.process("r", "A", {"temperature": 0})


def test_log_probabilities_of_the_whole_vocabulary():
    whole = InputProcessor(dataclasses.replace(LIMITS, max_logprobs=100), Letters())
    params = whole.process("r", "A", SamplingParams(logprobs=-1, prompt_logprobs=-1)).first.params
    assert (params.logprobs, params.prompt_logprobs) == (100, 100)
    with pytest.raises(RequestError, match="at most 5, which the option max_logprobs"):
        process("A", logprobs=-1)


def test_log_probabilities_of_named_ids():
    assert process("A", logprob_token_ids=[1, 2]).first.params.logprobs == 2
    for ids, says in (([1, 2, 3, 4, 5, 6], "at most 5"), ([100], "0 to 99")):
        with pytest.raises(RequestError, match=says) as caught:
            process("A", logprob_token_ids=ids)
        assert caught.value.parameter == "logprob_token_ids"


def test_sampling_masks_are_returned_only_where_they_can_be():
    masked = InputProcessor(dataclasses.replace(LIMITS, returns_sampling_mask=True), Letters())

    def asked(**fields):
        return masked.process("r", "A", SamplingParams(**fields)).first.params.return_sampling_mask

    assert asked(top_k=5) is asked(min_p=0.1, return_sampling_mask=True) is asked(allowed_token_ids=[1, 2]) is True
    assert asked(top_k=5, temperature=0) is asked() is asked(use_beam_search=True, n=2) is None
    assert asked(top_k=5, return_sampling_mask=False) is False
    assert process("A", top_k=5).first.params.return_sampling_mask is None
    wrong = [
        (masked, {"temperature": 0, "top_k": 5}, "temperature above 0"), (masked, {}, "no id is dropped"),
        (masked, {"use_beam_search": True, "n": 2, "top_k": 5}, "no beam search"),
        (INPUTS, {"top_k": 5}, "needs an engine with the option return_sampling_mask=True"),
    ]  # fmt: skip
    for inputs, fields, says in wrong:
        with pytest.raises(RequestError, match=says) as caught:
            inputs.process("r", "A", SamplingParams(**fields, return_sampling_mask=True))
        assert caught.value.parameter == "return_sampling_mask"


def test_routed_experts_need_the_engines_option():
    routing = InputProcessor(dataclasses.replace(LIMITS, returns_routed_experts=True), Letters())
    asked = [
        routing.process("r", "A", SamplingParams(**fields)).first.params.return_routed_experts
        for fields in ({}, {"return_routed_experts": False}, {"use_beam_search": True, "n": 2})
    ]
    assert asked == [True, False, None]
    first, second = routing.process("r", "ABC", SamplingParams(n=2)).requests
    assert (first.max_cached_tokens, second.max_cached_tokens) == (0, 2)
    with pytest.raises(RequestError, match="enable_return_routed_experts=True"):
        process("A", return_routed_experts=True)


def test_what_cannot_be_scored_is_refused():
    processed = InputProcessor(dataclasses.replace(LIMITS, processed_logprobs=True), Letters())
    given = SamplingParams(temperature=0.5, top_k=4, logit_bias={1: 2.0}, n=3, stop="B", max_tokens=5, logprobs=1)
    request = processed.process("r", "ABC", ScoringParams(given, 2)).first
    assert (request.score_from, request.scores_processed, request.max_total_tokens) == (2, True, 4)
    assert (request.params.temperature, request.params.top_k, request.params.n, request.params.stop) == (0.5, 4, 1, ())
    own = processed.process("r", "ABC", ScoringParams(None, 2)).first
    assert (own.scores_processed, own.params.greedy) == (False, True)
    beam = ScoringParams(SamplingParams(use_beam_search=True, n=2), 1)
    with pytest.raises(RequestError, match="use_beam_search"):
        processed.process("r", "ABC", beam)
    INPUTS.process("r", "ABC", beam)  # raw values do not depend on the parameters
    for count in (0, True, 4):
        with pytest.raises(RequestError, match="num_prompt_tokens"):
            INPUTS.process("r", "ABC", ScoringParams(None, count))


def test_where_a_request_ends():
    assert process("ABC", max_tokens=5).first.max_total_tokens == 8
    assert process("ABC", max_tokens=50).first.max_total_tokens == 16
    assert process("ABC", max_tokens=None).first.max_total_tokens == 16
    assert process("ABC").first.eos_token_ids == {7, 8, 9}
    assert process("ABC", ignore_eos=True).first.eos_token_ids == frozenset()


def test_several_answers_are_several_requests_of_one_prompt():
    sampled, best, beams = process("A", n=3), process("A", n=2, best_of=4), process("A", use_beam_search=True, n=2)
    assert [len(group.requests) for group in (sampled, best, beams)] == [3, 4, 2]
    assert [request.index for request in sampled.requests] == [0, 1, 2]
    assert all(request.metrics is sampled.metrics for request in sampled.requests)
    assert sampled.requests[0].token_ids is not sampled.requests[1].token_ids


def test_a_beam_search_needs_enough_candidates():
    """With e end tokens, the w best candidates that do not end are among the first w + e. The engine returns 5."""
    # the model has three end tokens
    assert process("A", use_beam_search=True, beam_width=2).strategy.search.num_candidates == 5
    with pytest.raises(RequestError, match="max_logprobs=6") as caught:
        process("A", use_beam_search=True, beam_width=3)
    assert caught.value.parameter == "beam_width"
    assert process("A", use_beam_search=True, beam_width=5, ignore_eos=True).strategy.search.num_candidates == 5
    with pytest.raises(RequestError, match="max_logprobs=7"):
        process("A", use_beam_search=True, beam_width=5, ignore_eos=True, stop_token_ids=[1, 2])


def test_more_tokens_than_fit_are_refused_or_logged_once(caplog):
    inputs, most = InputProcessor(LIMITS, Letters()), LIMITS.max_model_len
    assert inputs.process("r", "AB", SamplingParams(max_tokens=most - 2), refuse_cut=True)
    with pytest.raises(RequestError, match=rf"^max_tokens is more than fits: .* at most {most - 2}.*, got {most - 1}"):
        inputs.process("r", "AB", SamplingParams(max_tokens=most - 1), refuse_cut=True)
    assert not caplog.records
    for _ in range(2):
        assert inputs.process("r", "AB", SamplingParams(max_tokens=10**5)).first.max_total_tokens == most
    assert [record.message for record in caplog.records if "max_tokens=100000 is more than fits" in record.message]
    assert len(caplog.records) == 1


def test_unused_sampling_parameters_of_a_beam_search_are_logged_once(caplog):
    inputs = InputProcessor(LIMITS, Letters())
    with caplog.at_level("INFO", logger="jpaged"):
        for _ in range(2):
            inputs.process("r", "A", SamplingParams(use_beam_search=True, best_of=2, temperature=0.7, top_p=0.9))
    assert [record.getMessage() for record in caplog.records] == ["top_p: not used in a beam search (logged once)"]


def test_a_priority_needs_the_priority_policy():
    with pytest.raises(RequestError, match="scheduling_policy='priority'"):
        INPUTS.process("r", "A", SamplingParams(), priority=1)
    limits = dataclasses.replace(LIMITS, priorities=True)
    group = InputProcessor(limits, Letters()).process("r", "A", SamplingParams(n=2), priority=-3)
    assert [request.priority for request in group.requests] == [-3, -3]
    for bad in (1.5, True, "1", 2**31):
        with pytest.raises(RequestError, match="integer from"):
            InputProcessor(limits, Letters()).process("r", "A", SamplingParams(), priority=bad)


@pytest.mark.parametrize(
    ("prediction", "kept"),
    [(None, ()), ("", ()), ("BC", (1, 2)), ([3, 4], (3, 4)), ((5,), (5,)), (np.array([6, 7]), (6, 7)),
     ("A" * 40, (0,) * 16), ([1] * 40, (1,) * 16)],
)  # fmt: skip
def test_a_prediction_becomes_tokens_of_every_answer(prediction: Any, kept: tuple[int, ...]):
    inputs = InputProcessor(dataclasses.replace(LIMITS, speculates=True), Letters())
    for prompt in ({"prompt": "A"}, {"prompt_token_ids": [0]}):
        group = inputs.process("r", prompt | {"prediction": prediction}, SamplingParams(n=2))
        assert [request.prediction_token_ids for request in group.requests] == [kept, kept]
        assert group.prompt_token_ids == [0]


def test_a_prediction_of_a_model_without_a_tokenizer_or_a_use_for_it():
    speculates = dataclasses.replace(LIMITS, speculates=True)
    with pytest.raises(RequestError, match=r"^prediction: the model has no tokenizer: give token ids"):
        InputProcessor(speculates).process("r", {"prompt_token_ids": [0], "prediction": "A"}, SamplingParams())
    assert process({"prompt": "A", "prediction": "B"}).first.prediction_token_ids == ()  # it does not speculate
    pooling = InputProcessor(dataclasses.replace(LIMITS, pooling=Pooling(4)), Letters())
    with pytest.raises(RequestError, match=r"^prediction is for models that generate"):
        pooling.process("r", {"prompt": "A", "prediction": "B"}, PoolingParams())
    with pytest.raises(RequestError, match=r"^prediction: token 0: ids of this model are 0 to 99"):
        InputProcessor(speculates, Letters()).process("r", {"prompt": "A", "prediction": "Z"}, SamplingParams())


def test_a_salt_is_kept_for_the_block_names():
    assert [process({"prompt": "A", "cache_salt": salt}).cache_salt for salt in (None, "x")] == ["", "x"]
