"""Tools and reasoning over HTTP: answers with one byte per token, parsed as the official client's types."""

import json

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken

from jpaged.chat.turn import ChatFormats
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.parsers.tool_formats import FORMATS
from jpaged.serving.application import create_app
from jpaged.serving.openai_api.chat_answers import ChatAnswers
from jpaged.serving.openai_api.chat_tools import ChatTools
from jpaged.serving.server_state import Server
from tests.serving.http_client import events, strict
from tests.serving.tool_definitions import OFFERED, TEMPLATES
from tests.support import dialects
from tests.support.tool_calls import PARAMETERS, RECORDED, reader

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
REASONING = {"stop_reason", "prompt_logprobs", "reasoning", "reasoning_content"}


@pytest.fixture
def formats(request) -> ChatFormats:
    return ChatFormats()


@pytest.fixture
def url(engine, formats, host):
    engine.step_seconds = 0
    engine.tokenizer.chat_template = TEMPLATES["hermes"]
    host[0].app = create_app(Server(engine=engine, model_names=("echo",), chat=formats))
    return host[1]


def whole(url: str, **body):
    response = httpx.post(f"{url}/v1/chat/completions", json=CHAT | body, timeout=20)
    assert response.status_code == 200, response.text
    choice = strict(ChatCompletion, response.text, REASONING).choices[0]
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return extra.get("reasoning"), message.content, calls, choice.finish_reason


def streamed(url: str, **body):
    """Join deltas as clients do. Names, ids and the role come once, the finish reason at the end."""
    response = httpx.post(f"{url}/v1/chat/completions", json=CHAT | body | {"stream": True}, timeout=20)
    chunks = [strict(ChatCompletionChunk, event, REASONING).choices[0] for event in events(response)]
    assert [chunk.delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        content += chunk.delta.content or ""
        reasoning += (chunk.delta.model_extra or {}).get("reasoning", "")
        for call in chunk.delta.tool_calls or []:
            if call.id:
                assert call.index not in calls
                assert call.type == "function"
                calls[call.index] = [call.function.name, ""]
            else:
                assert call.function.name is None
            calls[call.index][1] += call.function.arguments
    assert list(calls) == list(range(len(calls)))
    made = [tuple(call) for call in calls.values()]
    return reasoning or None, content or None, made, chunks[-1].finish_reason


QUICK = ("kimi_k2", "openai", "qwen3_coder")


@pytest.mark.parametrize(
    "format_name",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(dialects.TWO.keys() - set(QUICK)))],
)
def test_two_calls_of_each_dialect_with_the_official_client(url, client, engine, format_name):
    """A byte at a time. The second tool has no arguments. The format is found from the template."""
    engine.tokenizer.chat_template = TEMPLATES[format_name]
    engine.says = dialects.TWO[format_name]
    whole = client.chat.completions.create(**CHAT, tools=OFFERED).choices[0]
    with client.chat.completions.stream(**CHAT, tools=OFFERED) as stream:
        final = stream.get_final_completion().choices[0]
    for choice in (whole, final):
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == dialects.EXPECTED_TWO
        assert len({call.id for call in choice.message.tool_calls}) == 2


HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{}"


@pytest.mark.parametrize("formats", [ChatFormats(), ChatFormats.named(reasoning_parser="openai_gptoss")])
def test_an_answer_in_harmony_is_read_without_flags(url, engine):
    """Its headers never reach a client, with tools or without. Reasoning may come before structured output."""
    engine.tokenizer.chat_template = TEMPLATES["openai"]
    engine.says = HARMONY.format("Hello.")
    for body in ({}, {"tools": OFFERED}, {"tools": OFFERED, "tool_choice": "none"}):
        assert whole(url, **body) == streamed(url, **body) == ("Hm.", "Hello.", [], "stop")
    engine.says = HARMONY.format('{"a": 1}')
    assert whole(url, response_format={"type": "json_object"})[:2] == ("Hm.", '{"a": 1}')
    tags = engine.seen_params[-1].reasoning_tags
    assert (tags.start, tags.header) == ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
    engine.says = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"q": "a"}'
    assert whole(url, tools=OFFERED, tool_choice="required") == (None, None, [("search", '{"q": "a"}')], "tool_calls")
    params = engine.seen_params[-1]
    assert params.reasoning_tags.header == ""
    assert "commentary to=functions.search" in params.structured_outputs.grammar


