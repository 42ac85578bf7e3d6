"""X-Request-Id on every answer, the access log, and the log as JSON."""

import io
import json
import logging
import re
import socket
from typing import Any

import httpx
import pytest

from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.log_format import JSONFormatter, TextFormatter, say
from jpaged.serving.web.request_context import RequestContext, current
from tests.serving.http_client import wait_for
from tests.support.http_server import running

BODY = {"prompt": "abc", "max_tokens": 3}
NEW = re.compile(r"[0-9a-f]{32}")


def test_a_sane_id_is_echoed_and_ends_the_id_of_the_answer(url, engine):
    answer = httpx.post(f"{url}/v1/completions", json=BODY, headers={"X-Request-Id": "trace/42.a"})
    assert answer.headers["x-request-id"] == "trace/42.a"
    assert answer.json()["id"] == "cmpl-trace/42.a"
    (request_id,) = engine.steps
    assert request_id.startswith("cmpl-trace/42.a-")  # unique: the client may send its id again
    body = BODY | {"request_id": "mine"}
    assert httpx.post(f"{url}/v1/completions", json=body).json()["id"] == "cmpl-mine"
    answer = httpx.post(f"{url}/v1/completions", json=BODY)
    assert NEW.fullmatch(answer.headers["x-request-id"])
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"


@pytest.mark.parametrize("bad", [b"", b"a b", b"a\tb", "caf\u00e9".encode(), b"x" * 257])
def test_any_other_id_is_replaced(url, bad):
    answer = httpx.get(f"{url}/v1/models", headers={"X-Request-Id": bad})
    assert NEW.fullmatch(answer.headers["x-request-id"])


def test_the_same_id_twice_at_the_same_time(url, engine):
    engine.step_seconds = 0.02
    path, twice = f"{url}/v1/completions", {"X-Request-Id": "twice"}
    with httpx.stream("POST", path, json=BODY | {"stream": True, "max_tokens": 20}, headers=twice) as first:
        assert httpx.post(path, json=BODY, headers=twice).status_code == 200
        assert first.headers["x-request-id"] == "twice"
        assert list(first.iter_lines())[-2] == "data: [DONE]"


def test_every_kind_of_answer_has_one(url, engine):
    """Streams, errors of each layer, unknown routes, and what the connection itself refuses."""
    sent = [
        ("GET", "/nowhere", None), ("GET", "/v1/completions", None), ("POST", "/v1/completions", {"n": 0}),
        ("POST", "/v1/completions", BODY | {"stream": True}), ("POST", "/v1/completions", {"prompt": "full"}),
        ("GET", "/health", None),
    ]  # fmt: skip
    for method, path, body in sent:
        assert "x-request-id" in httpx.request(method, f"{url}{path}", json=body).headers, path
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"NONSENSE\r\n\r\n")
        assert b"\r\nx-request-id: " in raw.recv(4096)


def test_an_error_that_nobody_expected_has_one(engine):
    def broken():
        raise ZeroDivisionError

    server = Server(engine=engine, model_names=("echo",))
    engine.check_health = broken
    app = create_app(server, AppOptions(("k",)))
    with running(app) as base:
        answer = httpx.get(f"{base}/health")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert NEW.fullmatch(answer.headers["x-request-id"])
        refused = httpx.get(f"{base}/v1/models")
        assert refused.status_code == 401
        assert NEW.fullmatch(refused.headers["x-request-id"])


@pytest.fixture
def log():
    """Lines of the log as JSON."""
    stream, logger = io.StringIO(), logging.getLogger("jpaged")
    handler, level = logging.StreamHandler(stream), logger.level
    handler.setFormatter(JSONFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_access_log_in_both_formats(engine, log, caplog):
    app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(access_log=True))
    with caplog.at_level(logging.INFO, logger="jpaged"), running(app) as base:
        httpx.post(f"{base}/v1/completions?key=secret", json=BODY, headers={"X-Request-Id": "one"})
        httpx.get(f"{base}/forged%0aline", headers={"X-Request-Id": "two"})
        wait_for(lambda: len(log()) >= 3)
    text = [record.getMessage() for record in caplog.records if record.name == "jpaged.access"]
    assert re.fullmatch(r'127\.0\.0\.1:\d+ "POST /v1/completions" 200 0\.\d{3}s one', text[0])
    assert re.fullmatch(r'127\.0\.0\.1:\d+ "GET /forged%0Aline" 404 0\.\d{3}s two', text[1])
    lines = [line for line in log() if line["logger"] == "jpaged.access"]
    assert {"method": "POST", "path": "/v1/completions", "status": 200, "request_id": "one"}.items() <= lines[0].items()
    assert lines[0]["seconds"] > 0
    assert lines[0]["level"] == "info"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])
    assert not [line for line in log() if "secret" in json.dumps(line)]


def test_lines_about_a_request_have_its_id(url, log):
    httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 0}, headers={"X-Request-Id": "refused"})
    (line,) = log()
    assert (line["request_id"], line["message"]) == (
        "refused", "refused a request with status 400: n must be an integer from 1 to 64"
    )  # fmt: skip
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 400)
    assert line["client"].startswith("127.0.0.1:")


def test_a_line_of_text_has_the_time_the_level_and_the_request():
    def line(**extra: Any) -> str:
        record = logging.LogRecord("jpaged.serving", logging.WARNING, "", 0, "refused %d", (400,), None)
        record.__dict__ |= extra
        return TextFormatter().format(record)

    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING refused 400"
    assert re.fullmatch(stamp, line())
    assert re.fullmatch(stamp, line(facts={"status": 400}))  # the access log's message has them
    token = current.set(RequestContext("one", True, client="127.0.0.1:9", method="POST", path="/v1/completions"))
    try:
        assert re.fullmatch(stamp + r' \[127\.0\.0\.1:9 "POST /v1/completions" 400 one\]', line(status=400))
    finally:
        current.reset(token)


def test_with_a_json_log_the_lines_on_stdout_are_json(log, monkeypatch, capsys):
    say("ready: http://x/v1")
    assert capsys.readouterr().out == "ready: http://x/v1\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", logging.getLogger("jpaged").handlers[-1:])
    say("ready: http://x/v1")
    line = json.loads(capsys.readouterr().out)
    assert (line["level"], line["logger"], line["message"]) == ("info", "jpaged.serving", "ready: http://x/v1")


def test_a_traceback_is_one_line(log):
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("jpaged.x").exception("it\nfailed", extra={"request_id": "r"})
    (line,) = log()
    assert line["message"] == "it\nfailed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: two\nlines")
    assert (line["level"], line["request_id"]) == ("error", "r")
