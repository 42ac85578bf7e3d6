"""Grammars over added tokens, with the added tokens of Qwen3, Llama 3, Mistral and gpt-oss."""

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jpaged.engine.grammar import GrammarCompiler, GrammarMatcher, ReasoningPrefix
from jpaged.engine.step_plan import mask_words
from jpaged.errors import RequestError
from jpaged.params.structured_outputs import StructuredOutputsParams
from tests.structured import sampling
from tests.structured.grammar_model import SECONDS
from tests.support import added_tokens

SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False
}  # fmt: skip
BEGIN = {"qwen3": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "gpt-oss": "<|channel|>"}


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, GrammarCompiler]]:
    made = {
        name: GrammarCompiler(
            added_tokens.tokenizer(name), added_tokens.VOCAB_SIZE, added_tokens.ids(name, *added_tokens.ENDS[name])
        )
        for name in added_tokens.NAMES
    }
    yield made
    for compiler in made.values():
        compiler.close()


def matcher_of(compiler: GrammarCompiler, reasoning: ReasoningPrefix | None = None, **fields: object) -> GrammarMatcher:
    return compiler.submit(StructuredOutputsParams(**fields), reasoning).result(SECONDS).matcher()


def allowed(matcher: GrammarMatcher) -> set[int]:
    words = np.zeros(mask_words(added_tokens.VOCAB_SIZE), np.uint32)
    matcher.mask_into(words)
    return set(np.flatnonzero(sampling.bits(words, added_tokens.VOCAB_SIZE)).tolist())


def follow(matcher: GrammarMatcher, token_ids: list[int]) -> bool:
    """Accept tokens as the engine does. Returns False at the first one that the mask does not allow."""
    for token_id in token_ids:
        mask = allowed(matcher)
        assert all(matcher.copy().accept(one) for one in mask)
        if token_id not in mask:
            return False
        assert matcher.accept(token_id)
    return True


def spelled(text: str) -> list[int]:
    """Return the tokens of a text without added tokens."""
    backend = added_tokens.tokenizer("qwen3").backend_tokenizer
    return [token_id for part in re.split(r"(?<=[<\[])", text) for token_id in backend.encode(part).ids]


def escaped(text: str) -> str:
    return "".join(rf"\x{ord(char):02x}" for char in text)


