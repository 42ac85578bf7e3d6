"""End to end: the official client, HTTP, the real engine and the demo model."""

import concurrent.futures
import json
import re
import socket
import time

import httpx
import openai
import pytest

import jpaged
from jpaged.chat.turn import ChatFormats
from jpaged.cli import main
from jpaged.parsers.tool_formats import FORMATS
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving.demo_options import SIZES
from tests.serving.http_client import wait_for
from tests.serving.request_bodies import STREAMS, at_most, request_bytes
from tests.support.http_server import running

PROMPT = "def read_json(path):"
GREEDY = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def engine():
    made = jpaged.AsyncLLM("demo", **SIZES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(engine):
    class Shared:
        """The module's engine, which the application must not close."""

        def __getattr__(self, name):
            return (lambda: None) if name == "close" else getattr(engine, name)

    with running(create_app(Server(engine=Shared(), model_names=("demo",)), AppOptions(admin_keys=("look",)))) as base:
        yield base


@pytest.fixture
def idle(engine):
    """After a test, no request runs and no block is in use."""
    yield
    wait_for(lambda: engine.stats().num_running == engine.stats().num_waiting == engine.stats().used_blocks == 0)


def test_streams_equal_whole_answers(client, idle):
    whole = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40)
    stream = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage.completion_tokens <= 40
    assert whole.choices[0].text


@pytest.mark.slow
def test_many_clients_get_what_one_gets(client, engine, idle):
    prompts = [f"{PROMPT}\n    x{i} = {i}\n" for i in range(12)]  # more than the number of rows

    def answer(prompt: str) -> str:
        return client.completions.create(**GREEDY, prompt=prompt, max_tokens=24).choices[0].text

    alone = [answer(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(answer, prompts)) == alone
    together = client.completions.create(**GREEDY, prompt=prompts, max_tokens=24)
    assert [choice.text for choice in together.choices] == alone
    assert engine.stats().compiles_after_ready == 0


def test_logprobs_of_the_real_distribution(client, idle):
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=8, logprobs=3).choices[0]
    assert "".join(answer.logprobs.tokens) == answer.text
    for logprob, top in zip(answer.logprobs.token_logprobs, answer.logprobs.top_logprobs, strict=True):
        assert logprob == max(top.values()) <= 0  # greedy takes the most likely
        assert len(top) <= 3


def test_echo_of_a_text(client, idle):
    """Each token of prompt and answer is where its offset says. max_tokens 0 returns the same prompt."""
    prompt = PROMPT + '\n    """\u00e9 and \U0001f642."""\n'
    asked = GREEDY | {"prompt": prompt, "logprobs": 2, "echo": True}
    choice = client.completions.create(**asked, max_tokens=4).choices[0]
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    whole = [(token, at) for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True) if "\\x" not in token]
    assert len(whole) > len(prompt) // 8
    shown = [(token, at) for token, at in whole if choice.text.startswith(token, at)]
    hidden = [token for token, at in whole if not choice.text.startswith(token, at)]
    assert len(shown) > len(whole) - 2  # a token before the text, if the tokenizer adds one
    assert all(token.startswith("<") for token in hidden)
    alone = client.completions.create(**asked, max_tokens=0)
    count = alone.usage.prompt_tokens
    assert alone.choices[0].text == prompt
    assert alone.choices[0].logprobs.tokens == logprobs.tokens[:count]
    assert alone.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:count]
    assert alone.choices[0].logprobs.text_offset == logprobs.text_offset[:count]


def test_chat(client, idle):
    answer = client.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": PROMPT}], max_completion_tokens=16
    )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x " * 600}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"prompt": "x", "n": 65}, "n"),
    ],
)
def test_requests_that_only_the_engine_can_refuse(url, client, idle, body, param):
    for stream in (False, True):
        refused = httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}, timeout=20)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
    assert client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=1).usage.completion_tokens == 1


