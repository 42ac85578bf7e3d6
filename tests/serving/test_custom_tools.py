"""Custom tools and allowed tools of a chat request."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jpaged.serving.openai_api.custom_input import CustomInput
from tests.serving.chat_requests import chat, chunks, refused
from tests.serving.http_client import CHAT, post
from tests.serving.tool_definitions import OFFERED

SHELL = {"type": "custom", "custom": {"name": "shell", "description": "runs a command"}}
DIGITS = {"syntax": "regex", "definition": "[0-9]+"}


def grammar_tool(**grammar) -> dict:
    return {"type": "custom", "custom": {"name": "sum", "format": {"type": "grammar", "grammar": grammar or DIGITS}}}


def named(name: str) -> dict:
    return {"type": "custom", "custom": {"name": name}}


def call_of(text: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {json.dumps({"input": text})}}}\n</tool_call>'


def test_a_custom_tool_gets_any_text(chat_url, engine):
    text = 'echo "é\\n\U0001f600" > a\tb'
    engine.says = call_of(text)
    [choice] = chat(chat_url, tools=[SHELL, *OFFERED])["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"], choice["finish_reason"]) == (
        "custom", {"name": "shell", "input": text}, "tool_calls",
    )  # fmt: skip
    [shown, *_] = engine.tokenizer.seen_options["tools"]
    assert shown["function"]["parameters"]["required"] == ["input"]
    assert shown["function"]["description"] == "runs a command"
    deltas = [d for one in chunks(chat_url, tools=[SHELL]) for d in one["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(delta["custom"].get("input", "") for delta in deltas) == text
    assert len(deltas) > 5  # it is streamed
    assert [delta["custom"]["name"] for delta in deltas if "name" in delta["custom"]] == ["shell"]
    # The call can be sent back.
    messages = [*CHAT["messages"], choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    chat(chat_url, messages=messages, tools=[SHELL], max_tokens=1)
    assert engine.tokenizer.seen_messages[1]["tool_calls"][0]["function"]["arguments"] == {"input": text}


@pytest.mark.parametrize("syntax", ["regex", "lark"])
@pytest.mark.parametrize("choice", [named("sum"), "required"])
def test_a_grammar_sets_the_input_of_a_forced_call(chat_url, engine, syntax, choice):
    definition = {"regex": "[0-9]+", "lark": 'start: "1" "2"'}[syntax]
    engine.says = "12"
    fields = {"tools": [grammar_tool(syntax=syntax, definition=definition)], "tool_choice": choice}
    [made] = chat(chat_url, **fields)["choices"]
    [call] = made["message"]["tool_calls"]
    assert (call["custom"], made["message"]["content"]) == ({"name": "sum", "input": "12"}, None)
    assert made["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    asked = engine.seen_params[-1].structured_outputs
    assert (asked.kind, getattr(asked, asked.kind)) == ("grammar" if syntax == "lark" else "regex", definition)
    deltas = [d for one in chunks(chat_url, **fields) for d in one["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(delta["custom"]["input"] for delta in deltas) == "12"
    assert [delta["custom"].get("name") for delta in deltas] == ["sum", None]


def test_allowed_tools_are_all_that_the_model_sees(chat_url, engine):
    names = [tool["function"]["name"] for tool in OFFERED]

    def allowed(mode: str, *tools: dict) -> dict:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}

    one = {"type": "function", "function": {"name": names[1]}}
    chat(chat_url, tools=[*OFFERED, SHELL], tool_choice=allowed("auto", one, named("shell")), max_tokens=1)
    assert [tool["function"]["name"] for tool in engine.tokenizer.seen_options["tools"]] == [names[1], "shell"]
    assert engine.seen_params[-1].structured_outputs is None
    chat(chat_url, tools=OFFERED, tool_choice=allowed("required", one), max_tokens=1)
    grammar = engine.seen_params[-1].structured_outputs.grammar
    assert names[1] in grammar
    assert names[0] not in grammar
    where = "tool_choice.allowed_tools.tools"
    missing = allowed("auto", {"type": "function", "function": {"name": "rm"}})
    assert refused(chat_url, tools=OFFERED, tool_choice=missing) == f"{where}[0]"
    assert refused(chat_url, tools=OFFERED, tool_choice=allowed("auto")) == where
    assert refused(chat_url, tools=OFFERED, tool_choice=allowed("auto", {"type": "function"})) == f"{where}[0]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [grammar_tool()]}, "tool_choice"),  # auto: nothing would enforce the grammar
        ({"tools": [grammar_tool(), SHELL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [SHELL], "tool_choice": {"type": "function", "function": {"name": "shell"}}}, "tool_choice.type"),
        ({"tools": OFFERED, "tool_choice": named("now")}, "tool_choice.type"),
        ({"tools": [grammar_tool(syntax="ebnf", definition="x")], "tool_choice": named("sum")},
         "tools[0].custom.format.grammar.syntax"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "x": 1}}]}, "tools[0].x"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "json"}}}]},
         "tools[0].custom.format"),
    ],
)  # fmt: skip
def test_what_is_refused(chat_url, fields, param):
    assert refused(chat_url, **fields) == param


def test_the_clients_types_accept_everything(chat_url, engine):
    engine.says = call_of("ls")
    answer = ChatCompletion.model_validate_json(post(chat_url, "/v1/chat/completions", CHAT | {"tools": [SHELL]}).text)
    assert type(answer.choices[0].message.tool_calls[0]).__name__ == "ChatCompletionMessageCustomToolCall"
    for chunk in chunks(chat_url, tools=[SHELL]):
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"input": "a\\n\\u00e9\\ud83d\\ude00\\"b"}', 'a\né\U0001f600"b'),
        (' {\n"input" : "" }', ""),
        ('{"input": "cut \\u00', "cut \\u00"),
        ('{"input": "half \\ud83d', "half \\ud83d"),
        ('{"input": "alone \\ud83d, \\ud83d"}', "alone \ufffd, \ufffd"),
        ('{"other": "x"}', '{"other": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a"', "a"),
    ],
)
def test_an_input_does_not_depend_on_the_cuts(arguments, wanted):
    for size in (1, 2, 3, 7, 100):
        reader = CustomInput()
        pieces = [reader.feed(arguments[start : start + size]) for start in range(0, len(arguments), size)]
        assert "".join(pieces) + reader.finish() == wanted
