"""Parameters that control an answer, on the whole engine with the demo model."""

import dataclasses
import json
from collections.abc import Iterator

import jsonschema
import pytest

from jpaged import LLM, RequestOutput, SamplingParams
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import ModelLoadError, RequestError
from jpaged.params.sampling import StructuredOutputsParams
from tests.support.tiny_engine import sampling_programs

SIZES = {
    "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,),
}  # fmt: skip
PROMPT = "def read_settings(path):\n    return "
SCHEMA = {
    "type": "object", "required": ["name", "tags", "description"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 8}, "description": {"const": "what it is for, in a few words"},
        "tags": {"type": "array", "items": {"enum": ["first", "second"]}, "maxItems": 2},
    },
}  # fmt: skip


def only(logits, first, count):
    """A logits processor that allows only `count` ids from `first` on."""
    import jax.numpy as jnp

    ids = jnp.arange(len(logits))
    return jnp.where((ids >= first) & (ids < first + count), logits, -jnp.inf)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", logits_processors={"only": only, "broken": broken}, **SIZES) as made:
        yield made
        assert made.stats().compiles_after_ready == 0


def broken(logits, how):
    """A logits processor with invalid results, by `how`: NaN, infinity, no id left, or all logits 0."""
    import jax.numpy as jnp

    choices = [logits * jnp.nan, logits + jnp.inf, jnp.full_like(logits, -jnp.inf), logits * 0]
    return jnp.stack(choices)[how.astype(int)]


def answers(llm: LLM, *params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)


@pytest.mark.slow
def test_jump_forward_does_not_change_answers(llm: LLM):
    params = [
        SamplingParams(max_tokens=120, temperature=t, seed=i, structured_outputs=StructuredOutputsParams(json=SCHEMA))
        for i, t in enumerate((0.0, 1.0, 1.0, 1.5))
    ]
    other_params = SamplingParams(max_tokens=60, temperature=1.0, seed=9)

    def tokens(llm: LLM) -> tuple[list[list[int]], int]:
        """Tokens of all requests, and the steps of the first one alone."""
        outputs = answers(llm, *params, other_params)
        llm.reset_stats()
        answers(llm, params[0])
        return [output.outputs[0].token_ids for output in outputs], llm.stats().steps

    jumping, steps = tokens(llm)
    alone = [answers(llm, each)[0].outputs[0].token_ids for each in params]
    assert jumping[:-1] == alone
    with LLM("demo", jump_forward=False, **SIZES) as other:
        stepping, more = tokens(other)
    assert jumping == stepping
    assert more > steps
    # With log-probabilities there is no jump-forward.
    with_logprobs = answers(llm, *(dataclasses.replace(each, logprobs=1) for each in params))
    assert [output.outputs[0].token_ids for output in with_logprobs] == alone
    for output in with_logprobs:
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ '<think>\n' }}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", [pytest.param(0, marks=pytest.mark.slow), 5, pytest.param(None, marks=pytest.mark.slow)]
)
def test_reasoning_before_a_grammar_is_limited_by_its_budget(llm: LLM, budget: int | None):
    """The answer after the reasoning matches the schema. The demo model was trained on neither."""
    params = [
        SamplingParams(max_tokens=150, temperature=1.0, seed=seed, thinking_token_budget=budget,
                       structured_outputs=StructuredOutputsParams(json=SCHEMA))
        for seed in range(4)
    ]  # fmt: skip
    talks = [[{"role": "user", "content": PROMPT}]] * len(params)
    outputs = llm.chat(talks, params, use_tqdm=False, chat_template=TEMPLATE, reasoning_parser="qwen3")
    tokenizer = llm.get_tokenizer()
    for output in outputs:
        answer = output.outputs[0]
        if budget is None:
            assert answer.finish_reason == "length"  # the demo model has never seen the tag
            continue
        assert answer.finish_reason == "stop"
        end = len(tokenizer.encode("</think>", add_special_tokens=False))
        assert tokenizer.decode(answer.token_ids[budget : budget + end]) == "</think>"
        jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        assert len(answer.message.reasoning or "") <= len(tokenizer.decode(answer.token_ids[:budget]))


def test_a_grammar_that_fails_ends_only_its_own_request(llm: LLM):
    """The grammar costs its parser too much work, after some tokens."""
    hostile = StructuredOutputsParams(regex="a{1,1000}{1,1000}")
    good = SamplingParams(max_tokens=100, temperature=1.0, seed=1, ignore_eos=True)  # its bits depend on the processor
    bad = SamplingParams(max_tokens=200, temperature=1, seed=1, structured_outputs=hostile)
    outputs = answers(llm, good, bad, good)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "cannot continue after" in outputs[1].outputs[0].stop_reason
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    assert outputs[0].outputs[0].token_ids == answers(llm, good)[0].outputs[0].token_ids
    assert llm.stats().used_blocks == 0


