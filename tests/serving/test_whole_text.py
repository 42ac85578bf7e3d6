"""Texts, stop strings and log-probabilities on both routes, with a fake device. Streams equal whole answers.

The fake runner's tokens are nearly random, with many half characters, special tokens and unknown ids.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jpaged import AsyncLLM, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.engine.fake_runner import FakeRunner
from tests.engine.small_tokenizer import SmallTokenizer
from tests.support.http_server import running

PROMPT = [3, 10, 17]


class Chatty(SmallTokenizer):
    """Takes a conversation as its text."""

    chat_template = "{...}"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(message["content"] for message in messages)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tokenizer = Chatty()

    def build(model: Any, given: Any, options: Any, **how: Any) -> BuiltEngine:
        made = Engine(FakeRunner(max_model_len=80, num_blocks=400), tokenizer=tokenizer)
        return BuiltEngine(made, engine_config(model, options), None, tokenizer, SamplingParams())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jpaged.async_llm.build_engine", build)
        engine = AsyncLLM("model")
    with running(create_app(Server(engine=engine, model_names=("model",)))) as base:
        yield base


def post(url: str, route: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/{route}", json={"temperature": 0, "max_tokens": 40} | body, timeout=20)


def choices(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return (text, finish_reason, logprobs) of each choice of an answer."""
    answer = post(url, route, body)
    assert answer.status_code == 200, answer.text
    return [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "finish_reason": choice["finish_reason"],
            "logprobs": choice["logprobs"],
        }
        for choice in answer.json()["choices"]
    ]


def streamed(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the same, joined from a stream's events."""
    found: dict[int, dict[str, Any]] = {}
    for line in post(url, route, body | {"stream": True}).text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            so_far = found.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": None})
            assert so_far["finish_reason"] is None, "nothing comes after the end"
            so_far["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            so_far["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                so_far["logprobs"] = so_far["logprobs"] or {}
                so_far["logprobs"][name] = None if values is None else so_far["logprobs"].get(name, []) + values
    return [found[index] for index in sorted(found)]


def request_of(route: str, **fields: Any) -> dict[str, Any]:
    if route == "completions":
        return {"prompt": PROMPT} | fields
    logprobs = fields.pop("logprobs", None)
    more = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    return {"messages": [{"role": "user", "content": "Ab"}]} | more | fields


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"n": 3, "temperature": 1.0, "seed": 3, "logprobs": 1, "stop": ["E", "a", "K"]},
        {"skip_special_tokens": False, "stream_interval": 7},
        {"stop_token_ids": [65, 16, 70], "include_stop_str_in_output": True, "logprobs": 0},
    ],
)
def test_streams_equal_whole_answers(url: str, route: str, fields: dict[str, Any]):
    body = request_of(route, **fields)
    whole = choices(url, route, body)
    assert streamed(url, route, body) == whole
    assert len(whole) == fields.get("n", 1)
    assert any(choice["text"] for choice in whole)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_at_every_position(url: str, route: str, include: bool):
    (plain,) = choices(url, route, request_of(route))
    text = plain["text"]
    for start in range(0, len(text) - 6, 9):
        stop = text[start : start + 5]
        body = request_of(route, stop=[stop, "\x00"], logprobs=1, include_stop_str_in_output=include)
        (cut,) = choices(url, route, body)
        assert cut["text"] == text[: text.index(stop) + (len(stop) if include else 0)]
        assert cut["finish_reason"] == "stop"
        assert streamed(url, route, body) == [cut]
        if route == "completions":
            shape = cut["logprobs"]
            assert len(shape["text_offset"]) == len(shape["tokens"]) == len(shape["token_logprobs"])
            assert shape["text_offset"] == sorted(shape["text_offset"])
            assert shape["text_offset"][-1] <= len(cut["text"])
            joined = [
                cut["text"][begin:end]
                for begin, end in zip(shape["text_offset"], [*shape["text_offset"][1:], None], strict=True)
            ]
            assert "".join(joined) == cut["text"]


def test_half_characters_have_names_and_bytes_of_their_own(url: str):
    body = request_of("completions", logprobs=3, skip_special_tokens=False)
    shape = choices(url, "completions", body)[0]["logprobs"]
    names = {name for top in shape["top_logprobs"] for name in top}
    halves = {name for name in names if name.startswith("bytes:")}
    assert len(halves) > 3
    assert halves <= {f"bytes:\\x{byte:02x}" for byte in "è漢👩".encode()}
    assert all(len(top) >= 3 for top in shape["top_logprobs"]), "none stands for two"
    body = request_of("chat/completions", logprobs=3, max_tokens=60)
    content = choices(url, "chat/completions", body)[0]["logprobs"]["content"]
    seen = {one["token"]: one["bytes"] for entry in content for one in [entry, *entry["top_logprobs"]]}
    assert all(bytes(exact).decode() == name for name, exact in seen.items() if not name.startswith("\\x") and name)
    for name, exact in seen.items():
        if name.startswith("\\x"):
            assert name == "".join(f"\\x{byte:02x}" for byte in exact)
    assert any(name.startswith("\\x") for name in seen)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("fields", "parameter", "says"),
    [
        ({"stop": ["x"] * 10_000}, "stop", "at most 256"),
        ({"stop": "x" * 5000}, "stop", "at most 4,096"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1"),
        ({"truncate_prompt_tokens": 80}, "truncate_prompt_tokens", "at most 79"),
        ({"truncation_side": "left"}, "truncation_side", "needs truncate_prompt_tokens"),
        ({"stream_interval": 0}, "stream_interval", "from 1"),
    ],
)
def test_bad_fields(url: str, route: str, fields: dict[str, Any], parameter: str, says: str):
    answer = post(url, route, request_of(route, **fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter
    assert says in answer.json()["error"]["message"]
    assert len(answer.text) < 1000


def test_prompts_are_truncated(url: str):
    long = list(range(1, 75))
    for fields, kept in (
        ({"truncate_prompt_tokens": 5}, long[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, long[:5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 40}, long[-40:]),
    ):
        answers = [
            post(url, "completions", {"prompt": prompt, "max_tokens": 8} | more).json()
            for prompt, more in ((long, fields), (kept, {}))
        ]
        assert answers[0]["usage"]["prompt_tokens"] == len(kept)
        assert answers[0]["choices"][0]["text"].startswith(answers[1]["choices"][0]["text"])
