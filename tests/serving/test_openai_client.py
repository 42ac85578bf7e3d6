"""The official client against the server, on a real socket; every body and every event is validated strictly."""

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jpaged.params.sampling import RepetitionDetectionParams
from jpaged.serving.schemas.requests import SAMPLING_FIELDS
from tests.serving.http_client import CHAT, events, post, strict, strict_chunk
from tests.support.sampling_values import NUMBER_VALUES


class Colour(pydantic.BaseModel):
    colour: str


def test_models(client, url):
    assert [model.id for model in client.models.list()] == ["echo", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    raw = httpx.get(f"{url}/v1/models/echo").text
    extra = Model.model_validate_json(raw, strict=True).model_extra
    permission = extra.pop("permission")
    assert extra == {"max_model_len": 4096, "root": "a/checkpoint", "parent": None}
    assert [(one["object"], one["allow_sampling"], one["is_blocking"]) for one in permission] == [
        ("model_permission", True, False)
    ]
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_completion(client, url, engine):
    answer = client.completions.create(model="echo", prompt="hello", max_tokens=8)
    assert answer.choices[0].text == "hellohel"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    strict(Completion, post(url, "/v1/completions", {"prompt": "hello"}).text)
    assert engine.seen_params[-1].max_tokens == 16  # the API's default


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "xyz"], ["aba", "xyz"]),
        ([104, 105], ["hih"]),
        ([[104, 105], [33]], ["hih", "!!!"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_kinds(client, prompt, texts, stream):
    answer = client.completions.create(model="echo", prompt=prompt, max_tokens=3, stream=stream)
    if not stream:
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        return
    got = [""] * len(texts)
    for chunk in answer:
        got[chunk.choices[0].index] += chunk.choices[0].text
    assert got == texts


def test_completion_stream(client, url):
    body = {"prompt": "héllo", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [strict_chunk(event) for event in events(post(url, "/v1/completions", body))]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "héllohé"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 6 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" in event for event in events(post(url, "/v1/completions", body)))
    del body["stream_options"]
    assert all("usage" not in json.loads(event) for event in events(post(url, "/v1/completions", body)))


def test_log_probabilities_of_ids_that_the_request_names(url):
    body = {"prompt": "zy", "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [65, 66]}
    made = post(url, "/v1/completions", body).json()["choices"][0]["logprobs"]
    assert made["top_logprobs"] == [{"z": -0.5, "A": -3.0, "B": -3.0}]


def test_completion_logprobs(url):
    body = {"prompt": "zy", "max_tokens": 4, "logprobs": 2}
    whole = strict(Completion, post(url, "/v1/completions", body).text).choices[0].logprobs
    assert whole.tokens == ["z", "y", "z", "y"]
    assert whole.text_offset == [0, 1, 2, 3]
    assert whole.token_logprobs == [-0.5] * 4
    assert whole.top_logprobs[0] == {"a": -0.4, "z": -0.5, "b": -9999.0}
    parts = [
        strict_chunk(event).choices[0].logprobs
        for event in events(post(url, "/v1/completions", body | {"stream": True}))
    ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(whole, name)


def test_chat(client, url, engine):
    answer = client.chat.completions.create(**CHAT, max_completion_tokens=6)
    assert answer.choices[0].message.content == "<user>"
    assert answer.choices[0].message.role == "assistant"
    strict(ChatCompletion, post(url, "/v1/chat/completions", CHAT | {"max_tokens": 3}).text)
    # A message of the client can be sent back unchanged.
    history = [*CHAT["messages"], answer.choices[0].message, {"role": "developer", "content": "be brief"}]
    client.chat.completions.create(model="alias", messages=history, max_tokens=1)
    assert bytes(engine.seen_prompts[-1]) == b"<user>hi<assistant><user><system>be brief<assistant>"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(model="echo", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert bytes(engine.seen_prompts[-1]) == b"<user>one\ntwo<assistant>"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, which sends the parsed object too
def test_parsed_messages_are_sent_back(client, engine):
    engine.says, messages = '{"colour": "red"}', list(CHAT["messages"])
    for turn in range(3):
        answer = client.chat.completions.parse(model="echo", messages=messages, response_format=Colour)
        assert answer.choices[0].message.parsed == Colour(colour="red")
        assert len(engine.tokenizer.seen_messages) == 1 + 2 * turn
        messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
    assert engine.tokenizer.seen_messages[3] == {"role": "assistant", "content": engine.says}


def test_chat_fills_the_context_by_default(url, engine):
    engine.max_model_len, engine.step_seconds = 40, 0
    answer = strict(ChatCompletion, post(url, "/v1/chat/completions", CHAT).text)
    assert answer.usage.total_tokens == 40
    assert engine.seen_params[-1].max_tokens is None


def test_chat_stream(client, url):
    body = CHAT | {"max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [strict(ChatCompletionChunk, event) for event in events(post(url, "/v1/chat/completions", body))]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "<user>hi"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 8
    streamed = client.chat.completions.create(**CHAT, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "<user>hi"


def test_chat_logprobs(url):
    body = CHAT | {"max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    content = strict(ChatCompletion, post(url, "/v1/chat/completions", body).text).choices[0].logprobs.content
    assert [token.token for token in content] == ["<", "u"]
    assert content[0].bytes == [60]
    assert [top.token for top in content[0].top_logprobs] == ["a", "<", "b"]
    streamed = [
        strict(ChatCompletionChunk, event).choices[0].logprobs.content[0]
        for event in events(post(url, "/v1/chat/completions", body | {"stream": True}))
    ]
    assert [token.model_dump() for token in streamed] == [token.model_dump() for token in content]
    asked = body | {"logprob_token_ids": [65, 66], "top_logprobs": 1}
    for streamed in (False, True):
        said = post(url, "/v1/chat/completions", asked | {"stream": streamed})
        [choice] = json.loads(events(said)[0] if streamed else said.text)["choices"]
        tops = choice["logprobs"]["content"][0]["top_logprobs"]
        assert [(one["token"], one["logprob"]) for one in tops] == [("<", -0.5), ("A", -3.0), ("B", -3.0)]
    alone = strict(ChatCompletion, post(url, "/v1/chat/completions", CHAT | {"max_tokens": 1, "logprobs": True}).text)
    assert alone.choices[0].logprobs.content[0].top_logprobs == []


def test_sampling_fields_reach_the_engine(client, engine):
    engine.default_sampling_params = type(engine.default_sampling_params)(temperature=0.3, top_k=7, max_tokens=5)
    client.completions.create(
        model="echo",
        prompt="x",
        top_p=0.5,
        seed=3,
        extra_body={"min_p": 0.1, "ignore_eos": True, "stop_token_ids": [4], "user": "me", "suffix": ""},
    )
    params = engine.seen_params[-1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, 5)  # the model's own defaults
    assert (params.top_p, params.seed, params.min_p, params.ignore_eos) == (0.5, 3, 0.1, True)
    assert params.stop_token_ids == (4,)


# A value of each field; its stored form, if different; and other fields that it needs.
FIELD_VALUES: dict[str, Any] = {
    **NUMBER_VALUES, "n": 2, "best_of": 3, "use_beam_search": True, "beam_width": 3, "early_stopping": "never",
    "top_k": 4, "seed": 6, "stop": ["a", "b"], "stop_token_ids": [4], "ignore_eos": True, "min_tokens": 2,
    "logit_bias": {"5": 1.0}, "allowed_token_ids": [5, 6], "bad_words": ["x"],
    "logits_processors": {"scale": {"by": 0.5}}, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "include_stop_str_in_output": True, "truncate_prompt_tokens": 1,
    "truncation_side": "right", "prompt_logprobs": 2, "stream_interval": 3, "thinking_token_budget": 7,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2}, "logprob_token_ids": [4, 5],
}  # fmt: skip
STORED: dict[str, Any] = {
    "stop": ("a", "b"), "stop_token_ids": (4,), "logit_bias": {5: 1.0}, "allowed_token_ids": (5, 6),
    "bad_words": ("x",), "logprob_token_ids": (4, 5), "repetition_detection": RepetitionDetectionParams(3, 1, 2),
}  # fmt: skip
BESIDE: dict[str, Any] = {
    **{key: {"use_beam_search": True, "n": 2} for key in ("beam_width", "length_penalty", "early_stopping")},
    "use_beam_search": {"n": 2}, "truncation_side": {"truncate_prompt_tokens": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_each_sampling_field_reaches_the_engine(url, engine, name):
    for path, prompt in (
        ("completions", {"prompt": "x", "logprobs": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
    ):  # fmt: skip
        body = prompt | BESIDE.get(name, {}) | {name: FIELD_VALUES[name], "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=20)
        if name == ("best_of" if path.startswith("chat") else "thinking_token_budget"):
            assert answer.status_code == 400
            continue
        assert answer.status_code == 200, answer.text
        assert getattr(engine.seen_params[-1], name) == STORED.get(name, FIELD_VALUES[name])


def test_service_routes(url, engine):
    assert httpx.get(f"{url}/health").status_code == 200
    assert set(httpx.get(f"{url}/version").json()) == {"version"}
    engine.is_ready = False
    starting = httpx.get(f"{url}/health")
    assert (starting.status_code, starting.headers["retry-after"]) == (503, "1")
    answer = httpx.post(f"{url}/v1/completions", json={"model": "echo", "prompt": "hello", "max_tokens": 3})
    assert answer.status_code == 200
    engine.is_ready, engine.dead = True, True
    refused = httpx.get(f"{url}/health")
    assert refused.status_code == 503
    assert "thread" not in refused.text
