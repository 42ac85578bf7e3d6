"""Reasoning before a grammar: the grammar accepts exactly the reasoning that the parser of answers removes."""

import dataclasses
import json

import pytest
from tokenizers import AddedToken

from jpaged import SamplingParams
from jpaged.engine.grammar import GrammarCompiler, GrammarMatcher, ReasoningPrefix
from jpaged.engine.output.reasoning_budget import EncodedReasoningTags, ReasoningBudget
from jpaged.engine.request import Request
from jpaged.engine.sampling_extras import SamplingExtras, unpack_mask
from jpaged.loading.tokenizer import load_tokenizer
from jpaged.outputs import RequestMetrics
from jpaged.params.reasoning_tags import REASONING_PARSERS, ReasoningTags
from jpaged.params.structured_outputs import StructuredOutputsParams
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.definitions import ToolChoice, checked_tools
from jpaged.parsers.grammar import tool_grammar
from jpaged.parsers.harmony import MARKERS
from jpaged.parsers.tool_formats import FORMATS
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


def test_a_used_up_budget_waits_for_the_end_of_a_character(demo: Model):
    """A grammar allows no end tag inside a character of several tokens. The rest of the character comes first."""
    tokenizer, params = load_tokenizer(DEMO), SamplingParams(structured_outputs={"json": SCHEMA})
    end_ids = tokenizer.encode(TAGS.end, add_special_tokens=False)
    character = tokenizer.encode("🎉", add_special_tokens=False)
    assert len(character) > 2  # tokens of single bytes
    eos = frozenset(demo.eos_token_ids)
    extras = SamplingExtras(params, demo.vocab_size)
    request = Request("0", [5], params, 100, eos, None, RequestMetrics(0.0), extras=extras)
    at = request.output.matcher = matcher(demo, {"json": SCHEMA}, opened=True)
    tags = EncodedReasoningTags(TAGS.start.encode(), TAGS.end.encode(), tuple(end_ids))
    budget = request.output.reasoning_budget = ReasoningBudget(tags, 1, opened=True)
    for place, token_id in enumerate([*character, *end_ids]):
        allowed = unpack_mask(request.mask()).tolist()
        assert token_id in allowed
        assert (allowed == [token_id]) == (place >= len(character)) == (budget.forced == token_id)
        assert at.accept(token_id)
        budget.append(token_id, demo.token_bytes[token_id])
        request.token_ids.append(token_id)
    assert budget.forced is None


def test_harmony_is_written_with_special_tokens():
    """As gpt-oss writes it: reasoning or none, then the header of the final message, or of a forced call."""
    backend = sampling.byte_level()
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in (*MARKERS, "<eos>")])
    made = model(sampling.Wrapped(backend), backend.get_vocab_size(), (backend.token_to_id("<eos>"),), backend.decode)
    tags = REASONING_PARSERS["openai_gptoss"]
    tools = checked_tools([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])
    ids = {tag: backend.token_to_id(tag) for tag in MARKERS}
    call = tool_grammar(
        tools, ToolChoice("required"), FORMATS["openai"], added_tokens=ids, special_tokens=frozenset(MARKERS)
    )
    reasoning, n = f"{tags.start}Hm. final{tags.end}", json.dumps({"n": 7})
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    cases = [
        ({"json": SCHEMA}, tags.header, [tags.header + n, reasoning + tags.header + n], [n, reasoning + n]),
        (call, "", [head + n, reasoning + head + n], [n, head + "{}", tags.header + n, reasoning + n]),
    ]
    for fields, header, right, wrong in cases:
        prefix = ReasoningPrefix(tags.start, tags.end, False, header=header)
        grammar = made.compiler.submit(StructuredOutputsParams(**fields), prefix).result(SECONDS)
        for text in (*right, *wrong):
            at = grammar.matcher()
            takes = all(at.accept(token_id) for token_id in backend.encode(text, add_special_tokens=False).ids)
            assert (takes and (at.is_finished or at.is_accepting)) == (text in right), text
            if text in right:
                read = AnswerReader(tool_format=FORMATS["openai"], tool_names=frozenset("f")).parse(text)
                assert read.reasoning == ("Hm. final" if text.startswith(reasoning) else None)
                assert (read.content or read.tool_calls[0].arguments) == n
    made.compiler.close()