def test_a_grammar_and_other_parameters_that_allow_no_token(llm: LLM):
    digits = StructuredOutputsParams(regex="[0-9]+")
    letters = llm.get_tokenizer().encode("abc", add_special_tokens=False)
    params = SamplingParams(max_tokens=9, structured_outputs=digits, allowed_token_ids=letters)
    [output] = answers(llm, params)
    assert output.outputs[0].finish_reason == "error"
    assert "forbid" in output.outputs[0].stop_reason


def test_bad_words_are_not_in_the_answer(llm: LLM):
    usual = SamplingParams(max_tokens=40, temperature=0)
    text = answers(llm, usual)[0].outputs[0].text
    tokenizer = llm.get_tokenizer()
    words = text.split()[:3]
    forbidden = [tokenizer.encode(blank + word, add_special_tokens=False) for word in words for blank in ("", " ")]
    assert any(len(ids) > 1 for ids in forbidden)

    def has_some(token_ids: list[int]) -> bool:
        return any(token_ids[i : i + len(ids)] == ids for ids in forbidden for i in range(len(token_ids)))

    several = SamplingParams(max_tokens=40, temperature=0, bad_words=words)
    single = SamplingParams(max_tokens=40, temperature=0, bad_words=[text.strip()[0]])
    without, other, again = answers(llm, several, single, usual)
    assert not has_some(without.outputs[0].token_ids)
    assert has_some(again.outputs[0].token_ids)
    assert text.strip()[0] != other.outputs[0].text.strip()[0]
    assert again.outputs[0].text == text


def test_min_tokens_keeps_an_answer_from_ending(llm: LLM):
    first = answers(llm, SamplingParams(max_tokens=1, temperature=0))[0].outputs[0].token_ids[0]
    ends = {"temperature": 0, "max_tokens": 20, "stop_token_ids": [first]}
    [short, long] = answers(llm, SamplingParams(**ends), SamplingParams(**ends, min_tokens=7))
    assert short.outputs[0].token_ids == [first]
    assert len(long.outputs[0].token_ids) > 7
    assert first not in long.outputs[0].token_ids[:7]


def test_custom_logits_processors(llm: LLM):
    plain = SamplingParams(max_tokens=20, temperature=1.0, seed=2)
    asked = dataclasses.replace(plain, logits_processors={"only": {"first": 700, "count": 50}})
    restricted, usual = answers(llm, asked, plain)
    assert all(700 <= token_id < 750 for token_id in restricted.outputs[0].token_ids)
    assert usual.outputs[0].token_ids == answers(llm, plain)[0].outputs[0].token_ids
    refused = (
        ({"nothing": {}}, "must be one that the engine was started with"),
        ({"only": {"first": 1.0}}, "takes the parameters"),
    )
    for wrong, message in refused:
        with pytest.raises(RequestError, match=message):
            answers(llm, SamplingParams(logits_processors=wrong))


@pytest.mark.parametrize(
    "wrong",
    [{"x": 3}, [only], {"x": lambda: 0}, {"x": lambda logits, *rest: 0}],
    ids=["a number", "a list", "no logits", "unnamed parameters"],
)
def test_invalid_logits_processors_raise_before_the_model_is_loaded(wrong):
    with pytest.raises(RequestError, match="logits_processors"):
        LLM("nowhere", logits_processors=wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logits_processor_with_an_invalid_result_ends_only_its_own_request(llm: LLM, temperature: float):
    good = SamplingParams(max_tokens=12, temperature=temperature, seed=1, ignore_eos=True)
    asked = [dataclasses.replace(good, logits_processors={"broken": {"how": how}}) for how in range(3)]
    outputs = answers(llm, good, *asked, dataclasses.replace(good, logprobs=1))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "error", "error", "length"]
    assert all("not finite" in output.outputs[0].stop_reason for output in outputs[1:4])
    assert outputs[0].outputs[0].token_ids == outputs[4].outputs[0].token_ids
    assert llm.stats().used_blocks == 0


def test_forbidden_ids_stay_forbidden(llm: LLM):
    """A logits processor that sets all logits to 0, and penalties of any size, do not allow them."""
    ids = tuple(range(300, 320))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True, allowed_token_ids=ids)
    for change in (
        {"logits_processors": {"broken": {"how": 3}}},
        {"repetition_penalty": 1e-38}, {"repetition_penalty": 1e38},
        {"repetition_penalty": 1e-34, "temperature": 2e-5}, {"repetition_penalty": 1e34, "temperature": 2e-5},
    ):  # fmt: skip
        [output] = answers(llm, dataclasses.replace(params, **change))
        assert output.outputs[0].finish_reason == "length"
        assert set(output.outputs[0].token_ids) <= set(ids)


