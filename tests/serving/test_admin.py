"""/admin/inspect exists only with an admin key, and requires it. Also: an engine with a full queue."""

import concurrent.futures
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import msgspec
import pytest

from jpaged import AsyncLLM, CapacityError, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.frontend.build import BuiltEngine
from jpaged.frontend.engine_config import engine_config
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.snapshot import EngineSnapshot
from tests.engine.fake_runner import FakeRunner
from tests.serving.http_client import error_of, wait_for
from tests.support.http_server import running
from tests.support.slow_runner import SlowRunner

PREFIX = [41, 42, 43, 44, 45, 46, 47, 48]
ADMIN = {"Authorization": "Bearer look"}


def engine_on(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> AsyncLLM:
    def build(model, params, options, **how):
        return BuiltEngine(Engine(runner), engine_config(model, options), None, None, SamplingParams(temperature=0))

    monkeypatch.setattr("jpaged.async_llm.build_engine", build)
    return AsyncLLM("fake")


@pytest.fixture
def real(monkeypatch):
    """The real engine, on the runner in plain Python; the application closes it."""
    return engine_on(SlowRunner(max_model_len=2000, num_blocks=2000, max_num_seqs=2), monkeypatch)


@pytest.fixture
def served(real):
    server = Server(engine=real, model_names=("fake",))
    with running(create_app(server, AppOptions(api_keys=("talk",), admin_keys=("look", "see")))) as base:
        yield base


@contextmanager
def asked_for(base: str, prompt: list[int]) -> Iterator[None]:
    """A request that runs until the context ends; its answer is not read."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1900, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer talk\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", int(base.rsplit(":", 1)[1]))) as raw:
        raw.sendall(f"{head}\r\n\r\n{body}".encode())
        yield


def test_running_requests_are_shown_without_their_texts(real, served):
    with ExitStack() as stack:
        for count, last in enumerate((71, 72, 73), start=1):  # the third has to wait for a row
            stack.enter_context(asked_for(served, [*PREFIX, last]))
            wait_for(lambda count=count: real.stats().num_running + real.stats().num_waiting == count)
            before = real.stats().generated_tokens
            wait_for(lambda before=before: real.stats().generated_tokens > before + 2)
        answer = httpx.get(f"{served}/admin/inspect", headers=ADMIN)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    snapshot = msgspec.json.decode(answer.content, type=EngineSnapshot)
    assert [request.status for request in snapshot.running] == ["decode", "decode"]
    (waiting,) = snapshot.waiting
    assert waiting.status == "waiting"
    assert waiting.request_id.startswith("cmpl-")
    assert snapshot.pool.shared_blocks == 2
    shared = [block for block in snapshot.blocks if block.ref_count == 2]
    assert {owner.request_id for owner in shared[0].owners} == {request.request_id for request in snapshot.running}
    # Few fields may contain text, and no list of numbers could be token ids.
    texts = {key for key, value in leaves(json.loads(answer.content)) if isinstance(value, str)}
    assert texts == {"request_id", "status", "prefix_hash"}
    assert not [key for key, _ in leaves(json.loads(answer.content)) if key == "[]"]


def leaves(value, key=""):
    """Yield (name of the field, value) of every JSON value but objects and lists. In a list, the name is []."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, "[]")
    else:
        yield key, value


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer talk"}, {"Authorization": "Basic look"}, {"Authorization": "Bearer"},
     {"Authorization": "Bearer looks"}, {"X-Admin-Key": "look"}],
)  # fmt: skip
def test_without_an_admin_key_there_is_401(served, headers):
    error = error_of(httpx.get(f"{served}/admin/inspect", headers=headers), 401)
    assert error["code"] == "invalid_admin_key"
    wrong = headers.get("Authorization") in ("Bearer talk", "Bearer looks")
    problem = "the request has a wrong admin key: send" if wrong else "the request has no admin key: send"
    assert error["message"].startswith(problem)
    for path in ("/admin/inspect/", "/admin/inspect?x=1", "/admin//inspect", "/%61dmin/inspect", "/admin/other"):
        assert httpx.get(served + path, headers=headers, follow_redirects=True).status_code == 401, path
    for path in ("//admin/inspect", "/ADMIN/inspect", "/v1/../admin/inspect/.."):
        assert httpx.get(served + path, headers=headers).status_code in (401, 404), path


