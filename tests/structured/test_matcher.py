"""GrammarMatcher: masks and accepted tokens, rollback, copies, jump-forward, and the end of an answer."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.grammar import GrammarMatcher
from jpaged.engine.step_plan import mask_words
from jpaged.errors import RequestError
from jpaged.loading.tokenizer import load_tokenizer
from tests.structured import corpus
from tests.structured.grammar_model import DEMO, Model
from tests.structured.sampling import bits

SCHEMAS = corpus.schemas()
FIXED = corpus.obj(
    {"a_long_property_name": corpus.N, "kind": {"const": "a constant value"}, "b": {"enum": ["ab", "abc"]}}
)


def mask(model: Model, matcher: GrammarMatcher) -> np.ndarray:
    """Return the mask as bool[vocab_size]."""
    words = np.full(mask_words(model.vocab_size), -1, np.int32)
    matcher.mask_into(words)
    return bits(words, model.vocab_size)


def test_a_token_is_accepted_exactly_if_the_mask_allows_it(any_model: Model):
    """For every token of the vocabulary, at 12 positions of an answer."""
    matcher = any_model.matcher(json=FIXED)
    rng = np.random.default_rng(0)
    for _ in range(12):
        allowed = mask(any_model, matcher)
        for token_id in range(any_model.vocab_size):
            assert matcher.copy().accept(token_id) == allowed[token_id], token_id
        assert matcher.accept(int(rng.choice(np.flatnonzero(allowed))))


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed(any_model: Model):
    padding = any_model.token_bytes.index(b"padding")
    for fields in ({"regex": r"(.|\n)*"}, {"json_object": True}):
        matcher = any_model.matcher(**fields)
        for seed in range(4):
            allowed = mask(any_model, matcher)
            assert not allowed[padding:].any()
            if matcher.is_finished:
                break
            allowed[list(any_model.eos_token_ids)] = False
            assert matcher.accept(int(np.random.default_rng(seed).choice(np.flatnonzero(allowed))))


def test_every_word_of_a_mask_is_written(demo: Model):
    matcher = demo.matcher(regex="[ab]c")
    words = np.full(mask_words(demo.vocab_size), -1, np.int32)
    matcher.mask_into(words)
    assert {demo.decode([i]) for i in np.flatnonzero(bits(words, demo.vocab_size))} <= {"a", "b", "ac", "bc"}
    assert matcher.accept(int(np.flatnonzero(bits(words, demo.vocab_size))[0]))
    words[:] = -1
    matcher.mask_into(words.view(np.uint32))
    assert bits(words, demo.vocab_size).sum() == 1
    for wrong in (np.zeros(3, np.int32), words.astype(np.int64), np.zeros((2, len(words)), np.int32)):
        with pytest.raises(ValueError, match="expected 32-bit words"):
            matcher.mask_into(wrong)


def test_end_of_sequence_is_allowed_where_the_answer_may_end(any_model: Model):
    """If no other token is allowed, the answer is finished."""
    eos = any_model.eos_token_ids[0]
    matcher = any_model.matcher(regex="a?b?")
    assert matcher.is_accepting
    assert mask(any_model, matcher)[eos]
    copy = matcher.copy()
    assert copy.accept(eos)
    assert copy.is_finished
    assert not copy.accept(eos)
    b = next(i for i in range(any_model.vocab_size) if any_model.token_bytes[i] == b"b" and mask(any_model, matcher)[i])
    assert matcher.accept(b)
    assert matcher.is_finished
    assert matcher.forced_tokens() == []
    assert np.flatnonzero(mask(any_model, matcher)).tolist() == [eos]


def test_a_token_that_is_not_allowed_changes_nothing(any_model: Model):
    matcher = any_model.matcher(json=FIXED)
    other = any_model.matcher(json=FIXED)
    for seed in range(20):
        allowed = mask(any_model, matcher)
        for token_id in np.flatnonzero(~allowed)[:50]:
            assert not matcher.accept(int(token_id))
        assert (mask(any_model, matcher) == mask(any_model, other)).all()
        token_id = int(np.random.default_rng(seed).choice(np.flatnonzero(allowed)))
        assert matcher.accept(token_id)
        assert other.accept(token_id)
        if matcher.is_finished:
            break


@settings(max_examples=60)
@given(data=st.data())
def test_rollback_restores_the_state(demo: Model, data: st.DataObject):
    """Random accepts, rollbacks and copies: the state equals that of a new matcher with the same tokens."""
    name = data.draw(st.sampled_from(corpus.SHORT))
    matcher = demo.matcher(json=SCHEMAS[name])
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if tokens and data.draw(st.integers(0, 3)) == 0:
            back = data.draw(st.integers(1, len(tokens)))
            matcher.rollback(back)
            del tokens[-back:]
        if data.draw(st.booleans()):
            matcher = matcher.copy()
        for _ in range(data.draw(st.integers(0, 4))):
            if matcher.is_finished:
                break
            allowed = np.flatnonzero(mask(demo, matcher))
            tokens.append(int(allowed[data.draw(st.integers(0, len(allowed) - 1))]))
            assert matcher.accept(tokens[-1])
        fresh = demo.matcher(json=SCHEMAS[name])
        for token_id in tokens:
            assert fresh.accept(token_id)
        assert len(matcher) == len(tokens)
        assert matcher.is_finished == fresh.is_finished
        assert matcher.forced_tokens() == fresh.forced_tokens()
        assert (mask(demo, matcher) == mask(demo, fresh)).all()
    with pytest.raises(ValueError, match="num_tokens is"):
        matcher.rollback(len(tokens) + 1)


@settings(max_examples=60)
@given(name=st.sampled_from(corpus.SHORT), seed=st.integers(0, 2**32), room=st.integers(1, 60))
def test_jump_forward_does_not_change_the_answer(demo: Model, name: str, seed: int, room: int):
    """For any `max_tokens`, which may cut off a run of forced tokens."""
    answers = [
        demo.write(demo.matcher(json=SCHEMAS[name]), seed, jump=jump, max_tokens=room) for jump in (True, False)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].finished == answers[1].finished


def test_forced_tokens_are_those_of_the_tokenizer(any_model: Model):
    """Without white space most of this object is forced. llguidance's own mask allows only the forced token."""
    matcher = any_model.matcher(json=FIXED, disable_any_whitespace=True)
    answer = any_model.write(matcher, 0)
    assert answer.finished
    assert answer.forced > len(answer.token_ids) / 2
    single = any_model.matcher(json=FIXED, disable_any_whitespace=True)
    for token_id in answer.token_ids:
        forced = single.forced_tokens()
        if forced:
            words = np.zeros(mask_words(any_model.vocab_size), np.int32)
            single._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            assert np.flatnonzero(bits(words, any_model.vocab_size)).tolist() == forced[:1] == [token_id]
        assert single.accept(token_id)


