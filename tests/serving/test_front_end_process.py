"""Faults of the engine's process and of its front end: `jpaged serve --api-server-count 1`, as processes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from jpaged import cli
from tests.serving.http_client import wait_for
from tests.support.served_processes import Serving, Streams, alive, answer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the front end's process in /proc"),
    pytest.mark.usefixtures("default_sigint"),
]
BODY = {"model": "fake", "prompt": "abc", "ignore_eos": True, "stream": True}
LONG, SHORT = BODY | {"max_tokens": 1900}, BODY | {"max_tokens": 60}


@pytest.fixture
def start() -> Iterator[Callable[..., Serving]]:
    """Starts servers, and ends them with their front ends."""
    started: list[Serving] = []

    def make(*arguments: str, **options: Any) -> Serving:
        started.append(Serving(*arguments, **options))
        return started[-1]

    yield make
    for each in started:
        each.kill()


def test_a_front_end_that_dies_is_started_again(start):
    server = start()
    url = server.ready()
    wanted, first = answer(url), server.child
    streams = Streams(url, LONG, 16)

    def kill() -> float:
        assert server.load()["running"] == 16
        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        while (load := server.load())["blocks"]:
            time.sleep(0.02)
        assert load["running"] == 0
        return time.monotonic() - began

    assert streams.during(kill) < 1
    assert not any("[DONE]" in lines[-1] for lines in streams.lines)
    assert answer(url) == wanted
    assert "front end 0 has ended (status -9): it is started again" in server.text
    assert server.child != first
    after = Streams(url, SHORT, 16)
    after.during(lambda: None)
    after.check_whole()
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


def test_a_server_whose_front_ends_die_at_once_ends(start):
    server = start()
    server.ready()
    for _ in range(3):
        wait_for(lambda: len(server.children) == 1, seconds=10)
        os.kill(server.child, signal.SIGKILL)
        server.until("front end")
    assert server.ended() == 1
    assert "no front end can be started" in server.text or "has ended 3 times" in server.text


def test_an_engine_that_is_killed_ends_all_streams_with_an_error(start):
    server = start()
    url = server.ready()
    child = server.child
    streams = Streams(url, LONG, 16)

    def kill() -> float:
        server.process.kill()
        return time.monotonic()

    address = urllib.parse.urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as slow:  # it does not delay the end
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 9\r\n\r\n{")
        killed = streams.during(kill)
        assert max(streams.ends) - killed < 1
        wait_for(lambda: not alive(child), seconds=6)
    for lines in streams.lines:
        errors = [line for line in lines if '"error"' in line]
        assert len(errors) == 1
        assert "engine_error" in errors[0]
    assert "the server stops: the engine's process has ended" in server.text
    assert server.text.count("a request failed: ") == 16  # a line for each request, and no traceback
    assert "Traceback" not in server.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_streams_finish(start, number):
    server = start()
    url = server.ready()
    streams = Streams(url, BODY | {"max_tokens": 100}, 16)
    streams.during(lambda: server.process.send_signal(number))
    streams.check_whole()
    began = time.monotonic()
    assert server.ended() == 0
    assert time.monotonic() - began < 3
    assert "stopped after" in server.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_streams_that_outlast_the_timeout_are_ended(start):
    server = start("--port", "0", "--shutdown-timeout", "1")
    streams = Streams(server.ready(), LONG, 4)
    streams.during(lambda: server.process.send_signal(signal.SIGTERM))
    for lines in streams.lines:
        assert "the server is stopping" in lines[-2]
    assert server.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_all_at_once(start, number):
    server = start("--port", "0", "--shutdown-timeout", "60")
    streams = Streams(server.ready(), LONG, 16)

    def stop() -> float:
        server.process.send_signal(number)
        server.until("stopping: waits up to 60 s for 16 running requests")
        began = time.monotonic()
        server.process.send_signal(number)
        assert server.ended() == 1
        return time.monotonic() - began

    assert streams.during(stop) < 2
    assert "stopped at once by a second signal" in server.text


def test_a_signal_while_the_front_end_starts(start):
    server = start()
    wait_for(lambda: len(server.children) == 1, seconds=60)
    child = server.child
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=20)
    wait_for(lambda: not alive(child), seconds=20)
    assert "Traceback" not in server.text


def test_a_front_end_that_stops_reading_does_not_stop_the_engine(start):
    server = start()
    url = server.ready()
    streams = Streams(url, BODY | {"max_tokens": 200}, 16)

    def pause() -> tuple[int, int]:
        os.kill(server.child, signal.SIGSTOP)
        before = server.load()["generated"]
        time.sleep(1)
        after = server.load()["generated"]
        os.kill(server.child, signal.SIGCONT)
        return before, after

    before, after = streams.during(pause)
    assert after - before > 16 * 10
    streams.check_whole()


def test_a_front_end_that_never_ends_does_not_keep_the_server(start):
    server = start("--port", "0", "--shutdown-timeout", "0")
    server.ready()
    os.kill(server.child, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.ended(30) == 1


def test_an_engine_that_cannot_be_built(start):
    server = start(name="broken")
    assert server.ended(60) not in (0, None)
    assert [line for line in server.text.splitlines() if line] == ["jpaged: broken: it is"]


def test_a_unix_socket_is_removed_at_the_end(start, tmp_path):
    path = tmp_path / "unix"
    server = start("--uds", str(path))
    assert server.ready().startswith("http+unix://")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=20) as client:
        assert client.get("/health").status_code == 200
        os.kill(server.child, signal.SIGKILL)
        server.until("front end 0 has ended")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=20) as client:
        assert client.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0
    assert not path.exists()


def test_metrics_have_a_port_of_their_own(start):
    server = start("--port", "0", "--metrics-port", "0")
    metrics = server.until("metrics: ").removeprefix("metrics: ")
    url = server.ready()
    answer(url)
    assert "generation_tokens_total" in httpx.get(metrics, timeout=20).text
    os.kill(server.child, signal.SIGKILL)
    server.until("front end 0 has ended")
    assert "generation_tokens_total" in httpx.get(metrics, timeout=20).text
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https(start, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=jpaged test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = start("--port", "0", "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    url = server.ready()
    assert url.startswith("https://")
    assert httpx.get(f"{url}/health", verify=False, timeout=20).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_bad_number_of_front_ends(capsys, count):
    assert cli.main(["serve", "demo", "--port", "0", "--api-server-count", count]) == 2
    assert "api_server_count" in capsys.readouterr().err


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "demo", "--port", port, "--api-server-count", "1"]) != 0
    assert port in capsys.readouterr().err