@pytest.mark.parametrize("name", added_tokens.NAMES)
def test_a_regex_over_an_added_token_can_be_written(compilers, name):
    """A token that is not special is text. A special token is not, so the answer spells its name."""
    tag = BEGIN[name]
    (tag_id,) = added_tokens.ids(name, tag)
    text = f"{tag}ab"
    matcher = matcher_of(compilers[name], regex=escaped(text))
    tokens = []
    while not matcher.is_finished:
        token_id = min(allowed(matcher))
        assert matcher.accept(token_id)
        tokens.append(token_id)
    assert (tag_id in tokens) == (name == "qwen3")
    assert added_tokens.tokenizer(name).decode(tokens, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", added_tokens.NAMES)
def test_where_text_is_free_the_token_is_allowed_if_it_is_text(compilers, name):
    tokenizer = added_tokens.tokenizer(name)
    ends = set(added_tokens.ids(name, *added_tokens.ENDS[name]))
    matcher = matcher_of(compilers[name], regex=r"(.|\n)*")
    plain = set(added_tokens.ids(name, *added_tokens.PLAIN.get(name, ())))
    special = set(added_tokens.ids(name, *added_tokens.SPECIAL[name]))
    mask = allowed(matcher)
    assert plain <= mask
    assert special & mask == ends
    assert max(mask) < len(tokenizer)
    either = matcher_of(compilers[name], regex=f"({escaped(BEGIN[name])}|x)+")
    assert follow(either.copy(), spelled(BEGIN[name] + "x" + BEGIN[name]))
    assert follow(either, [*added_tokens.ids(name, BEGIN[name]), *spelled("x")]) == (name == "qwen3")


@pytest.mark.parametrize("name", added_tokens.NAMES)
def test_a_grammar_may_name_an_added_token(compilers, name):
    """By its id, `<[4098]>`, or a special token by its name."""
    (token_id,) = added_tokens.ids(name, BEGIN[name])
    ways = [f"<[{token_id}]>"] + [BEGIN[name]] * (name in ("llama3", "gpt-oss"))
    for way in ways:
        matcher = matcher_of(compilers[name], grammar=f'start: {way} "a" | "b"\n')
        assert allowed(matcher) == {token_id, *spelled("b")}
        assert follow(matcher, [token_id, *spelled("a")])
        assert matcher.is_finished
    with pytest.raises(RequestError, match="Token range end too large: 384"):
        matcher_of(compilers[name], grammar='start: <[384]> "a"\n')


@pytest.mark.parametrize("name", added_tokens.NAMES)
def test_an_end_token_in_a_grammar_ends_the_answer(compilers, name):
    """Also with `ignore_eos`, where the matcher receives the token."""
    ends = added_tokens.ids(name, *added_tokens.ENDS[name])
    for ending in (f"<[{ends[-1]}]>", f'("b" | <[{ends[-1]}]>)', f'<[{ends[-1]}]> "b"'):
        matcher = matcher_of(compilers[name], grammar=f'start: "a" {ending}\n')
        assert follow(matcher, [*spelled("a"), ends[-1]])
        assert matcher.is_finished
        assert matcher.is_accepting
        assert matcher.forced_tokens() == []
        assert allowed(matcher) == set(ends)
        assert not matcher.accept(ends[-1])
        matcher.rollback(1)
        assert not matcher.is_finished
        assert follow(matcher, [ends[-1]])


TAGS = {
    "qwen3": (["<tool_call>"], "<tool_call>\n", "\n</tool_call>"),
    "llama3": (["<|python_tag|>"], "<|python_tag|>", "<|eom_id|>"),
    "mistral": (["[TOOL_CALLS]"], "[TOOL_CALLS]f[ARGS]", ""),
    "gpt-oss": (
        ["<|channel|>commentary to="], "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", added_tokens.NAMES)
def test_structural_tags_with_added_tokens(compilers, name):
    triggers, begin, end = TAGS[name]
    tag = {
        "type": "structural_tag", "triggers": triggers, "structures": [{"begin": begin, "schema": SCHEMA, "end": end}]
    }  # fmt: skip
    start = matcher_of(compilers[name], structural_tag=json.dumps(tag))
    encode = added_tokens.tokenizer(name).encode

    def takes(text: str) -> bool:
        return follow(start.copy(), encode(text))

    assert takes(f'Hi! {begin}{{"n":7}}{end}')
    assert takes(f'{begin}{{"n": 7}}{end}')
    assert not takes(f'Hi! {begin}{{"m":7}}{end}')
    if name == "gpt-oss":
        analysis = "<|channel|>analysis<|message|>Hm: {1}<|end|><|start|>assistant"
        assert takes(f'{analysis}<|channel|>commentary<|message|>So.<|end|>{begin}{{"n":7}}{end}')
        assert not takes(f"{analysis}<|channel|>commentary to=functions.g")
    if name == "qwen3":
        assert follow(start.copy(), [*spelled('<tool_call>\n{"n":7}'), *encode("\n</tool_call> and <")])
        assert not follow(start.copy(), spelled("<tool_call>\n7"))


def test_reasoning_between_added_tokens(compilers):
    """Qwen3's reasoning tags are added tokens that are not special."""
    for opened, before in ((False, "<think>Hm."), (True, "Hm.")):
        prefix = ReasoningPrefix("<think>", "</think>", opened)
        matcher = matcher_of(compilers["qwen3"], prefix, regex="yes|no")
        assert follow(matcher, added_tokens.tokenizer("qwen3").encode(f"{before}</think>\n\nyes"))
        assert matcher.is_finished


@pytest.mark.parametrize("text", ["[TOOL_CALLS] a", " [X] b", "e\u0301[X]"])
def test_forced_text_that_the_tokenizer_changes(text):
    """A normaliser changes the text, or an added token strips the blanks around it. The forced tokens spell it."""
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, rstrip=True, normalized=False)])
    backend.add_tokens([AddedToken("[X]", special=False, lstrip=True, rstrip=True, normalized=False)])
    compiler = GrammarCompiler(sampling.Wrapped(backend), added_tokens.VOCAB_SIZE, ())
    try:
        matcher = matcher_of(compiler, choice=[text])
        tokens = matcher.forced_tokens()
        assert backend.decode(tokens) == text
        assert follow(matcher, tokens)
    finally:
        compiler.close()
