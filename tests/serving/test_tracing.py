"""OpenTelemetry spans, sent by the real exporter to a collector in this process."""

import gzip
import http.server
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from jpaged.errors import RequestError
from jpaged.serving.admin.tracing import RequestTracer, traced
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.engine.fake_runner import FakeRunner
from tests.serving.http_client import wait_for
from tests.serving.served_runner import async_engine
from tests.support.http_server import running
from tests.support.slow_runner import SlowRunner

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}


class Collector(http.server.ThreadingHTTPServer):
    """Stores the spans that it receives."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.add(self.path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the packages of jpaged[otel]")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span) -> dict[str, Any]:
    """Attributes of a span, as Python values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_spans_of_an_answer_a_stream_an_abort_and_an_error(collector):
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    runner = SlowRunner(max_model_len=2000, num_blocks=2000)
    engine = traced(async_engine(runner), RequestTracer(endpoint, "fake"))
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9}
    with running(create_app(Server(engine=engine, model_names=("fake",)))) as base:
        url = f"{base}/v1/completions"
        began = time.time_ns()
        assert httpx.post(url, json=body | {"n": 2}, headers=HEADERS).status_code == 200
        ended = time.time_ns()
        assert httpx.post(url, json=body | {"stream": True}).status_code == 200
        with httpx.stream("POST", url, json=body | {"stream": True, "max_tokens": 1500, "logprobs": 1}) as answer:
            next(answer.iter_lines())
        assert httpx.post(url, json=body | {"prompt": [987_654_321]}).status_code == 400
    wait_for(lambda: len(collector.spans) == 4)  # the application has closed: the last spans were sent
    assert collector.paths == {"/v1/traces"}
    whole, stream, left, refused = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    seen = attributes(whole)
    assert (whole.name, whole.trace_id.hex(), whole.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert seen["gen_ai.request.id"].startswith("cmpl-mine-")
    assert {
        "gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.completion_tokens": 10, "gen_ai.usage.num_sequences": 2,
        "gen_ai.request.n": 2, "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9, "gen_ai.response.model": "fake",
    }.items() <= seen.items()  # fmt: skip
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in seen.items() if ".latency." in name}
    assert set(latency) == {
        "time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference",
    }  # fmt: skip
    assert 0 < latency["time_to_first_token"] < latency["e2e"] <= (ended - began) / 1e9
    parts = latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert latency["time_in_model_inference"] == pytest.approx(parts)
    assert began <= whole.start_time_unix_nano <= whole.end_time_unix_nano <= ended
    assert stream.trace_id.hex() != TRACE
    assert not stream.parent_span_id
    assert attributes(stream)["gen_ai.usage.completion_tokens"] == 5
    assert stream.status.code == 0
    assert (left.status.code, left.status.message) == (2, "aborted")
    assert "gen_ai.latency.e2e" not in attributes(left)
    assert (refused.status.code, refused.status.message) == (2, "RequestError")
    assert "987654321" not in str(refused)  # no prompts in traces


@pytest.mark.slow
def test_a_collector_that_does_not_answer_delays_nothing(collector):
    collector.server_close()
    tracer = RequestTracer(f"http://127.0.0.1:{collector.server_port}/custom", "fake")
    engine = traced(async_engine(FakeRunner()), tracer)
    with running(create_app(Server(engine=engine, model_names=("fake",)))) as base:
        body = {"prompt": [1, 2, 3], "max_tokens": 5}
        assert all(httpx.post(f"{base}/v1/completions", json=body).status_code == 200 for _ in range(5))
        began = time.monotonic()
    assert time.monotonic() - began < 4


def test_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(RequestError, match=r"pip install 'jpaged\[otel\]'"):
        RequestTracer("http://127.0.0.1:4318", "fake")


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", "file:///etc/passwd"])
def test_the_endpoint_must_be_a_url(url):
    with pytest.raises(RequestError, match="http://localhost:4318/v1/traces"):
        RequestTracer(url, "fake")


def test_nothing_is_imported_without_the_flag():
    script = (
        "import sys, jpaged.serving.application, jpaged.serving.admin.tracing, jpaged.cli.serve; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
