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
_DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="n" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
DIALECTS = {  # one call, the text that the second call replaces, and the second call
    "qwen3_coder": ("<tool_call>\n<function=search>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", "",
                    "\n<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    "glm45": ("<tool_call>search\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "",
              "\n<tool_call>now\n</tool_call>"),
    "glm47": ("<tool_call>search<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", "",
              "<tool_call>now</tool_call>"),
    "minimax_m2": ('<minimax:tool_call>\n<invoke name="search">\n<parameter name="n">1</parameter>\n</invoke>\n'
                   "</minimax:tool_call>", "</minimax:tool_call>",
                   '<invoke name="now">\n</invoke>\n</minimax:tool_call>'),
    "deepseek_v32": (_DSML, "</｜DSML｜function_calls>",
                     '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
    "deepseek_v31": ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
                     "<｜tool▁calls▁end｜>", "<｜tool▁calls▁end｜>",
                     "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "deepseek_v3": ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{"n": 1}\n```'
                    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁end｜>",
                    "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
                    "<｜tool▁calls▁end｜>"),
    "kimi_k2": ('<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"n": 1}'
                "<|tool_call_end|><|tool_calls_section_end|>", "<|tool_calls_section_end|>",
                "<|tool_call_begin|>functions.now:12<|tool_call_argument_begin|>{}<|tool_call_end|>"
                "<|tool_calls_section_end|>"),
    "granite": ('<|tool_call|>[{"name": "search", "arguments": {"n": 1}}]', "]", ', {"name": "now", "arguments": {}}]'),
    "seed_oss": ("<seed:tool_call>\n<function=search>\n<parameter=n>1</parameter>\n</function>\n</seed:tool_call>", "",
                 "\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"),
    "gemma4": ("<|tool_call>call:search{n:1}<tool_call|>", "", "<|tool_call>call:now{}<tool_call|>"),
    "pythonic": ("[search(n=1)]", "]", ", now()]"),
    "llama4_pythonic": ("[search(n=1)]", "]", ", now()]"),
}  # fmt: skip
for _name, (_one, _end, _second) in DIALECTS.items():
    ONE[_name], TWO[_name] = _one, _one.removesuffix(_end) + _second
ONE["deepseek_v4"], TWO["deepseek_v4"] = (
    one["deepseek_v32"].replace("function_calls", "tool_calls") for one in (ONE, TWO)
)


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
    assert enforced_format(FORMATS[name], TOOLS) is FORMATS[name]
    fields = tool_grammar(TOOLS, choice, FORMATS[name])
    assert accepts(fields, ONE[name])
    assert accepts(fields, TWO[name]) == (choice is REQUIRED)
    assert not accepts(tool_grammar(TOOLS, choice, FORMATS[name], parallel=False), TWO[name])
    for wrong in ("", ONE[name].replace("1", '"1"'), ONE[name].replace("search", "rm"), "Hello", ONE[name] + "x"):
        assert not accepts(fields, wrong)
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    made = AnswerReader(tool_format=FORMATS[name], tool_names=frozenset(("search", "now")), schemas=schemas)
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


def test_the_enforced_format_of_an_unknown_one_is_json():
    assert enforced_format(None) is FORMATS["json"]
    assert enforced_format(FORMATS["hermes"]) is FORMATS["hermes"]


STRINGS = {
    "text": {"type": "string", "description": "any"}, "kind": {"type": "string", "enum": ["a", "b c"]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {},
    "list": {"type": "array", "items": {"type": "string"}},
}  # fmt: skip


def one_tool(**parameters):
    return checked_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"])
def test_strings_without_quotes_are_forced_as_they_are(name):
    """Any text that does not have the end tag. What the grammar accepts, the parser reads as the schema wants."""
    tools = one_tool(properties=STRINGS, required=["text", "list"])
    openings = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\n",
        "glm45": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">',
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="text" string="true">',
    }  # fmt: skip
    betweens = {
        "qwen3_coder": ("\n</parameter>\n<parameter=", ">\n"),
        "glm45": ("</arg_value>\n<arg_key>", "</arg_key>\n<arg_value>"),
        "minimax_m2": ('</parameter>\n<parameter name="', '">'),
        "deepseek_v32": ('</｜DSML｜parameter>\n<｜DSML｜parameter name="', '" string="true">'),
    }  # fmt: skip
    ends = {
        "qwen3_coder": "\n</parameter>\n</function>\n</tool_call>", "glm45": "</arg_value>\n</tool_call>",
        "minimax_m2": "</parameter>\n</invoke>\n</minimax:tool_call>",
        "deepseek_v32": "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    }  # fmt: skip
    assert enforced_format(FORMATS[name], tools) is FORMATS[name]
    fields = tool_grammar(tools, REQUIRED, FORMATS[name])
    before, after = betweens[name]

    def written(**given):
        text = ""
        for key, value in given.items():
            opening = after.replace("true", "false") if key == "list" else after
            text += openings[name] + value if not text else before + key + opening + value
        return text + ends[name]

    right = written(text='a\n"</b>" 1', kind="b c", note="x", list='["</parameter>"]')
    assert accepts(fields, right)
    assert accepts(fields, written(text="", list="[]"))
    for wrong in (
        written(text="a", kind="c", list="[]"), written(text="a"), written(text="a", list="[1]"),
        written(text="a" + ends[name] + "b", list="[]"), written(text="a", list="[]", kind="a"),
    ):  # fmt: skip
        assert not accepts(fields, wrong), wrong
    schemas = {"f": tools[0].parameters}
    made = AnswerReader(tool_format=FORMATS[name], tool_names=frozenset("f"), schemas=schemas).parse(right)
    assert made.content is None
    expected = {"text": 'a\n"</b>" 1', "kind": "b c", "note": "x", "list": ["</parameter>"]}
    assert [json.loads(call.arguments) for call in made.tool_calls] == [expected]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "maxLength": 3}}},
        {"properties": {"a": {"type": "string", "pattern": "^a"}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array"}]}}},
        {"properties": {"a": {"type": "string", "enum": ["</arg_value>"]}}},
        {"properties": {"a": {"type": "integer"}}, "minProperties": 1},
        {"properties": {}, "required": ["a"]},
        {"properties": {"a<": {"type": "integer"}}},
    ],
)
def test_other_schemas_are_forced_in_json(parameters):
    assert enforced_format(FORMATS["glm45"], one_tool(**parameters)) is FORMATS["json"]
    assert enforced_format(FORMATS["kimi_k2"], one_tool(**parameters)) is FORMATS["kimi_k2"]


