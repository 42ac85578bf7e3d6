"""Limits of one connection: bytes and seconds of a request, connections of an address, and half-closed clients."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.address import address_key
from jpaged.serving.web.connection import ConnectionLimits
from tests.serving import fake_engine
from tests.serving.http_client import wait_for
from tests.serving.request_bodies import BODIES, STREAMS, at_most, request_bytes
from tests.support.http_server import running

LIMITS = ConnectionLimits(head_seconds=0.5, body_seconds=0.7, read_seconds=1.0, per_address=3)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[str]:
    """The base URL of a server with small limits and a key."""
    engine = fake_engine.FakeEngine(step_seconds=0.005)
    app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(api_keys=("right",)))
    with running(app, LIMITS) as base:
        yield base


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=10)


def received(raw: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(65_536):
            pieces.append(piece)
    return b"".join(pieces)


def flood(raw: socket.socket, piece: bytes, most: int) -> int:
    """Send a piece again and again. Returns the bytes sent until the server closes the connection, at most `most`."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            sent += raw.send(piece)
    return sent


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nX: ",
        b"GET / HTTP/1.1\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;",
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ],
    ids=["path", "header", "headers", "chunk extension", "trailer"],
)
def test_an_endless_head_is_cut(url, begin):
    with connected(url) as raw:
        raw.sendall(begin)
        piece = b"a: b\r\n" * 10_000 if begin.endswith(b"1.1\r\n") else b"a" * 60_000
        assert flood(raw, piece, 2**27) < 2**27
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_long_head_is_answered(url):
    with connected(url) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000)
        answer = received(raw)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"] == "the headers have more than 65,536 bytes"
    assert httpx.get(f"{url}/health", headers={"x": "a" * 50_000}).status_code == 200


@pytest.mark.parametrize(
    "begin",
    [*(pytest.param(begin, marks=pytest.mark.slow) for begin in (b"", b"\r\n")), b"GET /health HTTP/1.1\r\nX: "],
)
def test_a_slow_head_is_cut(strict, begin):
    with connected(strict) as raw:
        raw.sendall(begin)
        start = time.monotonic()
        assert received(raw).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("headers", [b"", b"Host: x\r\nhost: x\r\n"])
def test_a_request_has_one_host(url, headers):
    with connected(url) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n" + headers + b"\r\n")
        answer = received(raw)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Host headers, not one" in answer
    with connected(url) as raw:  # the request before is answered
        raw.sendall(request_bytes("/v1/completions", {"prompt": "ab", "max_tokens": 3}))
        raw.sendall(b"GET /health HTTP/1.1\r\n" + headers + b"\r\n")
        assert received(raw).count(b"HTTP/1.1 200 ") == 1


def test_a_slow_body_is_cut(strict):
    with connected(strict) as raw:
        raw.sendall(POST + b"Authorization: Bearer right\r\nContent-Length: 100\r\n\r\n{")
        assert received(raw).startswith(b"HTTP/1.1 408 ")


def test_a_request_without_the_key_is_answered_before_its_body(strict):
    with connected(strict) as raw:
        raw.sendall(POST + b"Content-Length: 30000000\r\n\r\n")
        answer = received(raw)  # ends when the body does not come
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert answer.count(b"HTTP/1.1 ") == 1  # no 408 follows. The digits alone also occur in request ids


def test_connections_of_one_address(strict):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(strict)) for _ in range(LIMITS.per_address)]
        for one in held:  # accepted
            one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 200"
        assert received(stack.enter_context(connected(strict))).startswith(b"HTTP/1.1 503 ")

    def accepted() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{strict}/health").status_code == 200
        return False

    wait_for(accepted)


def test_pipelined_requests_are_limited(url):
    """20,000 of them in one piece had stopped the event loop for 0.5 s."""
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(url) as raw:
        raw.sendall(one * 10 + one.replace(b"Host", b"Connection: close\r\nHost"))
        assert received(raw).count(b"HTTP/1.1 200 ") == 11
    with connected(url) as raw:
        assert flood(raw, one * 1_000, 2**27) < 2**27