# -- white space ------------------------------------------------------------------------------------------------------


def blanks(model: Model, **fields: object) -> str:
    """Return the answer of a model that prefers white space to all other tokens."""
    matcher = model.matcher(json=corpus.obj({"a": corpus.N, "b": corpus.arr(corpus.N, 2, 2)}), **fields)
    likes = np.array([4.0 * len(text) if text.strip(b" \n\t\r") == b"" else 0.0 for text in model.token_bytes])
    likes += [0 if text[:1] not in b'"}],:0123456789' else 1.0 for text in model.token_bytes]
    words = np.zeros(mask_words(model.vocab_size), np.int32)
    tokens: list[int] = []
    while len(tokens) < 512 and not matcher.is_finished:
        matcher.mask_into(words)
        tokens.append(int(np.where(bits(words, model.vocab_size), likes, -np.inf).argmax()))
        assert matcher.accept(tokens[-1])
    return model.decode(tokens)


def test_white_space_is_bounded_by_default(any_model: Model):
    text = blanks(any_model)
    assert json.loads(text).keys() == {"a", "b"}
    assert re.search(r"\s", text)
    for run in re.findall(r"\s+", text):
        assert re.fullmatch(r" |\r?\n( {0,64}|\t{0,32})", run), run


def test_white_space_follows_the_options(any_model: Model):
    assert re.search(r"\s", blanks(any_model, disable_any_whitespace=True)) is None
    assert re.search(r"\s", blanks(any_model, whitespace_pattern="")) is None
    for run in re.findall(r"\s+", blanks(any_model, whitespace_pattern=r"[\s]{0,3}")):
        assert re.fullmatch(r"[ \n\r\t]{1,3}", run), run
    endless = blanks(any_model, whitespace_pattern=r"[ \n]*")
    assert re.search(r"\s{200}", endless)  # the caller's pattern has no bound


