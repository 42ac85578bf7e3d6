"""Reasoning ends when its budget is used up, and not before. Compared with a search through the whole answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import RequestError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.engine.output.reasoning_budget import EncodedReasoningTags, ReasoningBudget
from jpaged.params.reasoning_tags import ReasoningTags
from tests.engine.fake_runner import FakeRunner, next_token
from tests.engine.small_tokenizer import SmallTokenizer

# Tokens of one letter, and some with the first or last part of a tag.
TEXTS = {1: "<", 2: "t", 3: ">", 4: "/", 5: "x", 6: " ", 7: "x<", 8: "t>x", 9: "</", 10: "t>", 11: "<t>"}
TAGS_OF = {
    "letters": EncodedReasoningTags(b"<t>", b"</t>", (1, 4, 2, 3)),
    "pieces": EncodedReasoningTags(b"<t>", b"</t>", (9, 10)),
    "alike": EncodedReasoningTags(b"tt", b"txtx", (2, 5, 2, 5)),
}
TOKENS = st.lists(st.sampled_from(list(TEXTS)), max_size=40)


def text_of(tokens: list[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


def whole(tokens: list[int], tags: EncodedReasoningTags, *, opened: bool) -> tuple[int, int | None] | None:
    """Search the whole answer. Returns the number of tokens before the reasoning, and the number up to its end.

    The second is None if the reasoning does not end. Returns None if there is no reasoning.
    """
    start, end = tags.start.decode(), tags.end.decode()
    texts = [text_of(tokens[:count]) for count in range(len(tokens) + 1)]
    begins, inside = 0, 0
    if not opened:
        lead = len(texts[-1]) - len(texts[-1].lstrip())
        if not texts[-1].lstrip().startswith(start):
            return None
        inside = lead + len(start)
        begins = next(count for count, text in enumerate(texts) if len(text) >= inside)
    place = texts[-1].find(end, inside)
    if place < 0:
        return begins, None
    return begins, next(count for count, text in enumerate(texts) if len(text) >= place + len(end))


@settings(max_examples=600, deadline=None)
@given(wanted=TOKENS, budget=st.integers(0, 12), tags=st.sampled_from(list(TAGS_OF.values())), opened=st.booleans())
def test_against_a_search_through_the_answer(wanted, budget, tags, opened):
    followed = ReasoningBudget(tags, budget, opened=opened)
    said: list[int] = []
    forced: list[int] = []
    left = list(wanted)
    while left or followed.forced is not None:
        must = followed.forced
        token = left.pop(0) if must is None else must
        if must is not None:
            forced.append(len(said))
            left = left[1:]
        said.append(token)
        followed.append(token, TEXTS[token].encode())
    found = whole(said, tags, opened=opened)
    if found is None:
        assert said == wanted
        return
    begins, ends = found
    if not forced:
        assert said == wanted
        assert (len(said) if ends is None else ends) - begins <= budget + len(tags.end) - 1
        return
    # When the budget is used up, the end tag or its rest is forced once. After that nothing is forced.
    assert ends == forced[-1] + 1
    assert forced == list(range(forced[0], ends))
    assert tuple(said[forced[0] : ends]) == tags.end_ids[-len(forced) :]
    assert ends - len(tags.end_ids) - begins <= budget
    assert said[: forced[0]] == wanted[: forced[0]]
    assert said[ends:] == wanted[ends:]


def append_all(followed: ReasoningBudget, *tokens: int) -> ReasoningBudget:
    for token in tokens:
        followed.append(token, TEXTS[token].encode())
    return followed


def test_a_budget_of_0_ends_reasoning_at_once():
    followed = ReasoningBudget(TAGS_OF["letters"], 0, opened=True)
    for token in TAGS_OF["letters"].end_ids:
        assert followed.forced == token
        append_all(followed, token)
    assert followed.forced is None


@pytest.mark.parametrize("start", [[11], [1, 2, 3], [6, 6, 1, 10], [1, 8]])
def test_the_answer_may_open_reasoning_with_any_tokens(start):
    assert append_all(ReasoningBudget(TAGS_OF["pieces"], 0, opened=False), *start).forced == 9


@pytest.mark.parametrize("answer", [[5, 11], [6, 5, 6, 11], [1, 5, 11], [7, 10], [3]])
def test_tags_inside_the_answer_are_text(answer):
    assert append_all(ReasoningBudget(TAGS_OF["pieces"], 0, opened=False), *answer, 5, 5).forced is None


def test_an_end_tag_in_other_tokens_ends_reasoning():
    assert append_all(ReasoningBudget(TAGS_OF["pieces"], 2, opened=True), 7, 4, 2, 3, 5, 5, 5).forced is None
    assert append_all(ReasoningBudget(TAGS_OF["pieces"], 2, opened=True), 7, 4).forced == 9


def test_replayed_tokens_lead_to_the_same_state():
    """As they must after a preemption."""
    tokens = [11, 5, 5, 9, 10, 5]
    for count in range(len(tokens)):
        first, second = (
            append_all(ReasoningBudget(TAGS_OF["pieces"], 2, opened=False), *tokens[:count]) for _ in range(2)
        )
        assert first.forced == second.forced


TOKENIZER = SmallTokenizer()
TAGS = ("(", ")!)")  # one token, and three


def with_budget(budget: int, **fields):
    fields = {"temperature": 0, "max_tokens": 14, "ignore_eos": True, "reasoning_tags": TAGS} | fields
    return SamplingParams(thinking_token_budget=budget, **fields)


def wanted(prompt: list[int], budget: int, count: int = 14) -> list[int]:
    """Return the model's tokens. If the prompt ends with the start tag, the end tag follows after `budget` of them."""
    tokens, end = list(prompt), TOKENIZER.encode(TAGS[1])
    for number in range(count):
        written = number - budget
        forced = prompt[-1:] == TOKENIZER.encode(TAGS[0]) and 0 <= written < len(end)
        tokens.append(end[written] if forced else next_token(tokens, 97))
    return tokens[len(prompt) :]


