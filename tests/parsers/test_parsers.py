"""Parsers of answers: calls, content and reasoning do not depend on how the text is cut into pieces."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.params.reasoning_tags import REASONING_PARSERS, ReasoningTags
from jpaged.parsers.answer import ParsedAnswer
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.known_tools import schema_types
from jpaged.parsers.scanner import MAX_STEPS
from jpaged.parsers.tool_formats import FORMATS
from tests.support import dialects
from tests.support.tool_calls import RECORDED, TOOLS, reader

QWEN3 = REASONING_PARSERS["qwen3"]


def parts_of(answer: ParsedAnswer) -> tuple:
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize(("format_name", "text", "content", "calls"), RECORDED)
@pytest.mark.parametrize("before", ["", "<think>\nHm: <tool_call>? [x]\n</think>\n\n"])
def test_recorded_answers_cut_at_every_position(format_name, text, content, calls, before):
    with_reasoning = reader(format_name, reasoning=QWEN3)
    if format_name == "openai" and before:  # its messages have headers
        before = "<|channel|>analysis<|message|>Hm: <tool_call>? [x]<|end|>"
    reasoning = "Hm: <tool_call>? [x]" if before else None
    content = text.lstrip() if before and content is ... else text if content is ... else content
    whole = with_reasoning.parse(before + text)
    assert parts_of(whole) == (reasoning, content, calls)
    text = before + text
    assert with_reasoning.parse_pieces(text) == whole  # one character at a time
    for cut in range(len(text) + 1):
        assert with_reasoning.parse_pieces([text[:cut], text[cut:]]) == whole, cut


def test_arguments_stream():
    """Each piece of the arguments is returned at once. The first delta has the name and id."""
    parser = reader("hermes").new()
    pieces = ['<tool_call>{"name": "search"', ', "arguments": {"q": "a', 'b"', "}}</tool_call>"]
    deltas = [parser.feed(piece).tool_calls for piece in pieces]
    assert deltas[0] == []
    assert [[(one.index, one.id, one.name, one.arguments) for one in delta] for delta in deltas[1:]] == [
        [(0, "id", "search", '{"q": "a')],
        [(0, None, None, 'b"')],
        [(0, None, None, "}")],
    ]
    assert not parser.finish()
    assert parser.called


def test_only_the_possible_beginning_of_a_tag_is_held_back():
    parser = reader("hermes").new()
    assert parser.feed("a < b").content == "a < b"
    assert parser.feed(" <tool_").content == ""
    assert parser.feed("box>").content == " <tool_box>"


def test_parallel_false_keeps_the_first_call():
    text = '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call> x'
    assert parts_of(reader("hermes", parallel=False).parse(text)) == (None, "x", [("now", "{}")])


def test_call_ids_have_the_format_of_the_model():
    text = "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"
    ids = [call.id for call in AnswerReader(tool_format=FORMATS["mistral"], tool_names=TOOLS).parse(text).tool_calls]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    other = AnswerReader(tool_format=FORMATS["json"], tool_names=TOOLS).parse('{"name": "now"}').tool_calls[0]
    assert other.id.startswith("call_")


# -- reasoning --------------------------------------------------------------------------------------------------------


HARMONY = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.", "Hm.", "Hello."),
    ("<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b<|end|>", "a\nb", None),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", None),
    ("<|channel|>analysis<|message|>cut o", "cut o", None),
    ("<|channel|>analysis<|message|>a<|start|>assistant<|message|>b", "a", "b"),
    ("<|channel|>analysis<|mess", None, "<|channel|>analysis<|mess"),
    ("<|channel|>final<|message|>a<|end|>commentary<|channel|>final<|message|>b", None, "a\nb"),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), HARMONY)
def test_the_channels_of_harmony(text, reasoning, content):
    """They are separated without a reasoning parser, and without tools."""
    made = reader("openai", tool_names=frozenset())
    for cut in range(len(text) + 1):
        assert parts_of(made.parse_pieces([text[:cut], text[cut:]])) == (reasoning, content, [])


def test_ids_of_kimi_are_ids_of_the_calls():
    calls = reader("kimi_k2").parse(dialects.TWO["kimi_k2"]).tool_calls
    assert [call.id for call in calls] == ["functions.get_weather:0", "functions.now:1"]
    twice = reader("kimi_k2").parse(dialects.TWO["kimi_k2"] + dialects.TWO["kimi_k2"]).tool_calls
    assert [call.id for call in twice[2:]] == ["id", "id"]


def test_strings_without_quotes_stream():
    parser = reader("qwen3_coder").new()
    pieces = ["<tool_call>\n<function=search>\n<parameter=q>\na\"", "b\n", "c\n</param", "eter>\n</function>"]
    given = ["".join(one.arguments for one in parser.feed(piece).tool_calls) for piece in pieces]
    assert given == ['{"q": "a\\"', "b", "\\nc", '"}']


@pytest.mark.parametrize(
    ("tags", "prompt", "text", "reasoning", "content"),
    [
        (QWEN3, "<user>hi<assistant>", "<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello."),
        (QWEN3, "<assistant><think>\n", "Hm.\n</think>\n\nHello.", "Hm.", "Hello."),
        (QWEN3, "<assistant><think>\n", "<think>Hm.</think>Hello.", "Hm.", "Hello."),
        (QWEN3, "<assistant><think>\n\n</think>\n\n", "Hello </think>", None, "Hello </think>"),
        (QWEN3, "", "Hello <think>not this</think>", None, "Hello <think>not this</think>"),
        (QWEN3, "", "<think>cut off ", "cut off ", None),
        (QWEN3, "", "<think></think>\n", None, None),
        (QWEN3, "", "<thin", None, "<thin"),
        (REASONING_PARSERS["deepseek_r1"], "<user>", "Hm.</think>Hello.", "Hm.", "Hello."),
        (REASONING_PARSERS["deepseek_r1"], "<think></think>", "Hello.", None, "Hello."),
        (REASONING_PARSERS["nemotron_v3"], "<think></think>", "Hello.", None, "Hello."),
        (REASONING_PARSERS["minimax_m2"], "<think>\n", "Hm.\n</think>\n\nHello.", "Hm.", "Hello."),
        (REASONING_PARSERS["glm45"], "<|assistant|>", "\n<think>Hm.</think>\nHello.", "Hm.", "Hello."),
        (REASONING_PARSERS["glm45"], "\n<think></think>", "Hello.", None, "Hello."),
        (REASONING_PARSERS["kimi_k2"], "<|im_middle|>", "<think>Hm.</think>Hello.", "Hm.", "Hello."),
        (REASONING_PARSERS["kimi_k2"], "", "Hm. <|tool_calls_section_begin|>x", "Hm.", "<|tool_calls_section_begin|>x"),
        (REASONING_PARSERS["gemma4"], "", "<|channel>thought\nHm.\n<channel|>Hello.", "Hm.", "Hello."),
        (REASONING_PARSERS["gemma4"], "<|channel>thought\n<channel|>", "Hello.", None, "Hello."),
        (REASONING_PARSERS["gemma4"], "<|channel>thought\n", "Hm.<channel|>Hello.", "Hm.", "Hello."),
        (REASONING_PARSERS["granite"], "", "Here is my thought process: a Here\nHere's my response: b", "a Here", "b"),
        (REASONING_PARSERS["granite"], "", "Here's my thought process:a", "a", None),
        (REASONING_PARSERS["granite"], "", "Here is my th", None, "Here is my th"),
        (REASONING_PARSERS["seed_oss"], "<seed:think>", "Hm.</seed:think>Hello.", "Hm.", "Hello."),
        (ReasoningTags("[THINK]", "[/THINK]"), "", "[THINK]a[/THI[/THINK] b", "a[/THI", "b"),
    ],
)
def test_reasoning(tags, prompt, text, reasoning, content):
    made = reader(None, reasoning=dataclasses.replace(tags, opened=tags.opened_by(prompt) or None))
    assert parts_of(made.parse(text)) == (reasoning, content, [])
    for cut in range(len(text) + 1):
        assert parts_of(made.parse_pieces([text[:cut], text[cut:]])) == (reasoning, content, [])


# -- any text ---------------------------------------------------------------------------------------------------------

PARTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "```",
    "```json", "<think>", "</think>", '{"name": "now", "arguments": {', '{"name": "search", "parameters": {"q": ',
    '[TOOL_CALLS]search[ARGS]{"q": "', "[now(), search(q='", "search(", "q=", "now", "}", "}}", "[", "]", "{", "1",
    "<function=search>\n<parameter=q>", "<parameter=tags>", "</parameter>", "</function>",
    "<arg_key>q</arg_key><arg_value>",
    '"', "'", ",", ":", ";", ")", "\\", "\\u00", "\\n", " ", "\n", "-1.5", "tr", "None", "\x00", "é",
])  # fmt: skip
TEXTS = st.lists(PARTS | st.text(max_size=3), max_size=25).map("".join)


def cut_at(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[low:high] for low, high in itertools.pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 400), max_size=12), name=st.sampled_from(sorted(FORMATS)))
def test_the_parse_of_any_text_does_not_depend_on_the_cuts(text, places, name):
    made = reader(name, reasoning=QWEN3)
    whole = made.parse(text)
    assert made.parse_pieces(cut_at(text, places)) == whole
    assert made.parse_pieces(text) == whole
    parser = made.new()
    parser.feed(text)
    parser.finish()
    if parser.called and len(whole.tool_calls) == 1:
        assert isinstance(json.loads(whole.tool_calls[0].arguments), dict)
    # Without tools nothing is a call, and every character is content.
    assert reader(name, tool_names=frozenset()).parse_pieces(cut_at(text, places)).content == (text or None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), VALUES, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(["now", "search"]), ARGUMENTS), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 400), max_size=6),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_written_calls_are_parsed_back(calls, places, ascii_only, indent):
    """Arguments are written with json.dumps for the JSON formats, and with repr for the pythonic one."""

    def dumped(name, arguments, key="arguments"):
        return json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only, indent=indent)

    keywords = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    written = {
        "hermes": "\n".join(f"<tool_call>\n{dumped(*call)}\n</tool_call>" for call in calls),
        "llama3_json": "; ".join(dumped(*call, "parameters") for call in calls),
        "mistral": "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given, indent=indent)}" for name, given in calls),
        "json": f"[{', '.join(dumped(*call) for call in calls)}]",
        "pythonic": f"[{', '.join(keywords)}]",
    }
    for name, text in written.items():
        answer = reader(name).parse_pieces(cut_at(text, places))
        assert answer.content is None, name
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == calls, name


HOSTILE = {
    "tags": "<tool_call>", "half tags": "<tool_cal", "brackets": "[]", "nesting": "[", "objects": '{"a":',
    "numbers": "1,", "digits": "1", "quotes": '"', "backslashes": "\\", "escapes": "\\n", "controls": "\n\x01",
    "blanks": " ", "python": "f(a=", "whole calls": '<tool_call>{"name":"now"}</tool_call>', "tuples": "now(),",
    "named calls": "[TOOL_CALLS]now[ARGS]{}", "open calls": '<tool_call>{"name": "now", "arguments": {"a": [',
    "fences": "```json", "apostrophes": "'", "xml calls": "<tool_call><function=now></function></tool_call>",
    "xml arguments": "<parameter=q>a</parameter>", "messages": "<|start|>assistant<|channel|>final<|message|>a<|end|>",
    "headers": "<|channel|>", "half end": "</paramete",
}  # fmt: skip
OPENINGS = {
    "hermes": '<tool_call>{"name": "now", "arguments": {"a": [', "llama3_json": '{"name": "now", "parameters": {"a": [',
    "mistral": '[TOOL_CALLS]now[ARGS]{"a": [', "pythonic": "[now(a=[", "json": '[{"name": "now", "arguments": {"a": [',
    "qwen3_coder": "<tool_call><function=now><parameter=tags>[",
    "glm45": "<tool_call>now\n<arg_key>q</arg_key><arg_value>",
    "glm47": "<tool_call>now<arg_key>tags</arg_key><arg_value>[",
    "granite": '<|tool_call|>[{"name": "now", "arguments": {',
    "minimax_m2": '<minimax:tool_call><invoke name="now"><parameter name="n">', "gemma4": "<|tool_call>call:now{a:[",
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="false">[',
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="true">',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{", "llama4_pythonic": "[now(a=[",
    "deepseek_v31": '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": [',
    "seed_oss": "<seed:tool_call><function=now><parameter=q>",
    "kimi_k2": '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"a": [',
    "openai": '<|channel|>commentary to=functions.now json<|message|>{"a": [',
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_hostile_text_costs_a_bounded_number_of_steps(name):
    """A parser keeps at most one piece of unread text, so it reads no text twice. It reads at most MAX_STEPS tokens."""
    for text in HOSTILE.values():
        for opening in ("", OPENINGS[name], OPENINGS[name] + '"'):
            hostile = opening + text * (20_000 // len(text))
            parser = reader(name, reasoning=QWEN3).new()
            scanner = parser._scanner
            for start in range(0, len(hostile), 1_000):
                parser.feed(hostile[start : start + 1_000])
                assert len(scanner.text) - scanner.pos <= 1_100
            parser.finish()
            assert scanner.pos == len(scanner.text)


def test_lists_without_quotes_share_the_limit_of_an_answer():
    """Once each value had a limit of its own, and a megabyte of lists took over a second."""
    count = 2 * MAX_STEPS // 2_000
    values = "".join(f"<parameter=k{i}>\n[{'1,' * 999}1]\n</parameter>\n" for i in range(count))
    (call,) = reader("qwen3_coder").parse(f"{dialects.QWEN}{values}</function>").tool_calls
    assert 1 < call.arguments.count(": [") <= count // 2


FORCED = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": {"text": "a b", "limit": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "find", "parameters": {"text": "a b", "limit": 3}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "find", "arguments": {"text": "a b", "limit": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral named": '[TOOL_CALLS]find[ARGS]{"text": "a b", "limit": 3}[TOOL_CALLS]now[ARGS]{}',
    "json": '[{"name": "find", "arguments": {"text": "a b", "limit": 3}}, {"name": "now", "arguments": {}}]',
}

FORCED_CASES = {name: (text, [("find", '{"text": "a b", "limit": 3}'), ("now", "{}")]) for name, text in FORCED.items()}
FORCED_CASES |= {
    name: (text, dialects.EXPECTED_TWO)
    for name, text in dialects.TWO.items()
    if name not in ("mistral", "llama4_pythonic")
}


@pytest.mark.parametrize("name", FORCED_CASES)
def test_a_forced_call_that_is_cut_leaves_no_content(name: str):
    """Cut at every character: the content stays empty, and the arguments are a beginning of the whole ones."""
    text, calls = FORCED_CASES[name]
    names = [called for called, _ in calls]
    made = reader(name.split()[0], tool_names=frozenset(names), forced=True)
    for end in range(len(text) + 1):
        for pieces in ([text[:end]], list(text[:end])):
            answer = made.parse_pieces(pieces)
            assert (answer.content, answer.reasoning) == (None, None), text[:end]
            assert [call.name for call in answer.tool_calls] == names[: len(answer.tool_calls)]
            for call, (_, whole) in zip(answer.tool_calls, calls, strict=False):
                assert whole.startswith(call.arguments)
    assert [call.arguments for call in made.parse(text).tool_calls] == [arguments for _, arguments in calls]


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("glm45", "Use <tool_call>search<br> to break", "Use <tool_call>search<br> to break"),
        ("qwen3_coder", "The tag <function=search><b> is new", "The tag <function=search><b> is new"),
    ],
)
def test_a_tag_of_another_kind_begins_no_call(name: str, text: str, content: str):
    assert parts_of(reader(name).parse(text)) == (None, content, [])


def test_harmony_without_arguments():
    header = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    assert parts_of(reader("openai").parse(header + "<|call|>")) == (None, None, [("search", "{}")])
    before = "<|channel|>final<|message|>Hm.<|end|><|start|>assistant"
    assert parts_of(reader("openai").parse(before + header)) == (None, "Hm.", [])


def test_types_of_a_schema_that_refers_to_itself():
    """Once it took time that was exponential in the number of alternatives."""
    again = {"$ref": "#/$defs/a"}
    root = {"$defs": {"a": {"anyOf": [again] * 10}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
    levels = {f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 10} for i in range(9)} | {"l9": {"type": "number"}}
    assert schema_types(again, root) == frozenset()
    assert schema_types({"$ref": "#/$defs/b"}, root) == {"integer", "null"}
    assert schema_types({"$ref": "#/$defs/l0"}, {"$defs": levels}) == frozenset({"number"})
