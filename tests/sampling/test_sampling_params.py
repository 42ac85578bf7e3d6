"""SamplingParams: every field is used, or raises an error with its name and value. None is ignored."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest

from jpaged import RequestError, SamplingParams
from jpaged.params.sampling import NOT_BUILT, RequestOutputKind

NAN, INF = float("nan"), float("inf")

# Every public field of vLLM 0.33's SamplingParams, with its default.
VLLM_DEFAULTS = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "watermarking": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None,
    "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "prompt_logprob_token_ids": None, "prompt_logprob_start": None, "logprob_token_ids": None, "flat_logprobs": False,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "output_kind": RequestOutputKind.CUMULATIVE, "stream_interval": None,
    "skip_clone": False, "output_text_buffer_length": 0, "structured_outputs": None, "logit_bias": None,
    "allowed_token_ids": None, "extra_args": None, "bad_words": None, "skip_reading_prefix_cache": None,
    "thinking_token_budget": None, "repetition_detection": None, "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
}  # fmt: skip

# For each field that is not built, a value that would change the answer.
MEANINGFUL = {
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 1,
    "bad_words": ["a"], "logit_bias": {1: 2.0}, "allowed_token_ids": [1],
    "prompt_logprobs": 0, "prompt_logprob_token_ids": np.array([1]), "prompt_logprob_start": 0,
    "repetition_detection": object(), "thinking_token_budget": 0, "watermarking": True,
    "skip_reading_prefix_cache": True, "skip_clone": True, "output_text_buffer_length": 1,
    "routed_experts_prompt_start": 1, "trace_decode_token_ids": [1], "extra_args": {"a": 1},
}  # fmt: skip


def test_every_field_of_vllm_is_accepted_at_its_default():
    assert VLLM_DEFAULTS.keys() <= {field.name for field in dataclasses.fields(SamplingParams)}
    assert SamplingParams(**VLLM_DEFAULTS) == SamplingParams()
    assert SamplingParams(use_beam_search=False, best_of=1) == SamplingParams()


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_field_that_is_not_built_raises(name: str):
    with pytest.raises(RequestError, match="not supported yet") as caught:
        SamplingParams(**{name: MEANINGFUL[name]})
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    "fields", [{"stop": []}, {"bad_words": ()}, {"logit_bias": {}}, {"presence_penalty": 0}, {"extra_args": {}},
               {"logprob_token_ids": []}, {"flat_logprobs": True}]
)
def test_equivalents_of_the_default_are_accepted(fields: dict):
    assert SamplingParams(**fields) == SamplingParams()
    hash(SamplingParams(**fields))


def test_unknown_fields_raise_and_are_named():
    with pytest.raises(RequestError, match="did you mean 'temperature'") as caught:
        SamplingParams(temprature=0.5)
    assert caught.value.parameter == "temprature"
    with pytest.raises(RequestError, match="unknown sampling parameter"):
        SamplingParams(mirostat=2)
    with pytest.raises(ValueError, match="unknown"):
        SamplingParams(xyz=1)


BAD = [
    *[("temperature", value) for value in (-0.1, NAN, INF, 1e39, 10**400, np.float16(INF), "1", None, 1j)],
    *[("top_p", value) for value in (0, -0.5, 1.0001, NAN, "1", False)],
    *[("top_k", value) for value in (-2, 1.0, NAN, "1", True, None)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, INF)],
    *[("max_tokens", value) for value in (0, -1, 1.5, "16", True)],
    *[("seed", value) for value in (2**64, -(2**63) - 1, 1.0, "1", True)],
    *[("logprobs", value) for value in (-2, 1.0, True, "1")],
    *[("n", value) for value in (0, -1, 65, 10**9, 1.0, True, None)],
    *[(name, value) for name in ("best_of", "beam_width") for value in (0, -1, 65, 10**9, 1.0, True)],
    *[("use_beam_search", value) for value in (1, None, "yes")],
    *[("length_penalty", value) for value in (NAN, INF, "1", True, None)],
    *[("early_stopping", value) for value in (None, 1, "always")],
    *[("stop_token_ids", value) for value in ([-1], [1.0], [True], ["1"], "12", 5, [[1]])],
    *[(name, value) for name in ("ignore_eos", "detokenize", "skip_special_tokens") for value in (1, 0, None, "yes")],
    *[("include_stop_str_in_output", value) for value in (1, None)],
    *[("spaces_between_special_tokens", value) for value in (0, "yes")],
    *[("stop", value) for value in ("", [""], ["a", ""], [1], 5, {"a"}, b"a", [b"a"], [None])],
    *[("stop", value) for value in (["x"] * 257, [str(i) for i in range(10_000)], "x" * 4097, ["x" * 2048] * 3)],
    *[("output_kind", value) for value in (1, "DELTA", None)],
    *[("stream_interval", value) for value in (0, -1, 1.0, True, "1")],
    *[("truncate_prompt_tokens", value) for value in (0, -2, 1.5, True, "1")],
    *[("truncation_side", value) for value in ("middle", 1, "left")],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_invalid_values_raise_an_error_with_parameter_and_value(name: str, value: object):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert caught.value.accepted
    assert re.match(rf"{name}:? {re.escape(caught.value.accepted)}(, got |$)", str(caught.value))


def test_the_error_for_a_large_n_names_the_limit():
    for name in ("n", "best_of", "beam_width"):
        with pytest.raises(RequestError, match="to 64"):
            SamplingParams(**{name: 65})


@pytest.mark.parametrize(
    ("fields", "sequences", "chooses"),
    [
        ({}, 1, False),
        ({"n": 4}, 4, False),
        ({"n": 2, "best_of": 2}, 2, False),
        ({"n": 2, "best_of": 5}, 5, True),
        ({"use_beam_search": True, "best_of": 4, "temperature": 0.7, "top_p": 0.9}, 4, True),
        ({"use_beam_search": True, "n": 3}, 3, True),
        ({"use_beam_search": True, "n": 3, "beam_width": 4, "early_stopping": "never"}, 4, True),
    ],
)
def test_the_number_of_generated_answers(fields: dict, sequences: int, chooses: bool):
    params = SamplingParams(**fields)
    assert (params.num_sequences, params.chooses, params.needs_logprobs) == (sequences, chooses, chooses)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "beam_width"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 4, "best_of": 2}, "best_of"),
        ({"beam_width": 4}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"stop": "a", "detokenize": False}, "stop"),
        ({"stop": "a", "use_beam_search": True, "n": 2}, "stop"),
    ],
)
def test_contradictory_fields_raise(fields: dict, parameter: str):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.parameter == parameter


GOOD = [
    ("temperature", 0, 0.0), ("temperature", 2, 2.0), ("temperature", np.float32(0.5), 0.5),
    ("temperature", np.int64(1), 1.0), ("top_p", 1, 1.0), ("top_k", -1, 0), ("top_k", np.int32(5), 5),
    ("min_p", 1, 1.0), ("max_tokens", None, None), ("max_tokens", np.int64(3), 3), ("max_tokens", 10**9, 10**9),
    ("seed", 2**64 - 1, 2**64 - 1), ("seed", -1, None), ("seed", -2, 2**64 - 2), ("seed", -(2**63), 2**63),
    ("seed", np.uint8(3), 3), ("seed", 0, 0), ("logprobs", 0, 0), ("stop_token_ids", [1, np.int64(2)], (1, 2)),
    ("stop_token_ids", np.array([3]), (3,)), ("stop_token_ids", None, ()), ("detokenize", np.False_, False),
    ("stop", "a", ("a",)), ("stop", ["b", "a"], ("b", "a")), ("stop", None, ()),
    ("stop", ["x" * 16] * 256, ("x" * 16,) * 256),
    ("stream_interval", np.int64(2), 2), ("truncate_prompt_tokens", -1, -1), ("truncate_prompt_tokens", np.int32(7), 7),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "stored"), GOOD)
def test_valid_values_are_stored_as_plain_python(name: str, given: object, stored: object):
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == stored
    assert type(value) is type(stored)


@pytest.mark.parametrize("name", ["guided_json", "guided_decoding", "response_format"])
def test_other_names_of_structured_outputs_raise_with_a_hint(name: str):
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(**{name: {}})


def test_a_clone_is_equal():
    params = SamplingParams(temperature=0.5)
    assert params.clone() == params


def test_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-9).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_params_are_immutable_comparable_and_copyable():
    params = SamplingParams(temperature=0.5, seed=-7, stop_token_ids=[3])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params  # noqa: S301
    assert dataclasses.replace(params, top_k=4).seed == params.seed
    with pytest.raises(RequestError):
        dataclasses.replace(params, top_k=-4)