PROMPTS = {"abc(": 0, "(": 3, "DE(": 7, "cab": 2, "aa(": 13, "bb(": 14}


@pytest.mark.parametrize("num_blocks", [128, 9])
def test_the_engine_ends_reasoning_at_its_budget(num_blocks):
    """Each row has its own budget. With 9 blocks, requests are preempted during their reasoning."""
    engine = Engine(FakeRunner(num_blocks=num_blocks, max_model_len=32), tokenizer=TOKENIZER)
    for text, budget in PROMPTS.items():
        engine.add_request(text, text, with_budget(budget))
    engine.add_request("free", "abc(", SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    done = {}
    while engine.has_work:
        done |= {output.request_id: output.outputs[0] for output in engine.step()}
        engine.check_integrity()
    for text, budget in PROMPTS.items():
        assert done[text].token_ids == wanted(TOKENIZER.encode(text), budget), text
    assert done["free"].token_ids == wanted(TOKENIZER.encode("abc("), 99)
    assert (engine.stats().preemptions > 0) == (num_blocks == 9)


@pytest.mark.parametrize(("prompt", "opened"), [("abc(", False), ("cab", True), ("(ab", True)])
def test_the_caller_can_say_whether_reasoning_is_open(prompt, opened):
    engine = Engine(FakeRunner(num_blocks=128), tokenizer=TOKENIZER)
    engine.add_request("a", prompt, with_budget(2, reasoning_tags=ReasoningTags(*TAGS, opened=opened)))
    (output,) = [output for _ in range(40) if engine.has_work for output in engine.step()]
    end = TOKENIZER.encode(TAGS[1])
    assert (output.outputs[0].token_ids[2 : 2 + len(end)] == end) == opened


def test_each_of_several_answers_has_its_own_budget():
    engine = Engine(FakeRunner(num_blocks=128), tokenizer=TOKENIZER)
    engine.add_request("a", "abc(", with_budget(4, n=3))
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
def test_invalid_parameters_raise(tokenizer, fields, parameter):
    engine = Engine(FakeRunner(), tokenizer=tokenizer)
    asked = {"thinking_token_budget": 3, "reasoning_tags": TAGS, "max_tokens": 4} | fields

    def add():
        engine.add_request("a", [3, 4], SamplingParams(**asked))

    with pytest.raises(RequestError) as caught:
        add()
    assert caught.value.parameter == parameter
    assert not engine.has_work


def test_other_texts_begin_and_end_reasoning():
    """The start of a call ends it, so no end tag is forced inside the call."""
    tags = EncodedReasoningTags(b"<t>", b"</t>", (9, 10), other_starts=(b"t>",), other_ends=(b"x<",))
    for start, end, forced in ((10, 7, None), (11, 7, None), (10, 8, 9), (7, 7, None)):
        budget = ReasoningBudget(tags, 2, opened=False)
        for token in (start, 5, end, 5):
            budget.append(token, TEXTS[token].encode())
        assert budget.forced == forced, (start, end)