def test_admin_and_api_keys_are_valid_on_their_own_routes_only(served):
    for key in ("look", "see"):
        assert httpx.get(f"{served}/admin/inspect", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert error_of(httpx.get(f"{served}/v1/models", headers=ADMIN), 401)["code"] == "invalid_api_key"
    assert httpx.get(f"{served}/v1/models", headers={"Authorization": "Bearer talk"}).status_code == 200
    error_of(httpx.get(f"{served}/admin/other", headers=ADMIN), 404)
    error_of(httpx.post(f"{served}/admin/inspect", headers=ADMIN), 405)
    assert httpx.get(f"{served}/health").status_code == 200


def test_options_and_versions(engine, host):
    server = Server(engine=engine, model_names=("echo",), config=EngineConfig(model="m", swap_space=2))
    host[0].app = create_app(server, AppOptions(admin_keys=("look",)))
    info = httpx.get(f"{host[1]}/server_info?config_format=json", headers=ADMIN).json()
    assert (info["vllm_config"]["swap_space"], info["vllm_config"]["max_model_len"]) == (2, engine.max_model_len)
    assert info["vllm_env"] == {}
    assert {"jpaged", "jax", "python"} <= info["system_env"].keys()
    text = httpx.get(f"{host[1]}/admin/server_info", headers=ADMIN).json()["vllm_config"]
    assert text.startswith("EngineConfig(model='m'")
    assert error_of(httpx.get(f"{host[1]}/server_info?config_format=x", headers=ADMIN), 400)["param"] == "config_format"
    error_of(httpx.get(f"{host[1]}/server_info"), 401)


def test_without_admin_keys_there_is_no_such_route(engine):
    with running(create_app(Server(engine=engine, model_names=("echo",)))) as base:
        unknown = httpx.get(f"{base}/nothing", headers=ADMIN)
        there = httpx.get(f"{base}/admin/inspect", headers=ADMIN)
        assert (there.status_code, there.content) == (unknown.status_code, unknown.content) == (404, unknown.content)
    with running(create_app(Server(engine=engine, model_names=("echo",)), AppOptions(api_keys=("talk",)))) as base:
        assert error_of(httpx.get(f"{base}/admin/inspect", headers=ADMIN), 401)["code"] == "invalid_api_key"
        error_of(httpx.get(f"{base}/admin/inspect", headers={"Authorization": "Bearer talk"}), 404)


@pytest.mark.parametrize("keys", [(), ("one", "two")])
def test_a_client_is_its_key_or_its_address(engine, keys):
    with running(create_app(Server(engine=engine, model_names=("echo",)), AppOptions(api_keys=keys))) as base:
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            httpx.post(f"{base}/v1/completions", headers=headers, json={"prompt": "a"}).raise_for_status()
    first, second, third = engine.seen_clients
    assert first == third
    assert second == first == "127.0.0.1" if not keys else "127.0.0.1" != second != first


def test_with_an_admin_key_alone_other_routes_require_no_key(engine):
    with running(create_app(Server(engine=engine, model_names=("echo",)), AppOptions(admin_keys=("look",)))) as base:
        assert httpx.get(f"{base}/v1/models").status_code == 200
        assert httpx.get(f"{base}/admin/inspect").status_code == 401
        assert httpx.get(f"{base}/admin/inspect", headers=ADMIN).json()["step"] == 7


def test_an_engine_that_has_died_cannot_be_inspected(real, served, monkeypatch):
    monkeypatch.setattr(real.engine, "step", lambda: 1 / 0)
    httpx.post(f"{served}/v1/completions", json={"prompt": [1]}, headers={"Authorization": "Bearer talk"})
    error_of(httpx.get(f"{served}/admin/inspect", headers=ADMIN), 500)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_is_503_while_others_are_served(real, served, monkeypatch, streamed):
    """The engine refuses the request, on its own thread."""
    add = real.engine.add

    def limited(request):
        if real.engine.stats().num_running + real.engine.stats().num_waiting >= 1:
            raise CapacityError("1 request waits, and max_queued_requests is 1", retry_after=2.4)
        add(request)

    monkeypatch.setattr(real.engine, "add", limited)
    with asked_for(served, [1, 2, 3]):
        wait_for(lambda: real.stats().num_running == 1)
        for _ in range(5):
            body = {"prompt": [4, 5], "stream": streamed}
            refused = httpx.post(f"{served}/v1/completions", json=body, headers={"Authorization": "Bearer talk"})
            assert error_of(refused, 503)["code"] == "engine_full"
            assert refused.headers["retry-after"] == "2"
        before = real.stats().generated_tokens
        wait_for(lambda: real.stats().generated_tokens > before + 5)
    wait_for(lambda: real.stats().num_running == 0)
    body = {"prompt": [4, 5], "max_tokens": 2}
    served_again = httpx.post(f"{served}/v1/completions", json=body, headers={"Authorization": "Bearer talk"})
    assert served_again.json()["usage"]["completion_tokens"] == 2
    assert httpx.get(f"{served}/health").status_code == 200


def test_disconnects_at_any_moment_free_all_blocks(real, served):
    """Clients leave before, while and after their requests wait, compute their prompts and generate."""
    moments = random.Random(0)
    port = int(served.rsplit(":", 1)[1])
    for number in range(40):
        body = json.dumps({"prompt": [*PREFIX, number] * 5, "max_tokens": 30, "ignore_eos": True, "n": 1 + number % 2,
                           "stream": number % 3 > 0})  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer talk\r\nContent-Length: {len(body)}"
        raw = f"{head}\r\n\r\n{body}".encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(raw[: moments.randrange(len(raw))] if number % 4 == 0 else raw)
            time.sleep(moments.random() * 0.04)
    wait_for(lambda: not (real.stats().num_running or real.stats().num_waiting))
    assert real.stats().used_blocks == 0
    real.engine.check_integrity()
    assert httpx.get(f"{served}/health").status_code == 200


def test_health_fails_after_a_failed_integrity_check(real, served, monkeypatch):
    monkeypatch.setattr("jpaged.frontend.engine_turns.CHECK_AFTER_SECONDS", 0.02)
    real.engine.scheduler.manager.pool._ref_counts[1999] += 1
    body = {"prompt": [4, 5], "max_tokens": 2}
    httpx.post(f"{served}/v1/completions", json=body, headers={"Authorization": "Bearer talk"})
    wait_for(lambda: httpx.get(f"{served}/health").status_code == 503)


def test_cached_tokens_are_in_the_usage(real, served):
    """A prompt of nine tokens. The second time, its first two blocks of four tokens are prefix hits."""
    asked = {"prompt": [*PREFIX, 1], "max_tokens": 2}
    cached = []
    for _ in range(2):
        answer = httpx.post(f"{served}/v1/completions", json=asked, headers={"Authorization": "Bearer talk"})
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 8]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_requests_end_when_the_weights_are_lost(real, served, stream):
    asked = {"prompt": [*PREFIX, 1], "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        talk = {"Authorization": "Bearer talk"}
        answer = threads.submit(httpx.post, f"{served}/v1/completions", json=asked, headers=talk)
        wait_for(lambda: real.stats().generated_tokens > 3)
        real.engine.runner.problem = "the weights were deleted: call update_weights"
        response = answer.result(10)
    if stream:
        assert '"code":"no_weights"' in response.text
        assert "the weights were deleted: call update_weights" in response.text
    else:
        assert error_of(response, 503)["message"] == "the weights were deleted: call update_weights"


def test_an_engine_without_weights_refuses_requests(real, served):
    asked = {"prompt": [*PREFIX, 1], "max_tokens": 2}
    error_of(httpx.post(f"{served}/sleep?level=3", headers=ADMIN), 400)
    for path in ("sleep?level=2", "wake_up"):
        httpx.post(f"{served}/{path}", headers=ADMIN).raise_for_status()
    for stream in (False, True):
        refused = httpx.post(
            f"{served}/v1/completions", json=asked | {"stream": stream}, headers={"Authorization": "Bearer talk"}
        )
        assert error_of(refused, 503) | {"type": "", "param": ""} == {
            "message": "no weights: call update_weights", "code": "no_weights", "type": "", "param": "",
        }  # fmt: skip
    assert error_of(httpx.post(f"{served}/resume", headers=ADMIN), 503)["code"] == "no_weights"
    assert httpx.get(f"{served}/ready").status_code == 503
    assert httpx.get(f"{served}/health").status_code == 200
