"""benchmarks/chaos.py finds wrong, lost and late answers. Its seed decides the schedule. A short run finds nothing."""

import http.server
import json
import pathlib
import subprocess
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
import chaos
import chaos_clock
from chaos_load import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Case, Outcome, draw_cases, send
from chaos_server import ServerProcess, Span

pytestmark = pytest.mark.slow  # no default test: the engine does not depend on it

ROOT = pathlib.Path(__file__).resolve().parents[2]
HELLO = {
    COMPLETIONS: {"choices": [{"index": 0, "text": "hello"}]},
    CHAT: {"choices": [{"index": 0, "message": {"content": "hello"}}]},
    RESPONSES: {"output": [{"content": [{"text": "hello"}]}]},
    MESSAGES: {"content": [{"text": "hello"}]},
}
STREAMS = {
    COMPLETIONS: ['{"choices": [{"index": 0, "text": "hel"}]}', '{"choices": [{"index": 0, "text": "lo"}]}', "[DONE]"],
    CHAT: ['{"choices": [{"index": 0, "delta": {"content": "hello"}}]}', "[DONE]"],
    RESPONSES: ['{"type": "response.output_text.delta", "delta": "hello"}', '{"type": "response.completed"}'],
    MESSAGES: ['{"type": "content_block_delta", "delta": {"text": "hello"}}', '{"type": "message_stop"}'],
}


@pytest.fixture
def answering():
    """A server that answers every POST with `answer`: (status, body). None: it closes the connection after a second."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            if server.answer is None:
                time.sleep(1)
                return
            status, body = server.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def case(route: str) -> Case:
    return Case(0, route, "say hello", {"max_tokens": 4, "temperature": 0.0}, None)


def kind(server, route=COMPLETIONS, *, wanted="hello", stream=False, leave_after=None) -> Outcome:
    return send(server.server_port, case(route), [wanted], stream=stream, leave_after=leave_after)


@pytest.mark.parametrize("route", HELLO)
def test_answers_are_compared(answering, route):
    answering.answer = (200, json.dumps(HELLO[route]))
    assert kind(answering, route).kind == "right"
    assert kind(answering, route, wanted="hello!").kind == "wrong"
    events = [f"data: {event}\n\n" for event in STREAMS[route]]
    answering.answer = (200, "".join(events))
    assert kind(answering, route, stream=True).kind == "right"
    assert kind(answering, route, wanted="help", stream=True).kind == "wrong"
    answering.answer = (200, "".join(events[:-1]))  # cut before its end
    assert kind(answering, route, stream=True).kind == "broken"
    answering.answer = (200, events[0] + 'data: {"error": {"code": "stopping"}, "type": "error"}\n\n')
    assert kind(answering, route, stream=True).code == "stopping"


def test_errors_and_leaving(answering):
    answering.answer = (503, '{"error": {"code": "draining", "type": "server_error"}}')
    outcome = kind(answering)
    assert (outcome.kind, outcome.status, outcome.code) == ("error", 503, "draining")
    answering.answer = (200, "{}")
    assert kind(answering).kind == "wrong"
    answering.answer = None
    assert kind(answering, leave_after=0.05).kind == "left"
    answering.shutdown()
    answering.server_close()
    assert kind(answering).kind == "no connection"


class FakeServer:
    port = 0
    has_front_ends = False

    def __init__(self, *spans: Span):
        self.spans = spans


DRAIN, STOP, KILL = (Span(kind, 100.0, 110.0) for kind in ("drain", "restart", "kill"))


@pytest.mark.parametrize(
    ("outcome", "span", "start", "end", "is_finding"),
    [
        (Outcome("right"), DRAIN, 0, 1, False),
        (Outcome("wrong"), DRAIN, 100, 101, True),
        (Outcome("hung"), KILL, 100, 101, True),
        (Outcome("error", 503, "draining"), DRAIN, 99, 101, False),
        (Outcome("error", 503, "draining"), DRAIN, 111, 112, True),
        (Outcome("error", 500, "draining"), DRAIN, 99, 101, True),
        (Outcome("error", 200, "stopping"), STOP, 50, 101, False),
        (Outcome("error", 200, "engine_error"), STOP, 50, 101, True),
        (Outcome("no connection"), STOP, 101, 101, False),
        (Outcome("no connection"), DRAIN, 101, 101, True),
        (Outcome("broken"), KILL, 50, 101, False),
        (Outcome("broken"), STOP, 99.5, 101, False),
        (Outcome("broken"), STOP, 90, 101, True),  # SIGTERM must let it finish, or end it with an error
    ],
)
def test_only_documented_ends_are_accepted(outcome, span, start, end, is_finding):
    made = chaos.Chaos(FakeServer(span), [], [], 1)
    made._judge(case(COMPLETIONS), outcome, start, end)
    assert bool(made.findings) is is_finding
    assert made.outcomes.total() == 1


def test_the_seed_decides_the_run():
    assert draw_cases(3, 40) == draw_cases(3, 40) != draw_cases(4, 40)
    schedule = chaos.draw_schedule(3, 600, list(chaos.EVENTS))
    assert schedule == chaos.draw_schedule(3, 600, list(chaos.EVENTS))
    assert schedule != chaos.draw_schedule(4, 600, list(chaos.EVENTS))
    assert {event.kind for event in schedule} == set(chaos.EVENTS)
    assert {event.kind for event in chaos.draw_schedule(3, 60, ["stop"])} == {"stop"}
    assert chaos.draw_schedule(3, 60, []) == []


def test_the_wall_clock_jumps_and_the_other_does_not(tmp_path):
    script = (
        "import pathlib, sys, time, chaos_clock\n"
        "before, steady = time.time(), time.monotonic()\n"
        "chaos_clock.wrap(pathlib.Path(sys.argv[1]))\n"
        "print(round(time.time() - before, -2), round(time.time_ns() / 1e9 - before, -2))\n"
        "print(time.monotonic() - steady < 60)\n"
        "chaos_clock.write(pathlib.Path(sys.argv[1]), -7200.0)\n"
        "print(round(time.time() - before, -2))\n"
    )
    chaos_clock.write(tmp_path / "clock", 3600.0)
    command = [sys.executable, "-c", script, str(tmp_path / "clock")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "benchmarks")
    assert ran.stdout.split() == ["3600.0", "3600.0", "True", "-7200.0"]


def test_files_are_damaged(tmp_path):
    import random

    class Server(ServerProcess):
        def __init__(self):
            self.cache = tmp_path

    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"0123456789" * 20)
    ways = Server().damage_cache(random.Random(1), 20)
    assert set(ways) == {"truncated", "random", "empty", "changed"}
    assert all(path.read_bytes() != b"0123456789" * 20 for path in tmp_path.iterdir())


@pytest.mark.slow
def test_twenty_seconds_of_chaos(tmp_path):
    """On the real server. It takes one to three minutes: the server starts two or three times."""
    path = tmp_path / "chaos.json"
    command = [
        sys.executable, str(ROOT / "benchmarks/chaos.py"), "--minutes", "0.34", "--seed", "8", "--output", str(path),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ran.returncode == 0, ran.stdout[-3_000:] + ran.stderr[-3_000:]
    figures = json.loads(path.read_text())
    assert figures["findings"] == []
    assert figures["outcomes"]["right"] > 20
    assert figures["wrong_streams"] == figures["leaked_blocks"] == 0
    assert sum(figures["events"].values()) >= 2
