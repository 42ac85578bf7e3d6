"""Grammars of forced calls: they accept exactly the calls that the format's parser reads."""

import json

import llguidance
import pytest

from jpaged.errors import RequestError
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.definitions import ToolChoice, checked_tools
from jpaged.parsers.grammar import enforced_format, tool_grammar
from jpaged.parsers.tool_formats import FORMATS

NUMBER = {"$ref": "#/$defs/number"}
SEARCH = {"properties": {"n": NUMBER}, "required": ["n"], "$defs": {"number": {"type": "integer"}}}
TOOLS = checked_tools([
    {"type": "function", "function": {"name": "search", "parameters": {**SEARCH, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
])
REQUIRED, NAMED = ToolChoice("required"), ToolChoice("named", "search")
ONE = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"n": 1}}\n</tool_call>',
    "llama3_json": '{"name": "search", "parameters": {"n": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "search", "arguments": {"n": 1}}]',
    "json": '[{"name": "search", "arguments": {"n": 1}}]',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": ONE["llama3_json"] + '; {"name": "now", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "json": ONE["json"][:-1] + ', {"name": "now", "arguments": {}}]',
}


def accepts(fields: dict, text: str) -> bool:
    """True if llguidance accepts a whole text, with one token per byte."""
    assert set(fields) == {"grammar"}
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(fields["grammar"]), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or matcher.is_stopped())


def test_no_grammar_without_a_forced_call():
    for mode in ("none", "auto"):
        assert tool_grammar(TOOLS, ToolChoice(mode), FORMATS["hermes"]) == {}


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("choice", [REQUIRED, NAMED])
def test_an_accepted_call_is_parsed(name, choice):
    fields = tool_grammar(TOOLS, choice, FORMATS[name])
    assert accepts(fields, ONE[name])
    assert accepts(fields, TWO[name]) == (choice is REQUIRED)
    assert not accepts(tool_grammar(TOOLS, choice, FORMATS[name], parallel=False), TWO[name])
    for wrong in ("", ONE[name].replace("1", '"1"'), ONE[name].replace("search", "rm"), "Hello", ONE[name] + "x"):
        assert not accepts(fields, wrong)
    made = AnswerReader(tool_format=FORMATS[name], tool_names=frozenset(("search", "now")))
    answer = made.parse(TWO[name])
    assert answer.content is None
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert calls == [("search", {"n": 1}), ("now", {})]


def test_a_schema_that_cannot_be_enforced_raises():
    schemas = ({"properties": {}}, {"properties": {"v": {"type": "array", "uniqueItems": True}}})
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i, schema in enumerate(schemas)
    ]
    with pytest.raises(RequestError, match="uniqueItems cannot be enforced") as caught:
        tool_grammar(checked_tools(tools), REQUIRED, FORMATS["hermes"])
    assert caught.value.parameter == "tools[1].function.parameters"
    assert tool_grammar(checked_tools(tools), ToolChoice("named", "f0"), FORMATS["hermes"])


def test_a_named_tool_is_the_only_one_in_the_grammar():
    assert "now" not in tool_grammar(TOOLS, NAMED, FORMATS["json"])["grammar"]


def test_annotations_are_removed():
    """Properties with these names stay. Grammars are limited to 64 KiB, so annotations are removed."""
    properties = {"title": {"type": "string", "title": "T"}, "default": {"items": [{"description": "D"}]}}
    schema = {"description": "x", "properties": properties, "anyOf": [{"title": "U", "required": ["title"]}]}
    (tool,) = checked_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    line = tool_grammar([tool], REQUIRED, FORMATS["json"])["grammar"].splitlines()[-1]
    written = json.loads(line.removeprefix("arguments_0: %json "))
    del written["x-guidance"]
    assert written == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "default": {"items": [{}]}},
        "anyOf": [{"required": ["title"]}],
    }


def test_tags_that_are_added_tokens_are_written_as_tokens():
    added = {"[TOOL_CALLS]": 5, "[ARGS]": 32}
    grammar = tool_grammar(TOOLS, REQUIRED, FORMATS["mistral"], added_tokens=added)["grammar"]
    assert grammar.startswith("start: <[5]> call")
    assert '"search" <[32]> arguments_0' in grammar
    assert "TOOL_CALLS" not in grammar
    grammar = tool_grammar(TOOLS, REQUIRED, FORMATS["hermes"], added_tokens={"<tool_call>": 7, "</tool_call>": 8})
    assert grammar["grammar"].startswith(r'start: <[7]> "\n" call "\n" <[8]> ("\n" <[7]>')
    grammar = tool_grammar(TOOLS, NAMED, FORMATS["llama3_json"], added_tokens={"<|python_tag|>": 7})
    assert grammar["grammar"].startswith("start: <[7]>? call\n")


def test_the_enforced_format_of_pythonic_and_of_none_is_json():
    assert enforced_format(FORMATS["pythonic"]) is enforced_format(None) is FORMATS["json"]
    assert enforced_format(FORMATS["hermes"]) is FORMATS["hermes"]