def test_the_longest_answer_and_more_tokens_than_fit(client, idle):
    asked = GREEDY | {"prompt": [5] * 500, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(**asked, max_tokens=12)
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"
    assert client.completions.create(**asked).usage.total_tokens == 512  # the default of 16 tokens is cut
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"leaves 12 tokens after a prompt of 500 tokens"):
            client.completions.create(**asked, max_tokens=100_000, stream=stream)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_blocks(url, engine, idle, path, stream):
    body = at_most(path, 450) | {"temperature": 0, "stream": stream}  # greedy, it runs to the limit
    engine.reset_stats()
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(request_bytes(path, body))
        wait_for(lambda: engine.stats().generated_tokens >= 5)
    wait_for(lambda: engine.stats().used_blocks == 0)
    assert engine.stats().generated_tokens < 400
    time.sleep(0.1)
    steps = engine.stats().steps
    time.sleep(0.2)
    assert engine.stats().steps == steps


def test_inspect_while_it_serves(url, client, engine, tmp_path, capsys, idle):
    """Two streams of one prompt share blocks, which have two references each. All blocks are free at the end."""
    endless = {"prompt": PROMPT * 8, "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
    words = ["inspect", url, "--admin-key", "look"]
    path, picture = tmp_path / "snapshot.json", tmp_path / "blocks.png"
    with client.completions.create(**GREEDY, **endless) as first:
        next(iter(first))
        with client.completions.create(**GREEDY, **endless) as second:
            next(iter(second))
            assert main([*words, "--output-json", str(path), "--png", str(picture)]) == 0
    snapshot = json.loads(path.read_text())
    assert [request["status"] for request in snapshot["running"]] == ["decode", "decode"]
    shared = snapshot["running"][1]["cached_tokens"] // snapshot["pool"]["block_size"]
    assert snapshot["pool"]["shared_blocks"] == shared > 0
    assert picture.stat().st_size > 1000
    assert f"{shared} have several owners" in capsys.readouterr().out
    wait_for(lambda: engine.stats().used_blocks == 0)
    assert main(words) == 0
    assert "0 running, 0 waiting" in capsys.readouterr().out


@pytest.mark.slow
def test_several_answers_are_those_of_a_batch(client, engine, idle):
    """n=3 with a seed, streamed; best_of; a beam search: the answers are those of `LLM.generate`."""
    asked = {"prompt": PROMPT, "max_tokens": 24}
    sampled = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "n": 3}
    beams = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.6}
    with jpaged.LLM("demo", **SIZES) as llm:
        expected = [
            [(answer.text, answer.finish_reason) for answer in llm.generate(PROMPT, params)[0].outputs]
            for params in (
                jpaged.SamplingParams(**sampled, max_tokens=24),
                jpaged.SamplingParams(**sampled, best_of=5, max_tokens=24),
                jpaged.SamplingParams(**beams, n=2, temperature=0.7, max_tokens=24),
            )
        ]
    assert [len(set(answers)) for answers in expected] == [3, 3, 2]  # the answers differ
    texts, reasons = [""] * 3, [[], [], []]
    for chunk in client.completions.create(model="demo", **asked, **sampled, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        reasons[chunk.choices[0].index] += [chunk.choices[0].finish_reason] * bool(chunk.choices[0].finish_reason)
    assert [(text, *reason) for text, reason in zip(texts, reasons, strict=True)] == expected[0]
    best = client.completions.create(model="demo", **asked, **sampled, best_of=5)
    assert [(choice.text, choice.finish_reason) for choice in best.choices] == expected[1]
    found = client.completions.create(model="demo", **asked, n=2, temperature=0.7, extra_body=beams)
    assert [(choice.text, choice.finish_reason) for choice in found.choices] == expected[2]
    prompt_tokens = len(engine.get_tokenizer().encode(PROMPT))
    assert best.usage.prompt_tokens == found.usage.prompt_tokens == prompt_tokens
    assert best.usage.prompt_tokens_details.cached_tokens < prompt_tokens  # counted once, not once per answer
    assert engine.stats().compiles_after_ready == 0


def test_salts_keep_requests_apart(client, idle):
    prompt = PROMPT * 8

    def cached(**extra) -> int:
        answer = client.completions.create(**GREEDY, prompt=prompt, max_tokens=2, n=2, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") == (cached(cache_salt="one") // 16) * 16 > 0
    assert cached(cache_salt="two") == 0
    with pytest.raises(openai.BadRequestError, match="scheduling_policy"):
        cached(priority=1)  # the engine's policy is fcfs
    assert cached(priority=0) >= 0


def test_seeded_requests_repeat(client, idle):
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 7, "top_p": 0.9}
    first = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked).choices[0].text == first
    with pytest.raises(openai.BadRequestError, match="seed"):
        client.completions.create(**asked | {"seed": 2**64})


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}: {{ tool.function.parameters | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
        "places": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days", "places"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize(
    "parser",
    [
        "hermes", "pythonic",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in sorted(FORMATS.keys() - {"hermes", "pythonic", "deepseek_v4", "llama4_pythonic"})
        ),
    ],
)
def test_forced_calls_always_parse(engine, idle, parser):
    """A forced call is valid even from a model without tool training: named, or one of several; also streamed."""

    class Shared:
        def __getattr__(self, name):
            return (lambda: None) if name == "close" else getattr(engine, name)

    formats = ChatFormats.named(TOOL_TEMPLATE, tool_call_parser=parser)
    named = {"type": "function", "function": {"name": "forecast"}}
    app = create_app(Server(engine=Shared(), model_names=("demo",), chat=formats))
    with running(app) as base, openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as made:
        for choice, names, reason in (("required", {"forecast", "now"}, "tool_calls"), (named, {"forecast"}, "stop")):
            asked = {
                "model": "demo", "messages": [{"role": "user", "content": PROMPT}], "tools": TOOLS, "max_tokens": 300,
                "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1.0, "seed": 5,
                "extra_body": {"thinking_token_budget": 0} if parser == "openai" else {},
            }  # fmt: skip
            whole = made.chat.completions.create(**asked).choices[0]
            (call,) = whole.message.tool_calls
            assert (whole.message.content, whole.finish_reason) == (None, reason)
            assert call.function.name in names
            arguments = json.loads(call.function.arguments)
            if call.function.name == "forecast":
                assert set(arguments) == {"unit", "days", "places"}
                assert arguments["unit"] in ("C", "F")
                assert 1 <= arguments["days"] <= 9
            told = ""
            for chunk in made.chat.completions.create(**asked, stream=True):
                for part in chunk.choices[0].delta.tool_calls or []:
                    told += part.function.arguments or ""
            assert told == call.function.arguments


