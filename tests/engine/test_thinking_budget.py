"""Reasoning ends when its budget is used up, and is left alone before: against a search through the whole answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.thinking_budget import PROMPT_END, ThinkingBudget, ThinkingTags

ONE = ThinkingTags((1,), (2,))
MANY = ThinkingTags((1, 5, 3), (2, 5, 2, 3))  # shares tokens with itself and with the start tag
TOKENS = st.lists(st.sampled_from([1, 2, 3, 5, 5, 2, 9]), max_size=40)


def find(tokens: list[int], tag: tuple[int, ...], start: int = 0) -> int | None:
    places = range(start, len(tokens) - len(tag) + 1)
    return next((i for i in places if tuple(tokens[i : i + len(tag)]) == tag), None)


@settings(max_examples=300, deadline=None)
@given(wanted=TOKENS, budget=st.integers(0, 12), tags=st.sampled_from([ONE, MANY]), opened=st.booleans())
def test_against_a_search_through_the_answer(wanted, budget, tags, opened):
    prompt = [9, 9, *tags.start] if opened else [9]
    followed = ThinkingBudget(tags, budget, prompt)
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
    followed = ThinkingBudget(MANY, 0, [1, 5, 3])
    for token in MANY.end:
        assert followed.forced == token
        followed.take(token)
    assert followed.forced is None


@pytest.mark.parametrize(
    "prompt", [[], [1, 2], [1, *[9] * PROMPT_END], [1, 9, 2, 9]]
)
def test_a_prompt_that_does_not_end_in_reasoning(prompt):
    followed = ThinkingBudget(ONE, 0, prompt)
    assert followed.forced is None
    followed.take(9)
    assert followed.forced is None
    followed.take(1)
    assert followed.forced == 2


def test_the_same_tokens_again_give_the_same_state():
    """As after a preemption."""
    tokens = [9, 1, 9, 9, 2, 2]
    for count in range(len(tokens)):
        first, second = ThinkingBudget(ONE, 2, []), ThinkingBudget(ONE, 2, [])
        for token in tokens[:count]:
            first.take(token)
            second.take(token)
        assert first.forced == second.forced == (2 if count == 4 else None)
