"""Fields of /v1/chat/completions: the prompt in the answer, reasoning, usage while streaming, older fields."""

import json
import logging

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jpaged.config import EngineConfig
from jpaged.serving.application import create_app
from jpaged.serving.schemas import ignored_fields
from jpaged.serving.server_state import Server
from jpaged.speculation_config import SpeculationConfig
from tests.serving.chat_requests import chat, chunks, refused
from tests.serving.http_client import CHAT, error_of, post, strict
from tests.serving.tool_definitions import OFFERED

FUNCTIONS = [tool["function"] for tool in OFFERED]

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_the_prompt_in_the_answer(chat_url, engine):
    fields = {"max_tokens": 2, "return_token_ids": True, "return_prompt_text": True, "prompt_logprobs": 1}
    answer = chat(chat_url, **fields)
    prompt = b"<user>hi<assistant>"
    assert bytes(answer["prompt_token_ids"]) == prompt == answer["prompt_text"].encode()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][1][str(prompt[1])]["logprob"] == -0.5
    assert bytes(answer["choices"][0]["token_ids"]) == b"<u"
    del fields["prompt_logprobs"]
    assert chat(chat_url, **fields)["prompt_logprobs"] is None
    first, *others = chunks(chat_url, **fields)
    assert (bytes(first["prompt_token_ids"]), first["prompt_text"].encode()) == (prompt, prompt)
    assert all("prompt_token_ids" not in chunk for chunk in others)
    assert bytes(token for chunk in (first, *others) for token in chunk["choices"][0].get("token_ids", ())) == b"<u"


def test_tokens_as_token_ids(chat_url):
    answer = chat(chat_url, max_tokens=1, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    [token] = answer["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"], token["top_logprobs"][0]["token"]) == ("token_id:60", [60], "token_id:97")


def test_usage_tier_and_fingerprint(chat_url):
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    found = chunks(chat_url, max_tokens=3, stream_options=options, service_tier="priority")
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 3, 3]
    assert {chunk["service_tier"] for chunk in found} == {"default"}
    assert all(chunk["system_fingerprint"].startswith("jpaged-") for chunk in found)
    assert all(chunk["obfuscation"] for chunk in found[:-1])
    strict(ChatCompletionChunk, json.dumps(found[0]))  # OpenAI's own field


def test_echo_repeats_the_message_that_the_answer_continues(chat_url, engine):
    engine.says = " world"
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Hello"}]
    fields = {"messages": messages, "echo": True, "add_generation_prompt": False, "continue_final_message": True}
    assert chat(chat_url, **fields)["choices"][0]["message"]["content"] == "Hello world"
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(chat_url, **fields)]
    assert "".join(texts) == "Hello world"
    assert chat(chat_url, **fields | {"echo": False})["choices"][0]["message"]["content"] == " world"
    assert chat(chat_url, echo=True)["choices"][0]["message"]["content"] == " world"  # the last message is the user's


def test_reasoning_is_left_out_when_asked(chat_url, engine):
    engine.says = "<think>hm</think>yes"
    assert chat(chat_url)["choices"][0]["message"]["reasoning"] == "hm"
    message = chat(chat_url, include_reasoning=False)["choices"][0]["message"]
    assert (message["content"], "reasoning" in message, "reasoning_content" in message) == ("yes", False, False)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(chat_url, include_reasoning=False)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
    assert not any("reasoning" in delta for delta in deltas)


def test_verbosity_is_a_variable_of_templates_that_read_it(chat_url, engine):
    assert chat(chat_url, verbosity="low", max_tokens=1)
    assert "verbosity" not in engine.tokenizer.seen_options
    engine.tokenizer.chat_template += "{{ verbosity }}"
    assert chat(chat_url, verbosity="low", max_tokens=1)
    assert engine.tokenizer.seen_options["verbosity"] == "low"


PARTS = [{"type": "text", "text": "def f():\n"}, {"type": "text", "text": "    pass"}]


@pytest.mark.parametrize(
    ("content", "seen"), [("a guess", "a guess"), ("", ""), (PARTS, "def f():\n    pass"), ([], "")]
)
def test_a_prediction_goes_to_the_engine(chat_url, engine, content, seen):
    fields = {"prediction": {"type": "content", "content": content}, "max_tokens": 2}
    assert "completion_tokens_details" not in chat(chat_url, **fields)["usage"]  # the server does not speculate
    chat(chat_url, **fields, cache_salt="x")
    chunks(chat_url, **fields)
    post(chat_url, "/v1/chat/completions/batch", fields | {"messages": [CHAT["messages"]]})
    assert engine.seen_predictions == [seen] * 4
    assert engine.seen_salts == [None, "x", None, None]
    chat(chat_url, max_tokens=2)
    assert engine.seen_predictions[-1] is None