def test_a_harmony_answer_has_one_forced_call():
    """After a call the model stops. The tags are special tokens."""
    names = ("<|channel|>", "<|constrain|>", "<|message|>")
    ids = dict(zip(names, (300, 301, 302), strict=True))
    fields = tool_grammar(TOOLS, REQUIRED, FORMATS["openai"], added_tokens=ids, special_tokens=frozenset(names))
    grammar = fields["grammar"]
    assert grammar.startswith("start: call\n")
    assert 'call_0: <[300]> "commentary to=functions.search " <[301]> "json" <[302]> arguments_0\n' in grammar


def test_a_string_ends_at_a_special_token():
    """Free text cannot contain special tokens, so the rule needs no lazy match."""
    tools = one_tool(properties={"a": {"type": "string"}}, required=["a"])
    ids = {"</arg_value>": 300}
    rules = {frozenset(ids): "_text: TEXT <[300]>", frozenset[str](): '_text[lazy]: TEXT "</arg_value>"'}
    for special, rule in rules.items():
        fields = tool_grammar(tools, REQUIRED, FORMATS["glm47"], added_tokens=ids, special_tokens=special)
        assert rule in fields["grammar"]


LISTED = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "array", "items": {"type": "string"}},
          "d": {"type": "object", "properties": {"e": {"type": "string", "enum": ["x"]}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "begin", "end", "right", "wrong"),
    [
        ("gemma4", "<|tool_call>call:f{", "}<tool_call|>",
         {'b:1': {"b": 1}, 'a:<|"|>"u",\n<|"|>,b:1,c:[<|"|>v<|"|>,<|"|><|"|>]': {"a": '"u",\n', "b": 1, "c": ["v", ""]},
          'b:-2,d:{e:<|"|>x<|"|>}': {"b": -2, "d": {"e": "x"}}, "b:3,c:[],d:{}": {"b": 3, "c": [], "d": {}}},
         ["", "a:1,b:1", "b:1,", "b:1,b:1", ",b:1", 'b:1,d:{e:<|"|>y<|"|>}', 'a:<|"|>u<|"|>', 'b:1,c:[1]']),
        ("pythonic", "[f(", ")]",
         {"b=1": {"b": 1}, 'a="\\"u\\"", b=1, c=["v", ""]': {"a": '"u"', "b": 1, "c": ["v", ""]},
          'b=-2, d={"e": "x"}': {"b": -2, "d": {"e": "x"}}},
         ["", "a=1, b=1", "b=1, ", "b=1,b=1", 'b=1, d={"e": "y"}', 'a="u"']),
    ],
)  # fmt: skip
def test_arguments_in_a_list_are_forced(name, begin, end, right, wrong):
    """Required and optional arguments, separated; strings, lists and objects as the dialect writes them."""
    tools = one_tool(properties=LISTED, required=["b"])
    assert enforced_format(FORMATS[name], tools) is FORMATS[name]
    fields = tool_grammar(tools, REQUIRED, FORMATS[name])
    made = AnswerReader(tool_format=FORMATS[name], tool_names=frozenset("f"))
    for text, expected in right.items():
        assert accepts(fields, begin + text + end), text
        assert [json.loads(call.arguments) for call in made.parse(begin + text + end).tool_calls] == [expected]
    for text in wrong:
        assert not accepts(fields, begin + text + end), text


def test_a_schema_that_a_list_cannot_enforce_is_forced_in_json():
    for schema in ({"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string", "maxLength": 3}):
        assert enforced_format(FORMATS["gemma4"], one_tool(properties={"a": schema})) is FORMATS["json"]
    assert enforced_format(FORMATS["pythonic"], one_tool(properties={"a-b": {"type": "null"}})) is FORMATS["json"]


def test_a_schema_whose_rules_would_fill_the_memory_is_forced_in_json():
    """Seven levels of objects, each with ten properties of the next level: 10 million rules in Gemma's dialect."""
    level = {"type": "object", "additionalProperties": False}
    next_level = [{f"p{k}": {"$ref": f"#/$defs/l{i + 1}"} for k in range(10)} for i in range(7)]
    levels = {f"l{i}": {**level, "properties": properties} for i, properties in enumerate(next_level)}
    schema = {**levels["l0"], "$defs": levels | {"l7": {"type": "integer"}}}
    tools = checked_tools([{"type": "function", "function": {"name": "search", "parameters": schema}}])
    assert enforced_format(FORMATS["gemma4"], tools) is FORMATS["json"]