# -- other kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"choice": ["yes", "no", 'a "quoted\\ one"\n', "é漢👍", ".*"]}, r'yes|no|a "quoted\\ one"\n|é漢👍|\.\*'),
        ({"grammar": 'root ::= "a" b | [0-9]+ "!"\nb ::= "(" b ")" | "c"\n'}, r"a\(*c\)*|[0-9]+!"),
        ({"grammar": 'start: "a" b | /[0-9]+/ "!"\nb: "(" b ")" | "c"\n'}, r"a\(*c\)*|[0-9]+!"),
    ],
)
def test_choices_and_grammars(any_model: Model, fields: dict, pattern: str):
    texts = set()
    for seed in range(12):
        answer = any_model.write(any_model.matcher(**fields), seed, max_tokens=200)
        stepwise = any_model.write(any_model.matcher(**fields), seed, jump=False, max_tokens=200)
        assert stepwise.token_ids == answer.token_ids
        if answer.finished:
            texts.add(any_model.decode(answer.token_ids))
    assert len(texts) > 1
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_json_object(any_model: Model):
    finished = 0
    for seed in range(6):
        answer = any_model.write(any_model.matcher(json_object=True), seed)
        if answer.finished:
            finished += 1
            assert isinstance(json.loads(any_model.decode(answer.token_ids)), dict)
    assert finished >= 5


TAG = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=add>", "schema": corpus.obj({"x": {"type": "integer", "maximum": 9}}), "end": "</f>"},
        {"begin": "<f=list>", "schema": {"type": "array", "items": {"enum": [1, 2]}}, "end": "</f>"},
    ],
}


@pytest.mark.parametrize(
    ("text", "allowed", "complete"),
    [
        ("", True, True),
        ("words, < and <f", True, True),
        ("<f=", True, False),
        ("<f=sub>", False, False),
        ('so <f=add>{"x":1}</f> it is', True, True),
        ('<f=add>{"x": 1}</f><f=list>[1,2]</f>', True, True),
        ('<f=add>{"x":1}', True, False),
        ('<f=add>{"y":1}</f>', False, False),
        ("<f=list>[3]</f>", False, False),
    ],
)
def test_structural_tags(demo: Model, text: str, allowed: bool, complete: bool):
    matcher = demo.matcher(structural_tag=TAG)
    tokenizer = load_tokenizer(DEMO)
    assert tokenizer is not None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert all(matcher.accept(token_id) for token_id in tokens) == allowed
    if allowed:
        assert matcher.is_accepting == complete


def test_a_step_that_costs_too_much_raises_a_short_error(demo: Model):
    """The error comes in the middle of an answer, in one line, and names the parameter."""
    regex = "|".join(f".*{chr(97 + i)}.{{{50 + i}}}x" for i in range(26))
    with pytest.raises(RequestError, match=r"cannot continue after \d+ tokens") as caught:
        demo.write(demo.matcher(regex=regex), 0, strength=-5.0)
    assert caught.value.parameter == "structured_outputs.regex"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def accept_all(model: Model, matcher: GrammarMatcher, token_ids: list[int]) -> None:
    words = np.zeros(mask_words(model.vocab_size), np.uint32)
    for token_id in token_ids:
        matcher.mask_into(words)
        assert matcher.accept(token_id)


def test_a_grammar_whose_lexer_states_are_used_up_is_renewed(demo: Model):
    """All answers share a limited number of lexer states. The twelfth answer uses them up."""
    properties = {f"field_{i}": {"type": "string", "maxLength": 1000 + 100 * i} for i in range(16)}
    schema = corpus.obj(properties)
    tokenizer = load_tokenizer(DEMO)
    begun = demo.matcher(json=schema)  # continues after all others
    said = tokenizer.encode('{"field_0": "alpha', add_special_tokens=False)
    accept_all(demo, begun, said)
    for number in range(20):
        text = json.dumps({f"field_{i}": ("alpha beta " * 90)[: 900 if i == number % 16 else 60] for i in range(16)})
        accept_all(demo, demo.matcher(json=schema), tokenizer.encode(text, add_special_tokens=False))
    accept_all(demo, begun, tokenizer.encode(' beta", "field_1": "', add_special_tokens=False))


def test_an_answer_that_fails_does_not_affect_other_answers(demo: Model):
    """Neither an unfinished answer of the same grammar, nor answers that begin later."""
    hostile = {"regex": "a{1,1000}{1,1000}"}
    letters = load_tokenizer(DEMO).encode("a", add_special_tokens=False)
    other = demo.matcher(**hostile)
    accept_all(demo, other, letters * 5)
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot continue after"):
            accept_all(demo, demo.matcher(**hostile), letters * 200)
        accept_all(demo, other, letters)
        accept_all(demo, demo.matcher(**hostile), letters * 20)
    assert len(other) == 7
