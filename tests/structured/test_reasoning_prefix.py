"""Reasoning before a grammar: the grammar accepts exactly the reasoning that the parser of answers removes."""

import dataclasses
import json

import pytest
from tokenizers import AddedToken

from jpaged.engine.grammar import GrammarCompiler, GrammarMatcher, ReasoningPrefix
from jpaged.loading.tokenizer import load_tokenizer
from jpaged.params.reasoning_tags import ReasoningTags
from jpaged.params.structured_outputs import StructuredOutputsParams
from jpaged.parsers.answer_parser import AnswerReader
from tests.structured import sampling
from tests.structured.grammar_model import DEMO, SECONDS, Model, model

TAGS = ReasoningTags("<think>", "</think>")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f>"],
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
}
KINDS = {
    "json": ({"json": SCHEMA}, '{"n":7}'),
    "json_object": ({"json_object": True}, '{"a": [1]}'),
    "regex": ({"regex": "[0-9]+ days"}, "12 days"),
    "choice": ({"choice": ["yes", "no"]}, "no"),
    "lark": ({"grammar": 'start: "a" /[0-9]/+\n'}, "a17"),
    "gbnf": ({"grammar": 'root ::= "a" [0-9]+\n'}, "a17"),
    "structural_tag": ({"structural_tag": TAG}, 'So: <f>{"n":7}</f>.'),
}


def matcher(made: Model, fields: dict, opened: bool) -> GrammarMatcher:
    reasoning = ReasoningPrefix(TAGS.start, TAGS.end, opened)
    return made.compiler.submit(StructuredOutputsParams(**fields), reasoning).result(SECONDS).matcher()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("opened", "before", "accepted"),
    [
        (True, "Hm {1}\n< </thin.</think>", True),
        (True, "</think>\n\n", True),
        (True, "", False),
        (False, "", True),
        (False, "<think>Hm.</think>\n\n", True),
        (False, "<think></think>", True),
    ],
)
def test_an_answer_may_begin_with_reasoning(demo: Model, kind, opened, before, accepted):
    fields, answer = KINDS[kind]
    tokenizer = load_tokenizer(DEMO)
    at = matcher(demo, fields, opened)
    takes = all(at.accept(token_id) for token_id in tokenizer.encode(before + answer, add_special_tokens=False))
    assert (takes and (at.is_finished or at.is_accepting)) == accepted
    read = AnswerReader(reasoning=dataclasses.replace(TAGS, opened=opened or None)).parse(before + answer)
    assert (read.content == answer) == accepted


def test_grammars_with_and_without_reasoning_are_cached_separately(demo: Model):
    fields = {"json": SCHEMA}
    plain = demo.compiler.submit(StructuredOutputsParams(**fields)).result(SECONDS)
    assert demo.compiler.submit(StructuredOutputsParams(**fields)).result(SECONDS) is plain
    prefix = ReasoningPrefix(TAGS.start, TAGS.end, True)
    with_reasoning = demo.compiler.submit(StructuredOutputsParams(**fields), prefix).result(SECONDS)
    assert with_reasoning is not plain
    assert demo.compiler.submit(StructuredOutputsParams(**fields), prefix).result(SECONDS) is with_reasoning


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("Here's my thought process: a\nHere is my response:\n|17", True),
        ("Here is my thought process:Here's my response:|17", True),
        ("|17", True),
        ("Here is my response:|17", False),
        ("17", False),
    ],
)
def test_other_tags_and_a_header(demo: Model, text, accepted):
    """Reasoning may begin and end with other texts. The header comes before the answer in any case."""
    prefix = ReasoningPrefix(
        "Here is my thought process:", "Here is my response:", False, ("Here's my thought process:",),
        ("Here's my response:",), "|",
    )  # fmt: skip
    at = demo.compiler.submit(StructuredOutputsParams(regex="[0-9]+"), prefix).result(SECONDS).matcher()
    takes = all(at.accept(token_id) for token_id in load_tokenizer(DEMO).encode(text, add_special_tokens=False))
    assert (takes and (at.is_finished or at.is_accepting)) == accepted


@pytest.mark.parametrize("opened", [True, False])
def test_tags_that_are_special_tokens(opened):
    """They are accepted as these tokens."""
    backend = sampling.byte_level()
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in (TAGS.start, TAGS.end)])
    eos = backend.token_to_id("<|end|>")
    made = model(sampling.Wrapped(backend), backend.get_vocab_size(), (eos,), backend.decode)
    assert isinstance(made.compiler, GrammarCompiler)
    start, end = (backend.token_to_id(tag) for tag in (TAGS.start, TAGS.end))
    hm, answer = (backend.encode(text, add_special_tokens=False).ids for text in ("Hm.", json.dumps({"n": 7})))
    at = matcher(made, {"json": SCHEMA}, opened)
    for token_id in [*([] if opened else [start]), *hm, end, *answer]:
        assert at.accept(token_id)
    assert at.is_finished or at.is_accepting
    made.compiler.close()
