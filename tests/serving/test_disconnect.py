"""After a client disconnects, at most two more steps run for it: on every generating route, streaming or not."""

import itertools
import socket
import time

import pytest
from starlette.routing import Route

from jpaged.params.pooling import PooledModel
from tests.serving.http_client import wait_for
from tests.serving.request_bodies import BODIES, POOL, STREAMS, request_bytes

TOKENS = "/inference/v1/generate"
# Paths of POST routes that do not use the engine.
ASK_NOTHING = {
    "/tokenize", "/detokenize", "/ping", "/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel",
    "/v1/responses/input_tokens",
}  # fmt: skip


def test_every_route_that_asks_the_engine_is_tested_here(url, host):
    posts = {route.path for route in host[0].app.routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    assert posts == BODIES.keys() | ASK_NOTHING


@pytest.mark.parametrize("path", sorted(POOL))
def test_disconnect_aborts_pooling(url, engine, path):
    engine.pooling = PooledModel("classify", 2, ("a", "b")) if path == "/classify" else PooledModel("embed", 4)
    engine.step_seconds = 600.0
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(request_bytes(path, POOL[path]))
        wait_for(lambda: engine.running)
    wait_for(lambda: not engine.running)


@pytest.mark.parametrize(
    ("path", "stream", "started"),
    [
        pytest.param(path, stream, started, marks=[pytest.mark.slow] * (stream is not started))
        for path, stream, started in itertools.product((*STREAMS, TOKENS), (False, True), (False, True))
    ],
)
def test_disconnect_aborts(url, engine, path, stream, started):
    engine.step_seconds = 0.15
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(request_bytes(path, BODIES[path] | {"stream": stream}))
        wait_for(lambda: engine.running)
        (request_id,) = engine.running
        if started:
            wait_for(lambda: engine.steps.get(request_id, 0) >= 2)
        before = engine.steps.get(request_id, 0)
    wait_for(lambda: not engine.running)
    assert engine.steps.get(request_id, 0) <= before + 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 3000}),
        ("/v1/chat/completions/batch", BODIES["/v1/chat/completions/batch"]),
    ],
)
def test_disconnect_aborts_all_prompts_of_a_request(url, engine, path, body):
    engine.step_seconds = 0.05
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(request_bytes(path, body))
        wait_for(lambda: len(engine.running) == 2)
    wait_for(lambda: not engine.running)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_disconnect_inside_the_body_is_not_an_error(url, engine, client, path, caplog):
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(request_bytes(path, BODIES[path])[:-5])
        time.sleep(0.05)  # the server waits for the rest
    time.sleep(0.05)
    assert client.completions.create(model="echo", prompt="abc", max_tokens=3).choices[0].text == "abc"
    assert len(engine.seen_prompts) == 1
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]


def test_one_bad_prompt_stops_the_others_of_its_request(client, engine):
    with pytest.raises(Exception, match="must not be empty"):
        client.completions.create(model="echo", prompt=["never ends", ""], max_tokens=3000)
    wait_for(lambda: not engine.running)