@pytest.mark.parametrize(
    ("syntax", "definition", "shape"),
    [
        ("lark", 'start: "SELECT " NAME " FROM " NAME\nNAME: /[a-z]{1,6}/\n', r"SELECT [a-z]{1,6} FROM [a-z]{1,6}"),
        ("regex", r"\d{2}:\d{2}", r"\d{2}:\d{2}"),
    ],
)
def test_a_custom_tools_input_follows_its_grammar(engine, idle, syntax, definition, shape):
    """Also from a model without tool training; streamed, the input is the same."""

    class Shared:
        def __getattr__(self, name):
            return (lambda: None) if name == "close" else getattr(engine, name)

    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    asked = {
        "model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "temperature": 1.0,
        "seed": 3, "tools": [*TOOLS, {"type": "custom", "custom": {"name": "query", "format": grammar}}],
        "tool_choice": {"type": "custom", "custom": {"name": "query"}},
    }  # fmt: skip
    app = create_app(Server(engine=Shared(), model_names=("demo",), chat=ChatFormats.named(TOOL_TEMPLATE)))
    with running(app) as base, openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as made:
        whole = made.chat.completions.create(**asked).choices[0]
        (call,) = whole.message.tool_calls
        assert (call.type, call.custom.name, whole.message.content, whole.finish_reason) == (
            "custom", "query", None, "stop",
        )  # fmt: skip
        assert re.fullmatch(shape, call.custom.input)
        told = ""
        for chunk in made.chat.completions.create(**asked, stream=True):
            for part in chunk.choices[0].delta.tool_calls or []:
                told += part.custom["input"]
        assert told == call.custom.input
        asked["tools"][-1]["custom"]["format"]["grammar"]["definition"] = "start: ("
        if syntax == "lark":
            with pytest.raises(openai.BadRequestError) as caught:
                made.chat.completions.create(**asked)
            assert caught.value.param == "tools"