def test_tags_are_the_tokens_of_the_checkpoint(url, engine):
    """Tags that the model spells with other tokens are text, in all APIs."""
    spelled = "Write <|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>."
    engine.tokenizer.chat_template = TEMPLATES["openai"]
    special = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>")
    engine.tokenizer.added_tokens_decoder = {i: AddedToken(name, special=True) for i, name in enumerate(special, 256)}
    engine.says = f"<|channel|>final<|message|>{spelled}"
    engine.special_offsets = (0, engine.says.index("<|message|>"))
    for body in ({}, {"tools": OFFERED}):
        assert whole(url, **body) == streamed(url, **body) == (None, spelled, [], "stop")
    answer = httpx.post(f"{url}/v1/responses", json={"model": "echo", "input": "hi"}).json()
    assert answer["output"][0]["content"][0]["text"] == spelled
    answer = httpx.post(f"{url}/v1/messages", json=CHAT | {"max_tokens": 200}).json()
    assert answer["content"] == [{"type": "text", "text": spelled}]


@pytest.mark.parametrize("format_name", sorted(FORMATS.keys() - dialects.TWO.keys() | {"mistral"}))
def test_recorded_answers_a_byte_at_a_time(url, engine, format_name):
    """Every recorded answer, whole and streamed, is what its parser reads."""
    engine.tokenizer.chat_template = TEMPLATES[format_name]
    for name, text, content, calls in RECORDED:
        if name != format_name or format_name == "json":
            continue
        engine.says = text
        expected = (None, text if content is ... else content, calls)
        *got, reason = whole(url, tools=OFFERED)
        assert tuple(got) == expected, text
        assert streamed(url, tools=OFFERED) == (*expected, reason), text
        called = any(json_or_none(arguments) is not None for _, arguments in calls)
        assert reason == ("tool_calls" if called else "stop"), text


def json_or_none(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("formats", [ChatFormats.named(tool_call_parser="json")])
def test_a_parser_that_the_operator_names(url, engine):
    engine.tokenizer.chat_template = TEMPLATES["json"]
    for name, text, content, calls in RECORDED:
        if name == "json":
            engine.says = text
            expected = (None, text if content is ... else content, calls)
            reason = "tool_calls" if calls else "stop"
            assert whole(url, tools=OFFERED) == streamed(url, tools=OFFERED) == (*expected, reason), text


def test_a_conversation_with_the_official_client(url, client, engine):
    """The client's objects are sent back unchanged. The template gets the arguments as objects, and the results."""
    engine.says = 'Look:\n<tool_call>\n{"name": "search", "arguments": {"q": "é"}}\n</tool_call>'
    answer = client.chat.completions.create(**CHAT, tools=OFFERED)
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "search", {"q": "é"})
    tool = engine.tokenizer.seen_options["tools"][-2]["function"]
    assert tool == {"name": "search", "description": "", "parameters": PARAMETERS}
    engine.says = "Found."
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    messages = [*CHAT["messages"], answer.choices[0].message, result]
    again = client.chat.completions.create(model="echo", messages=messages, tools=OFFERED)
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("Found.", "stop")
    assert again.choices[0].message.tool_calls is None
    _, said, told = engine.tokenizer.seen_messages
    assert said["tool_calls"] == [
        {"id": call.id, "type": "function", "function": {"name": "search", "arguments": {"q": "é"}}}
    ]
    assert told == result
    # The client's stream helper joins the deltas to the same message.
    engine.says = '<tool_call>{"name": "now"}</tool_call>'
    with client.chat.completions.stream(**CHAT, tools=OFFERED) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.tool_calls[0].function.arguments) == ("tool_calls", "{}")


def test_cut_off_by_max_tokens(url, engine):
    engine.says = '<tool_call>{"name": "search", "arguments": {"q": "hello"}}</tool_call>'
    for ask in (whole, streamed):
        assert ask(url, tools=OFFERED, max_tokens=52) == (None, None, [("search", '{"q": "he')], "length")


def test_no_tools_no_calls(url, engine):
    """tool_choice none hides the tools from the template; without them everything is content."""
    engine.says = '<tool_call>{"name": "now"}</tool_call>'
    for ask in (whole, streamed):
        for body in ({}, {"tools": []}, {"tools": OFFERED, "tool_choice": "none"}):
            assert ask(url, **body) == (None, engine.says, [], "stop")
            assert engine.tokenizer.seen_options["tools"] is None


