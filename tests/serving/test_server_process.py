"""The server as a process: the address, the line "ready", signals, and the exit."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from jpaged.errors import JPagedError
from jpaged.serving.web.process import CLOSE_SECONDS, AddressError, _announce, _url, take_address
from tests.support.served_processes import children_of

MESSAGE = {"role": "user", "content": "a"}
ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = """
import asyncio, gc, pathlib, sys, time
sys.path[:0] = [sys.argv[1]]
import fake_engine
import jpaged
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.process import serve, take_address, take_unix_socket


class Stuck(fake_engine.FakeEngine):
    # its calls take ten minutes, and nothing interrupts them

    async def generate(self, *args, **kwargs):
        if "tokenising" in sys.argv:
            await asyncio.to_thread(time.sleep, 600)
        yield

    def close(self):
        if "compiling" in sys.argv:
            time.sleep(600)

def render(*args, **kwargs):
    time.sleep(600)

class Fatal(fake_engine.FakeEngine):
    # its first request ends it, as an error of the engine's thread does

    def when_fatal(self, callback):
        self.callback = callback

    async def generate(self, *args, **kwargs):
        self.dead = True
        self.callback(jpaged.EngineError("the engine has ended: the device is gone"))
        raise jpaged.EngineError("the engine has ended: the device is gone")
        yield

    def wait_until_ready(self):
        pass

engine = fake_engine.FakeEngine(step_seconds=0.05) if len(sys.argv) == 3 else Stuck()
ended = None
if "fatal" in sys.argv:
    engine = ended = Fatal()
if "rendering" in sys.argv:
    engine.tokenizer.apply_chat_template = render
app = create_app(Server(engine=engine, model_names=("echo",)))
address = take_address("127.0.0.1", 0)
if "unix" in sys.argv[-1]:
    engine, address = fake_engine.FakeEngine(), take_unix_socket(pathlib.Path(sys.argv[-1]))
    app = create_app(Server(engine=engine, model_names=("echo",)))
status = serve(app, address, shutdown_timeout=int(sys.argv[2]), engine=ended)
print("closed", engine.closed)
print("frozen", gc.get_freeze_count() > 10_000)
sys.exit(status)
"""


@pytest.fixture
def start():
    """Return a function that starts a server and returns its process and base URL."""
    started = []

    def make(shutdown_timeout: int, *stuck: str) -> tuple[subprocess.Popen, str]:
        command = [sys.executable, "-c", SCRIPT, str(pathlib.Path(__file__).parent), str(shutdown_timeout), *stuck]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        started.append(process)
        line = process.stdout.readline()
        assert line.startswith(("ready: http://127.0.0.1:", "ready: http+unix:///"))
        return process, line.removeprefix("ready: ").removesuffix("/v1\n")

    yield make
    for process in started:
        process.kill()
        process.stdout.close()
        process.wait()


def test_ready_is_announced_when_all_programs_exist(capsys):
    class Starting:
        is_ready = False
        compiled = threading.Event()

        def wait_until_ready(self):
            assert self.compiled.wait(10)

    engine = Starting()
    _announce("http://x/v1", engine)
    assert capsys.readouterr().out.startswith("serving: http://x/v1 (")
    engine.compiled.set()
    [waiting] = [thread for thread in threading.enumerate() if thread.name == "jpaged-ready"]
    waiting.join(10)
    assert capsys.readouterr().out == "ready: http://x/v1\n"
    engine.is_ready = True
    _announce("http://x/v1", engine)
    assert capsys.readouterr().out == "ready: http://x/v1\n"


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (("0.0.0.0", 80), "http://127.0.0.1:80"), (("::", 80, 0, 0), "http://[::1]:80"),
        (("10.0.0.1", 80), "http://10.0.0.1:80"), ("/a.sock", "http+unix:///a.sock"),
    ],
)  # fmt: skip
def test_the_printed_address_is_one_that_a_client_here_can_use(name, url):
    assert _url(name, False) == url


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_running_requests_finish_before_it_stops(start, number):
    process, url = start(20)
    answers = []

    def ask(client: httpx.Client) -> None:
        answers.append(client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20}, timeout=20))

    body = {"prompt": "abc", "max_tokens": 60, "stream": True}
    with httpx.Client(base_url=url) as client, httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
        client.get("/health")  # connect first, so that the request is sent without delay
        asking = threading.Thread(target=ask, args=(client,))
        lines = stream.iter_lines()
        next(lines)
        asking.start()
        for _ in range(20):  # lines of a stream with a step every 0.05 s
            next(lines)
        process.send_signal(number)
        rest = list(lines)
        asking.join()
    assert rest[-2] == "data: [DONE]"
    assert answers[0].json()["choices"][0]["text"] == "abcabcabcabcabcabcab"
    assert process.wait(timeout=10) == 0
    printed = process.stdout.read()
    assert "closed True" in printed
    assert re.search(r"^stopped after \d+\.\d s$", printed, re.MULTILINE)
    assert "frozen True" in printed  # the garbage collector does not stop requests to visit modules
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
@pytest.mark.usefixtures("default_sigint")
def test_a_server_that_a_script_started_in_the_background_stops_at_sigint(start):
    """A script starts background processes with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the server
    process, url = start(20)
    assert httpx.get(f"{url}/health").status_code == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    assert "closed True" in process.stdout.read()


