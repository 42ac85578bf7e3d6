"""Reasoning ends when its budget is used up, and is left alone before: against a search through the whole answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import RequestError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.engine.thinking_budget import ThinkingBudget, ThinkingTags
from tests.engine.fake_runner import FakeRunner, next_token
from tests.engine.small_tokenizer import SmallTokenizer

ONE = ThinkingTags((1,), (2,))
MANY = ThinkingTags((1, 5, 3), (2, 5, 2, 3))  # shares tokens with itself and with the start tag
TOKENS = st.lists(st.sampled_from([1, 2, 3, 5, 5, 2, 9]), max_size=40)


def find(tokens: list[int], tag: tuple[int, ...], start: int = 0) -> int | None:
    places = range(start, len(tokens) - len(tag) + 1)
    return next((i for i in places if tuple(tokens[i : i + len(tag)]) == tag), None)


@settings(max_examples=300, deadline=None)
@given(wanted=TOKENS, budget=st.integers(0, 12), tags=st.sampled_from([ONE, MANY]), opened=st.booleans())
def test_against_a_search_through_the_answer(wanted, budget, tags, opened):
    followed = ThinkingBudget(tags, budget, opened=opened)
    said: list[int] = []
    forced = 0
    for token in wanted:
        must = followed.forced
        forced += must is not None
        said.append(token if must is None else must)
        followed.take(said[-1])
    while followed.forced is not None:
        said.append(followed.forced)
        followed.take(said[-1])
        forced += 1
    begins = 0 if opened else find(said, tags.start)
    if begins is None:
        assert said == wanted
        return
    begins += 0 if opened else len(tags.start)
    ends = find(said, tags.end, begins)
    thought = (len(said) if ends is None else ends) - begins
    assert thought <= budget + (0 if forced else len(tags.end) - 1)
    if not forced:
        assert said == wanted
        assert ends is not None or thought <= budget + len(tags.end)
    else:
        assert ends is not None
        assert forced <= len(tags.end)
        after = ends + len(tags.end)
        assert said[after:] == wanted[after:]  # the model is free again
        assert said[: after - forced] == wanted[: after - forced]


def test_no_budget_ends_at_once():
    followed = ThinkingBudget(MANY, 0, opened=True)
    for token in MANY.end:
        assert followed.forced == token
        followed.take(token)
    assert followed.forced is None


def test_reasoning_that_the_answer_opens_itself():
    followed = ThinkingBudget(ONE, 0, opened=False)
    assert followed.forced is None
    followed.take(9)
    assert followed.forced is None
    followed.take(1)
    assert followed.forced == 2


def test_the_same_tokens_again_give_the_same_state():
    """As after a preemption."""
    tokens = [9, 1, 9, 9, 2, 2]
    for count in range(len(tokens)):
        first, second = (ThinkingBudget(ONE, 2, opened=False) for _ in range(2))
        for token in tokens[:count]:
            first.take(token)
            second.take(token)
        assert first.forced == second.forced == (2 if count == 4 else None)


TOKENIZER = SmallTokenizer()
TAGS = ("(", ")!)")  # one token, and three


def thinking(budget: int, **fields):
    fields = {"temperature": 0, "max_tokens": 14, "ignore_eos": True, "reasoning_tags": TAGS} | fields
    return SamplingParams(thinking_token_budget=budget, **fields)


def wanted(prompt: list[int], budget: int, count: int = 14) -> list[int]:
    """The model's own tokens, and behind so many of them, if the prompt ends with the start tag, the end tag's."""
    tokens, end = list(prompt), TOKENIZER.encode(TAGS[1])
    for number in range(count):
        written = number - budget
        forced = prompt[-1:] == TOKENIZER.encode(TAGS[0]) and 0 <= written < len(end)
        tokens.append(end[written] if forced else next_token(tokens, 97))
    return tokens[len(prompt) :]


PROMPTS = {"abc(": 0, "(": 3, "DE(": 7, "cab": 2, "aa(": 13, "bb(": 14}


@pytest.mark.parametrize("num_blocks", [128, 9])
def test_the_engine_ends_reasoning_in_time(num_blocks):
    """Each row at its own token; also where requests are preempted in the middle of it."""
    engine = Engine(FakeRunner(num_blocks=num_blocks, max_model_len=32), tokenizer=TOKENIZER)
    for text, budget in PROMPTS.items():
        engine.add_request(text, text, thinking(budget))
    engine.add_request("free", "abc(", SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    done = {}
    while engine.has_work:
        done |= {output.request_id: output.outputs[0] for output in engine.step()}
        engine.check_integrity()
    for text, budget in PROMPTS.items():
        assert done[text].token_ids == wanted(TOKENIZER.encode(text), budget), text
    assert done["free"].token_ids == wanted(TOKENIZER.encode("abc("), 99)
    assert (engine.stats().preemptions > 0) == (num_blocks == 9)


def test_each_of_several_answers_has_a_budget_of_its_own():
    engine = Engine(FakeRunner(num_blocks=128), tokenizer=TOKENIZER)
    engine.add_request("a", "abc(", thinking(4, n=3))
    (output,) = [output for _ in range(40) if engine.has_work for output in engine.step()]
    assert [answer.token_ids for answer in output.outputs] == [wanted(TOKENIZER.encode("abc("), 4)] * 3


@pytest.mark.parametrize(
    ("tokenizer", "fields", "parameter"),
    [
        (TOKENIZER, {"reasoning_tags": None}, "thinking_token_budget"),
        (None, {}, "reasoning_tags"),
        (TOKENIZER, {"thinking_token_budget": -1}, "thinking_token_budget"),
        (TOKENIZER, {"thinking_token_budget": 2.5}, "thinking_token_budget"),
        (TOKENIZER, {"reasoning_tags": ("(",)}, "reasoning_tags"),
        (TOKENIZER, {"reasoning_tags": ("(", "(")}, "reasoning_tags"),
        (TOKENIZER, {"use_beam_search": True, "n": 2}, "thinking_token_budget"),
    ],
)
def test_what_cannot_be_is_refused(tokenizer, fields, parameter):
    engine = Engine(FakeRunner(), tokenizer=tokenizer)
    asked = {"thinking_token_budget": 3, "reasoning_tags": TAGS, "max_tokens": 4} | fields

    def add():
        engine.add_request("a", [3, 4], SamplingParams(**asked))

    with pytest.raises(RequestError) as caught:
        add()
    assert caught.value.parameter == parameter
    assert not engine.has_work