def test_parallel_calls(url, engine):
    engine.says = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "search"}</tool_call>'
    both = [("now", "{}"), ("search", "{}")]
    for ask in (whole, streamed):
        assert ask(url, tools=OFFERED)[2] == ask(url, tools=OFFERED, parallel_tool_calls=True)[2] == both
        assert ask(url, tools=OFFERED, parallel_tool_calls=False)[2] == both[:1]


def test_several_answers_are_parsed_apart(url, client, engine):
    engine.says = 'A<tool_call>{"name": "now"}</tool_call>'
    answers = client.chat.completions.create(**CHAT, tools=OFFERED, n=3).choices
    assert [(one.message.content, len(one.message.tool_calls)) for one in answers] == [("A", 1)] * 3
    assert len({one.message.tool_calls[0].id for one in answers}) == 3
    contents, calls = [""] * 3, [0] * 3
    for chunk in client.chat.completions.create(**CHAT, tools=OFFERED, n=3, stream=True):
        contents[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        calls[chunk.choices[0].index] += sum(bool(call.id) for call in chunk.choices[0].delta.tool_calls or [])
    assert (contents, calls) == (["A"] * 3, [1] * 3)


def test_logprobs_come_with_every_token(url, client, engine):
    engine.says = '<tool_call>{"name": "now"}</tool_call>'
    chunks = client.chat.completions.create(**CHAT, tools=OFFERED, stream=True, logprobs=True)
    told = [one for chunk in chunks for one in chunk.choices[0].logprobs.content]
    assert "".join(one.token for one in told) == engine.says


def test_a_named_call_ends_with_stop():
    """As in OpenAI's API. With auto and required, the finish reason is tool_calls."""
    text = '[{"name": "now", "arguments": {}}]'
    for named, reason in ((True, "stop"), (False, "tool_calls")):
        answers = ChatAnswers(reader("json"), ChatTools(named=named))
        assert answers.message(0, text).tool_calls[0].function.name == "now"
        assert answers.finish_reason(0, "stop") == reason
        assert answers.finish_reason(0, "length") == "length"
    assert ChatAnswers(AnswerReader(), ChatTools()).message(0, "").content == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [*OFFERED, OFFERED[0]]}, f"tools[{len(OFFERED)}].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "text"}}}]},
         "tools[0].function.parameters"),
        ({"tools": OFFERED * 33}, "tools"),
        ({"tools": OFFERED, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
         "tool_choice.function.name"),
        ({"tools": OFFERED, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"enable_thinking": {"a": 1}}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "x" * 1_001}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused_by_name(url, body, param):
    for stream in (False, True):
        refused = httpx.post(f"{url}/v1/chat/completions", json=CHAT | body | {"stream": stream}, timeout=20)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param, refused.text


def test_tools_for_a_model_that_knows_none(url, client, engine):
    engine.tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(openai.BadRequestError, match="does not read tools"):
        client.chat.completions.create(**CHAT, tools=OFFERED)
    engine.tokenizer.chat_template = "{{ tools }} <a_call>"
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        client.chat.completions.create(**CHAT, tools=OFFERED)
    assert client.chat.completions.create(**CHAT, tools=OFFERED, tool_choice="none", max_tokens=1)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_forced_calls_reach_the_engine_as_a_grammar(url, engine, choice):
    engine.says = '<tool_call>{"name": "now"}</tool_call>'
    asked = CHAT | {"tools": OFFERED, "tool_choice": choice}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=20)
    assert answer.status_code == 200
    grammar = engine.seen_params[-1].structured_outputs.grammar
    assert ("search" in grammar) == (choice == "required")
    assert answer.json()["choices"][0]["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


def test_response_format_is_for_texts_and_not_for_a_forced_call(url, client, engine):
    """instructor's RESPONSES_TOOLS sends both, and so do agents with structured answers."""
    engine.says = '<tool_call>{"name": "now"}</tool_call>'
    schema = {"type": "object", "properties": {"zebra": {"type": "string"}}}
    asked = CHAT | {"tools": OFFERED, "tool_choice": "required"}
    answer_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    client.chat.completions.create(**asked)
    grammar = engine.seen_params[-1].structured_outputs
    client.chat.completions.create(**asked, response_format=answer_format)
    assert engine.seen_params[-1].structured_outputs == grammar
    client.chat.completions.create(**asked | {"tool_choice": "none"}, response_format=answer_format)
    assert "zebra" in engine.seen_params[-1].structured_outputs.json
    client.responses.create(
        model="echo", input="hi", tools=[OFFERED[0]["function"] | {"type": "function"}], tool_choice="required",
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}},
    )  # fmt: skip
    assert "zebra" not in engine.seen_params[-1].structured_outputs.grammar
    with pytest.raises(openai.BadRequestError, match="leave one out"):
        client.chat.completions.create(**asked, extra_body={"structured_outputs": {"json": schema}})