@pytest.mark.slow
def test_requests_that_outlast_the_timeout_are_ended(start):
    process, url = start(1)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    answers = []

    def ask(client: httpx.Client) -> None:
        answers.append(client.post("/v1/completions", json={**body, "stream": False}, timeout=20))

    with httpx.Client(base_url=url) as client, httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
        client.get("/health")  # connect first, so that the request is sent without delay
        asking = threading.Thread(target=ask, args=(client,))
        lines = stream.iter_lines()
        next(lines)
        asking.start()
        for _ in range(40):  # lines of a stream with a step every 0.05 s
            next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        asking.join()
    assert "the server is stopping" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "stopping"
    assert process.wait(timeout=10) == 0
    said = process.stdout.read()
    assert "waits up to 1 s for 2 running requests" in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once(start, number):
    process, url = start(60)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(number)
        assert "waits up to 60 s" in process.stdout.readline()
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=10) == 1
        assert time.monotonic() - began < 2
    assert "second signal" in process.stdout.read()


def test_a_fatal_error_of_the_engine_ends_the_process(start):
    """The request gets an error, and the process ends by itself, with a status that a supervisor sees."""
    process, url = start(20, "fatal")
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=20)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert "device" not in answer.text
    assert process.wait(timeout=10) == 1
    said = process.stdout.read()
    assert "the server stops: the engine has ended: the device is gone" in said
    assert "closed True" in said


def test_a_unix_socket_serves_and_is_removed(start, tmp_path):
    path = tmp_path / "unix"
    process, _ = start(5, str(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=20) as client:
        answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        assert answer.json()["choices"][0]["text"] == "ab"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    assert not path.exists()


@pytest.mark.slow
def test_a_request_that_waits_for_another_one_of_its_connection_is_not_begun(start):
    """It got 500 and a traceback."""
    process, url = start(1)
    raw = b'{"prompt":"a","max_tokens":4000}'
    one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=10) as connection:
        connection.sendall(one + one)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        pieces = []
        while piece := connection.recv(65_536):
            pieces.append(piece)
    assert b"".join(pieces).startswith(b"HTTP/1.1 503 ")
    assert b"".join(pieces).count(b"HTTP/1.1 ") == 1
    assert process.wait(timeout=10) == 0
    assert "Traceback" not in process.stdout.read()


STUCK = ("tokenising", "rendering", "compiling")


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [STUCK, *(pytest.param((one,), marks=pytest.mark.slow) for one in STUCK)])
def test_a_stuck_server_ends_within_its_timeout(start, stuck):
    process, url = start(1, *stuck)
    streams = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [MESSAGE]})]
    with httpx.Client(base_url=url, timeout=20) as client:
        asking = [
            threading.Thread(target=ask_until_the_end, args=(client, path, {**body, "stream": True}))
            for path, body in streams
        ]
        for thread in asking:
            thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 1
        assert time.monotonic() - began < 1 + CLOSE_SECONDS + 2
        for thread in asking:
            thread.join(5)
    said = process.stdout.read()
    assert "most recent call first" in said  # what the threads did
    assert ("in render" in said) == ("rendering" in stuck)
    if stuck == ("compiling",):
        assert "in close" in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the child process in /proc")
def test_a_body_that_is_never_checked_does_not_delay_the_end(start):
    """The child process that checks large bodies is stopped, as by a check without end."""
    process, url = start(1)
    body = {"prompt": "a" * 300_000, "max_tokens": 1}
    with httpx.Client(base_url=url, timeout=20) as client:
        assert client.post("/v1/completions", json=body).status_code == 400  # starts the child
        (child,) = children_of(process.pid, b"body_worker")
        os.kill(child, signal.SIGSTOP)
        asking = threading.Thread(target=ask_until_the_end, args=(client, "/v1/completions", body))
        asking.start()
        time.sleep(0.3)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
        assert time.monotonic() - began < 1 + CLOSE_SECONDS + 2
        asking.join(5)
    assert not pathlib.Path(f"/proc/{child}").exists()


def ask_until_the_end(client: httpx.Client, path: str, body: dict) -> None:
    with contextlib.suppress(httpx.HTTPError):
        client.post(path, json=body)


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JPagedError, match=f"127.0.0.1:{port}"):
            take_address("127.0.0.1", port)
    with take_address("127.0.0.1", 0) as address, pytest.raises(ConnectionRefusedError):
        socket.create_connection(address.getsockname())  # bound, but not listening before the model is loaded


@pytest.mark.slow
@pytest.mark.parametrize("program", [["-m", "jpaged", "serve"], ["serving/app.py"]])
def test_both_ways_to_start_take_the_same_flags(program):
    command = [sys.executable, *program, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # a script has its own folder on the path, not the checkout
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("jpaged: model: name a folder")


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_an_invalid_port_is_refused(port):
    with pytest.raises(AddressError, match="0 to 65535"):
        take_address("127.0.0.1", port)
