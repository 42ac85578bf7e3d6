"""Hostile requests while 16 streams run on the real engine: each is answered, and no stream changes."""

import concurrent.futures
import json
import threading

import httpx
import openai
import pytest

import jpaged
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.serving.hostile_bodies import REFUSED_FIELDS, REFUSED_TOOLS
from tests.serving.http_client import wait_for
from tests.structured import corpus
from tests.support.hostile_grammars import ENDLESS, HEAVY, NOT_COMPILED, REFUSED
from tests.support.http_server import running

NUM_STREAMS = 16
PROMPT = "def read_settings(path):\n"
SIZES = {
    "max_model_len": 512, "max_num_seqs": 24, "max_num_batched_tokens": 64, "row_buckets": (24,),
    "token_buckets": (64,), "grammar_compile_timeout": 2.0,
}  # fmt: skip
SCHEMA = corpus.obj({"name": {"type": "string", "maxLength": 20}, "sizes": corpus.arr(corpus.N, 1, 5)})


@pytest.fixture(scope="module")
def engine():
    made = jpaged.AsyncLLM("demo", **SIZES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(engine):
    with running(create_app(Server(engine=engine, model_names=("demo",)))) as base:
        yield base


def asked(number: int) -> dict:
    """Return the fields of a stream's request: text for most; JSON, log-probabilities or penalties for the others."""
    fields = {"model": "demo", "prompt": f"{PROMPT}    x = {number}\n", "max_tokens": 120, "seed": number}
    match number % 4:
        case 0:
            return fields | {"temperature": 0, "extra_body": {"ignore_eos": True}}
        case 1:
            return fields | {"extra_body": {"structured_outputs": {"json": SCHEMA}}}
        case 2:
            return fields | {"logprobs": 2, "top_p": 0.9, "extra_body": {"min_tokens": 30}}
        case _:
            return fields | {"frequency_penalty": 0.5, "stop": ["\n\n\n", "zebra"], "extra_body": {"min_p": 0.01}}


def streamed(client: openai.OpenAI, number: int) -> tuple[str, str]:
    text, reason = "", ""
    for chunk in client.completions.create(**asked(number), stream=True):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def grammars():
    """Yield hostile bodies with their accepted statuses. A slow or endless grammar may also generate 40 tokens."""
    for name, (fields, why) in {**REFUSED, **NOT_COMPILED}.items():
        yield name, fields, {400} if why else {200, 400}
    for name, schema in ENDLESS.items():
        yield name, {"json": schema}, {400}
    for name, fields in HEAVY.items():
        yield name, fields, {200, 400}


@pytest.mark.slow  # takes a minute: grammars that never compile run into their timeout
def test_16_streams_are_unchanged(client, url, engine):
    client = client.with_options(timeout=240)  # a busy machine computes 17 requests at a time
    wanted = [streamed(client, number) for number in range(NUM_STREAMS)]
    assert len({text for text, _ in wanted}) > NUM_STREAMS // 2
    done, rounds = threading.Event(), [0] * NUM_STREAMS

    def stream(number: int) -> None:
        while not done.is_set():
            assert streamed(client, number) == wanted[number]
            rounds[number] += 1

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool, httpx.Client(base_url=url, timeout=240) as http:
        streams = [pool.submit(stream, number) for number in range(NUM_STREAMS)]
        try:
            for fields in REFUSED_FIELDS:
                body = json.dumps({"prompt": PROMPT, "max_tokens": 8} | fields)
                answer = http.post("/v1/completions", content=body)
                assert answer.status_code == 400, (str(fields)[:100], answer.text)
                assert answer.json()["error"]["param"].split(".")[0].split("[")[0] in fields
            for tool in REFUSED_TOOLS:
                chat = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
                answer = http.post("/v1/chat/completions", json=chat | {"max_tokens": 8})
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"].startswith(("tools", "tool_choice"))
            for name, fields, statuses in grammars():
                body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 1.0, "structured_outputs": fields}
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code in statuses, (name, answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["param"].startswith(("structured_outputs", "response_format")), name
        finally:
            done.set()
        for one in streams:
            one.result(timeout=240)
    assert min(rounds) >= 1
    wait_for(lambda: engine.stats().num_running == engine.stats().used_blocks == 0)
    assert engine.stats().compiles_after_ready == 0