def test_a_forced_call_that_is_cut_has_no_content(url, engine):
    engine.says = '<tool_call>\n{"name": "search", "arguments": {"q": "a b"}}\n</tool_call>'
    for ask in (whole, streamed):
        for cut, calls in ((18, []), (45, [("search", "{")]), (56, [("search", '{"q": "a b"}')])):
            said = ask(url, tools=OFFERED, tool_choice="required", max_tokens=cut)
            assert (said[1] or None, said[2], said[3]) == (None, calls, "length"), (cut, said)


def test_template_variables_that_a_request_may_set(url, client, engine):
    for body, expected in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ):
        client.chat.completions.create(**CHAT, max_tokens=1, extra_body=body)
        assert engine.tokenizer.seen_options["enable_thinking"] is expected
    client.chat.completions.create(**CHAT, max_tokens=1, extra_body={"chat_template_kwargs": {"enable_thinking": 512}})
    assert repr(engine.tokenizer.seen_options["enable_thinking"]) == "512"  # and not 512.0
    engine.tokenizer.chat_template += "{{ reasoning_effort }}{{ secret }}"
    client.chat.completions.create(**CHAT, max_tokens=1, reasoning_effort="low")
    assert engine.tokenizer.seen_options["reasoning_effort"] == "low"
    with pytest.raises(openai.BadRequestError, match="requests may set enable_thinking, thinking, reasoning_effort"):
        client.chat.completions.create(**CHAT, extra_body={"chat_template_kwargs": {"secret": "x"}})
    extra = {"documents": [{"title": "a", "text": "b"}], "add_generation_prompt": False, "continue_final_message": True}
    client.chat.completions.create(**CHAT, max_tokens=1, extra_body=extra)
    assert extra.items() <= engine.tokenizer.seen_options.items()


# -- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [ChatFormats.named(reasoning_parser="qwen3")])
def test_reasoning_is_split_out(url, engine):
    thought = "<think>\nLet me sée.\n</think>\n\n"
    for opening in ("", "<think>\n"):
        engine.tokenizer.opening = opening
        text = thought.removeprefix(opening)
        for ask in (whole, streamed):
            engine.says = text + "Hello."
            assert ask(url) == ("Let me sée.", "Hello.", [], "stop")
            engine.says = text + 'Wait.\n<tool_call>{"name": "now"}</tool_call>'
            assert ask(url, tools=OFFERED) == ("Let me sée.", "Wait.", [("now", "{}")], "tool_calls")
            cut = 14 - len(thought) + len(text)
            assert ask(url, max_tokens=cut) == ("Let me", None, [], "length")
    engine.tokenizer.opening = "<think>\n\n</think>\n\n"
    engine.says = "Hello."
    assert whole(url) == streamed(url) == (None, "Hello.", [], "stop")


@pytest.mark.parametrize("formats", [ChatFormats.named(reasoning_tags=("[THINK]", "[/THINK]"))])
def test_reasoning_comes_back_to_the_template(url, client, engine):
    engine.says = "[THINK]Hm.[/THINK]Hello."
    answer = client.chat.completions.create(**CHAT).choices[0].message
    assert (answer.reasoning, answer.reasoning_content, answer.content) == ("Hm.", "Hm.", "Hello.")
    client.chat.completions.create(model="echo", messages=[*CHAT["messages"], answer, CHAT["messages"][0]])
    said = engine.tokenizer.seen_messages[1]
    assert (said["content"], said["reasoning_content"]) == ("Hello.", "Hm.")
    assert "reasoning" not in said