def test_usage_counts_the_drafts_of_a_request_with_a_prediction(host, engine):
    config = EngineConfig(model="m", speculative_config=SpeculationConfig(method="ngram"))
    host[0].app = create_app(Server(engine=engine, model_names=("echo",), config=config))
    url, prediction = host[1], {"type": "content", "content": "a guess"}
    details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 8}  # see `FakeEngine`
    answer = post(url, "/v1/chat/completions", CHAT | {"prediction": prediction, "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens_details"] == details
    assert answer.json()["usage"]["completion_tokens"] == 4
    strict(ChatCompletion, answer.text)
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(url, prediction=prediction, max_tokens=4, stream_options=options)
    counted = [chunk["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for chunk in found]
    assert counted == [1, 2, 3, 4, 4]
    assert found[-1]["usage"]["completion_tokens_details"] == details
    batch = {"messages": [CHAT["messages"]] * 2, "prediction": prediction, "max_tokens": 4}
    counted = post(url, "/v1/chat/completions/batch", batch).json()["usage"]["completion_tokens_details"]
    assert counted == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 16}
    assert "completion_tokens_details" not in chat(url, max_tokens=4)["usage"]  # no prediction


def test_a_batch_of_conversations(chat_url, engine):
    talks = [[{"role": "user", "content": text}] for text in ("ab", "cde")]
    fields = {"messages": talks, "max_tokens": 2, "logprobs": True, "return_token_ids": True}
    answer = post(chat_url, "/v1/chat/completions/batch", fields).json()
    assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [(0, "<u"), (1, "<u")]
    assert sorted(map(bytes, engine.seen_prompts)) == [b"<user>ab<assistant>", b"<user>cde<assistant>"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, engine.seen_prompts))
    assert answer["usage"]["completion_tokens"] == 4
    assert all(bytes(one["token_ids"]) == b"<u" and one["logprobs"]["content"] for one in answer["choices"])
    for wrong, name in (
        ({"stream": True}, "stream"), ({"n": 2}, "n"), ({"tools": OFFERED}, "tools"), ({"messages": []}, "messages"),
        ({"messages": [talks[0], [{"role": "user"}]]}, "messages[1][0].content"),
    ):  # fmt: skip
        refused = post(chat_url, "/v1/chat/completions/batch", fields | wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text


def test_functions_are_answered_in_their_own_format(chat_url, engine):
    engine.says = CALL
    [choice] = chat(chat_url, functions=FUNCTIONS)["choices"]
    assert choice["message"]["function_call"] == {"name": "now", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    deltas = [chunk["choices"][0] for chunk in chunks(chat_url, functions=FUNCTIONS, function_call="auto")]
    calls = [one["delta"]["function_call"] for one in deltas if "function_call" in one["delta"]]
    assert calls[0]["name"] == "now"
    assert "".join(call.get("arguments", "") for call in calls) == "{}"
    assert deltas[-1]["finish_reason"] == "function_call"
    engine.says = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    named = chat(chat_url, functions=FUNCTIONS, function_call={"name": "now"})["choices"][0]
    assert (named["message"]["function_call"]["name"], named["finish_reason"]) == ("now", "stop")
    assert engine.seen_params[-1].structured_outputs is not None
    plain = chat(chat_url, functions=FUNCTIONS, function_call="none")["choices"][0]["message"]
    assert plain["content"] == engine.says


def test_a_conversation_with_a_called_function(chat_url, engine):
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    chat(chat_url, messages=messages, functions=FUNCTIONS, max_tokens=1)
    call, result = engine.tokenizer.seen_messages[1:]
    assert call["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
    assert (result["role"], result["tool_call_id"]) == ("tool", call["tool_calls"][0]["id"])


@pytest.mark.parametrize("skipped", [b'"\xff": 1', b'"x": "\xff"', b'"x": {"\xff": [1]}'])
@pytest.mark.parametrize("size", [1, 300_000])
def test_ignored_text_must_be_utf_8(chat_url, skipped, size):
    message = b'{"role": "user", "content": "%s", %s}' % (b"a" * size, skipped)
    response = httpx.post(f"{chat_url}/v1/chat/completions", content=b'{"messages": [%s]}' % message)
    assert "must be JSON" in error_of(response, 400)["message"]


def test_unknown_fields_of_a_history_are_ignored_and_logged_once(chat_url, engine, caplog, monkeypatch):
    monkeypatch.setattr(ignored_fields, "_logged", set())
    call = {"id": "c", "index": 0, "type": "function", "extra_content": {"a": [1]},
            "function": {"name": "now", "arguments": "{}", "parsed_arguments": {}}}  # fmt: skip
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "tool_calls": [call], "id": "m", "audio": None, "annotations": [{"type": "x"}],
         "reasoning_details": [{"text": "t"}], "provider_specific_fields": None, "a\nb": 1},
        {"role": "tool", "tool_call_id": "c", "content": "noon", "id": "m"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "parsed": {"a": 1}},
    ]  # fmt: skip
    with caplog.at_level(logging.INFO, logger="jpaged"):
        for _ in range(2):
            chat(chat_url, messages=messages, max_tokens=1)
        large = {"role": "user", "content": "y" * 300_000, "far": 1}
        engine.max_model_len = 2**20
        chat(chat_url, messages=[large], max_tokens=1)  # checked in the child process
    names = [line.split()[3] for line in caplog.messages if line.startswith("ignored the field")]
    assert names == [
        "a?b", "cache_control", "extra_content", "id", "parsed", "parsed_arguments", "reasoning_details", "far",
    ]  # fmt: skip
    chat(chat_url, messages=messages, max_tokens=1)
    seen = engine.tokenizer.seen_messages
    assert [message["content"] for message in seen] == ["hi", "", "noon", "No."]
    assert all(set(message) <= {"role", "content", "tool_calls", "tool_call_id"} for message in seen)
    assert refused(chat_url, parsed={}) == "parsed"  # a field of the body asks for something


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": FUNCTIONS, "tools": OFFERED}, "functions"),
        ({"functions": FUNCTIONS, "function_call": {"name": "rm"}}, "function_call.name"),
        ({"functions": [{"name": "bad name"}]}, "functions[0].name"),
        ({"tools": OFFERED, "function_call": {"name": "now"}}, "functions"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
         "messages[0].content[0].type"),
        ({"prediction": "a guess"}, "prediction"),
        ({"prediction": {"content": "a guess"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "a guess"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "image", "text": "a"}]}},
         "prediction.content[0].type"),
        ({"prediction": {"type": "content", "content": "a", "n": 1}}, "prediction.n"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[0].tool_calls[0].custom"),
    ],
)  # fmt: skip
def test_what_is_refused(chat_url, fields, param):
    assert refused(chat_url, **fields) == param