def test_a_forced_token_that_another_parameter_forbids_ends_the_request(llm: LLM):
    """bad_words and min_tokens apply to forced tokens too."""
    only_one = StructuredOutputsParams(choice=["the configuration file of the server"])
    plain = SamplingParams(max_tokens=30, temperature=0, structured_outputs=only_one)
    whole = answers(llm, plain)[0].outputs[0]
    assert whole.finish_reason == "stop"
    for change in ({"bad_words": ["file of"]}, {"min_tokens": 6, "stop_token_ids": [whole.token_ids[2]]}):
        asked = dataclasses.replace(plain, **change)
        alone = answers(llm, asked)[0].outputs[0]
        in_batch = answers(llm, asked, *[dataclasses.replace(plain, structured_outputs=None)] * 7)[0].outputs[0]
        assert (alone.finish_reason, alone.text) == (in_batch.finish_reason, in_batch.text)
        assert alone.finish_reason == "error"


def test_best_of_returns_no_answer_that_failed(llm: LLM):
    hostile = StructuredOutputsParams(regex="(yes|no)|a{1,1000}{1,1000}")
    params = SamplingParams(max_tokens=120, temperature=1.5, seed=3, n=1, best_of=8, structured_outputs=hostile)
    reasons = [answer.finish_reason for answer in answers(llm, dataclasses.replace(params, n=8))[0].outputs]
    whole = len(reasons) - reasons.count("error")
    assert 0 < whole < 8
    best = answers(llm, dataclasses.replace(params, n=whole))[0].outputs
    assert [answer.finish_reason for answer in best] == ["stop"] * whole


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda logits: logits[:5], r"float32\(5,\), must return"),
        (lambda logits, by: logits if by > 0 else -logits, "TracerBoolConversionError"),
        (lambda logits: None, "must return the row's new logits"),
        (lambda logits: logits > 0, r"bool\(4096,\)"),
    ],
)
def test_logits_processors_that_cannot_run_raise_before_weights_are_read(wrong, why):
    with pytest.raises(RequestError, match=why) as caught:
        LLM("demo", logits_processors={"good": only, "bad": wrong})
    assert caught.value.parameter == "logits_processors.bad"


def test_a_bad_word_may_be_a_line_break(llm: LLM):
    plain = SamplingParams(max_tokens=40, temperature=0)
    [usual, single] = answers(llm, plain, dataclasses.replace(plain, bad_words=["\n"]))
    assert "\n" in usual.outputs[0].text
    [line_break] = llm.get_tokenizer().encode("\n", add_special_tokens=False)
    assert line_break not in single.outputs[0].token_ids


def test_log_probabilities_of_named_ids(llm: LLM):
    """They equal those of the most likely ids, next to a bias and to a request without."""
    plain = SamplingParams(max_tokens=3, temperature=0, logprobs=4)
    [usual] = answers(llm, plain)
    first = usual.outputs[0].logprobs[0]
    ids = list(first)[:0:-1]  # all but the first, the least likely one first
    named = dataclasses.replace(plain, logprobs=None, logprob_token_ids=ids)
    biased = dataclasses.replace(named, logit_bias={ids[0]: 100.0})
    found, other, forced = (output.outputs[0] for output in answers(llm, named, plain, biased))
    assert other == usual.outputs[0]
    assert found.token_ids == other.token_ids
    values = {each: entry.logprob for each, entry in first.items()}
    assert {each: entry.logprob for each, entry in found.logprobs[0].items()} == values
    assert [entry.rank for entry in found.logprobs[0].values()] == [1, *[None] * len(ids)]
    assert set(found.logprobs[1]) == {found.token_ids[1], *ids}
    assert forced.token_ids[0] == ids[0]
    assert {each: forced.logprobs[0][each].logprob for each in ids} == {each: values[each] for each in ids}


@pytest.mark.slow
def test_processed_logprobs_are_those_of_the_sampled_distribution():
    with pytest.raises(ModelLoadError, match="logprobs_mode='all': must be one of raw_logprobs, processed_logprobs"):
        LLM("demo", logprobs_mode="all", **SIZES)
    full = sampling_programs(SamplerVariant.FULL)  # log-probabilities need it
    with full, LLM("demo", logprobs_mode="processed_logprobs", max_logprobs=5, **SIZES) as llm:
        params = SamplingParams(max_tokens=10, temperature=2.0, top_k=3, seed=4, logprobs=5)
        for entries in answers(llm, params)[0].outputs[0].logprobs:
            finite = [entry.logprob for entry in entries.values() if entry.logprob > float("-inf")]
            assert len(finite) == 3
            assert sum(2.718281828459045**value for value in finite) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"), ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "min_tokens"),
    ],
)  # fmt: skip
def test_parameters_that_the_model_does_not_support_raise(llm: LLM, params: dict, parameter: str):
    with pytest.raises(RequestError) as refused:
        answers(llm, SamplingParams(**params))
    assert refused.value.parameter == parameter