def test_all_pipelined_requests_of_a_client_that_leaves_are_aborted(url, engine):
    """uvicorn aborts the last one only. That the client has left shows when a part of an answer is sent."""
    engine.step_seconds = 0.05
    one = request_bytes("/v1/completions", BODIES["/v1/completions"] | {"max_tokens": 500, "stream": True})
    with connected(url) as raw:
        raw.sendall(one + one)
        wait_for(lambda: engine.running)
    wait_for(lambda: not engine.running)


def test_too_many_pipelined_requests_abort_the_running_one(url, engine, caplog):
    engine.step_seconds = 0.05
    one = request_bytes("/v1/completions", BODIES["/v1/completions"] | {"max_tokens": 500})
    with connected(url) as raw:
        raw.sendall(one)
        wait_for(lambda: engine.running)
        raw.sendall(one * 40)
        assert received(raw) == b""
    wait_for(lambda: not engine.running)
    assert not caplog.records


def test_an_upgrade_is_ignored(url):
    """Java's client asks for HTTP/2 so. The parser skips the body then, and its bytes were read as a request."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    body = json.dumps({"prompt": "GET /v1/models HTTP/1.1\r\n\r\n", "max_tokens": 3}).encode()
    whole = POST + upgrade + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    chunked = POST + upgrade + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    stream = whole + chunked + get + last
    for piece in (len(stream), 1):
        with connected(url) as raw:
            for start in range(0, len(stream), piece):
                raw.sendall(stream[start : start + piece])
            answer = received(raw)
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert answer.count(b'"text":"GET"') == 2


def test_the_end_of_a_connection_behind_a_waiting_request_is_seen(url, engine):
    """No bytes are received while a request waits. The first request has no answer before its end."""
    engine.step_seconds = 0.05
    one = request_bytes("/v1/completions", BODIES["/v1/completions"])
    with connected(url) as raw:
        raw.sendall(one + one)
        wait_for(lambda: engine.running)
    wait_for(lambda: not engine.running)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(b"", marks=pytest.mark.slow),
        pytest.param(POST + b"Content-Length: 9\r\n\r\n{", marks=pytest.mark.slow),
        b"\x00\x01 bad\r\n\r\n",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_whole_requests_are_answered(url, engine, end, stream):
    """Also if the client closes its sending side inside the next request, or if that is not HTTP."""
    engine.step_seconds = 0.02
    one = request_bytes("/v1/completions", BODIES["/v1/completions"] | {"stream": stream, "max_tokens": 5})
    with connected(url) as raw:
        raw.sendall(one + one + end)
        if not end.startswith(b"\x00"):
            raw.shutdown(socket.SHUT_WR)
        answer = received(raw)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.count(b'"finish_reason":"length"') == 2
    assert b"HTTP/1.1 400" not in answer


@pytest.mark.parametrize("end", [pytest.param(b"", marks=pytest.mark.slow), b"\x00bad\r\n\r\n"])
def test_answers_have_the_order_of_their_requests(url, engine, end):
    """Requests of HTTP/1.0 among them. A half-closed client of HTTP/1.0 gets no answer."""
    engine.step_seconds = 0.02
    names = ("AAAA", "BBBB", "CCCC")
    requests = [request_bytes("/v1/completions", {"prompt": name, "max_tokens": 4}) for name in names]
    for old in range(3):
        sent = list(requests)
        sent[old] = sent[old].replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n")
        with connected(url) as raw:
            raw.sendall(b"".join(sent) + end)
            if not end:
                raw.shutdown(socket.SHUT_WR)
            texts = re.findall(rb'"text":"(\w+)"', received(raw))
        assert texts == [b"AAAA", b"BBBB", b"CCCC"][: old + 1 if end else 0]
    wait_for(lambda: not engine.running)


@pytest.mark.slow
def test_the_end_of_a_connection_behind_unread_bytes_is_seen(url, engine):
    engine.step_seconds = 0.05
    with connected(url) as raw:
        raw.sendall(request_bytes("/v1/completions", BODIES["/v1/completions"]))
        wait_for(lambda: engine.running)
        raw.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            raw.sendall(POST + b"Content-Length: 15000000\r\n\r\n" + b" " * 12_000_000)
    wait_for(lambda: not engine.running)


@pytest.mark.slow
def test_a_connection_is_idle_after_an_early_error(strict):
    with connected(strict) as raw:
        raw.sendall(POST + b"Content-Length: 10\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.1 401"
        raw.sendall(b"0123456789")
        start = time.monotonic()
        received(raw)  # ends after uvicorn's 5 s
        assert time.monotonic() - start < 8


def test_what_is_not_http_gets_an_error(url):
    gzip = POST + b"Connection: upgrade\r\nUpgrade: x\r\nTransfer-Encoding: gzip\r\n\r\n"
    chunk = POST + b"Transfer-Encoding: chunked\r\n\r\nxx\r\n"
    for bad in (gzip, chunk, b"bad\r\n\r\n", b"POST http://[ HTTP/1.1\r\nHost: x\r\n\r\n"):
        with connected(url) as raw:
            raw.sendall(bad)
            answer = received(raw)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"] == "invalid HTTP request"


def test_an_error_before_the_end_of_a_body_arrives(strict):
    """The server closes, and the client still sends. Without lingering TCP resets the connection."""
    with connected(strict) as raw:
        raw.sendall(POST + b"Connection: close\r\nContent-Length: 8000000\r\n\r\n")
        for _ in range(8):
            raw.sendall(b"a" * 1_000_000)
        assert received(raw).startswith(b"HTTP/1.1 401 ")
        assert raw.recv(1) == b""  # not reset


def test_lingering_has_a_limit(strict):
    with connected(strict) as raw:
        raw.sendall(POST + b"Connection: close\r\nContent-Length: 800000000\r\n\r\n")
        assert flood(raw, b"a" * 1_000_000, 2**28) < 2**28


@pytest.mark.slow
def test_an_idle_connection_gets_no_408_after_a_long_answer(strict):
    """The limit of a head ends during the answer."""
    body = json.dumps({"prompt": "a", "max_tokens": 90}).encode()
    with connected(strict) as raw:
        raw.sendall(POST + b"Authorization: Bearer right\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert raw.recv(65_536).startswith(b"HTTP/1.1 200 ")
        raw.settimeout(1.0)  # head_seconds is 0.5
        with pytest.raises(TimeoutError):
            raw.recv(1)


def test_a_body_in_chunks_of_one_byte(url):
    body = b'{"prompt":"a",' + b" " * 100_000 + b'"max_tokens":1}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with connected(url) as raw:
        raw.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert received(raw).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_cut():
    """The answer is larger than the buffers of both ends."""
    ended = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(512):
            await send({"type": "http.response.body", "body": b"a" * 65_536, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.append((await receive())["type"])

    def started(url: str) -> socket.socket:
        raw = connected(url)
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert raw.recv(12) == b"HTTP/1.1 200"
        return raw

    with running(app, LIMITS) as url:
        with started(url) as raw:
            wait_for(lambda: ended)
            least = 2**20 if hasattr(socket, "TCP_NOTSENT_LOWAT") else 512 * 65_536
            assert len(received(raw)) < least  # 200 kB; the kernel would take 4 MB
        with started(url) as raw:
            for _ in range(2):  # a slow one
                time.sleep(0.7)
                raw.recv(300_000, socket.MSG_WAITALL)
            assert len(received(raw)) > 511 * 65_536 - 2 * 300_000


def test_addresses():
    assert address_key("10.0.0.1") == address_key("::ffff:10.0.0.1") == "10.0.0.1"
    assert address_key("2001:db8:1:2::1") == address_key("2001:db8:1:2:3:4:5:6") != address_key("2001:db8:1:3::1")
    assert address_key("fe80::1%eth0") == address_key("fe80::2")


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer(url, engine, path, stream):
    engine.step_seconds = 0.05
    with connected(url) as raw:
        raw.sendall(request_bytes(path, at_most(path, 5) | {"stream": stream}))
        raw.shutdown(socket.SHUT_WR)
        answer = received(raw)
    assert answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    reason = {"/v1/messages": b'"max_tokens"', "/v1/responses": b'"max_output_tokens"'}.get(path, b'"length"')
    assert reason in answer
    assert not engine.running


@pytest.mark.slow
def test_a_long_stream_outlives_the_limits(strict):
    body = {"prompt": "abc", "max_tokens": 200, "stream": True}
    with httpx.Client(base_url=strict, headers={"Authorization": "Bearer right"}, timeout=20) as http:
        start = time.monotonic()
        assert http.post("/v1/completions", json=body).text.endswith("[DONE]\n\n")
        assert time.monotonic() - start > LIMITS.body_seconds
