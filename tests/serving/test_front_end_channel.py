"""Frames, channels and questions between the engine's process and a front end."""

import asyncio
import contextlib
import dataclasses
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jpaged import SamplingParams
from jpaged.engine.engine import StepError
from jpaged.engine.scheduling.admission import QueueFull
from jpaged.errors import (
    CapacityError,
    EngineError,
    JPagedError,
    LogitsError,
    ModelLoadError,
    NoWeightsError,
    RequestError,
)
from jpaged.frontend.remote import channel as channel_module
from jpaged.frontend.remote.channel import Channel
from jpaged.frontend.remote.messages import (
    HEAD,
    MESSAGE,
    TOKENS,
    Abort,
    Answer,
    Begin,
    Call,
    FrameReader,
    Stop,
    frame,
    message_of_engine,
    message_of_front_end,
    portable,
    token_frame,
    tokens_of,
)
from jpaged.frontend.remote.questions import Questions, answer_questions
from jpaged.lora.request import LoRARequest
from jpaged.params.pooling import PoolingParams

FRAMES = [token_frame([1, 1, 2], [7, 8, 9]), frame(Abort(3)), frame(Stop(4, 0, 5)), token_frame([], [])]
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
with contextlib.suppress(ImportError):
    import uvloop

    LOOPS.append(uvloop.new_event_loop)


def read(*pieces: bytes) -> list[Any]:
    """Messages and tokens of pieces of a stream."""
    reader = FrameReader()
    found = []
    for piece in pieces:
        for kind, content in reader.feed(piece):
            found.append(message_of_front_end(content) if kind == MESSAGE else tuple(map(list, tokens_of(content))))
    assert reader.rest() == b""
    return found


def test_frames_that_are_cut_anywhere() -> None:
    whole = b"".join(FRAMES)
    wanted = [([1, 1, 2], [7, 8, 9]), Abort(3), Stop(4, 0, 5), ([], [])]
    assert read(whole) == wanted
    assert read(*(bytes([byte]) for byte in whole)) == wanted
    for first in range(len(whole)):
        assert read(whole[:first], whole[first:]) == wanted
        reader = FrameReader()
        list(reader.feed(whole[:first]))
        assert whole[:first].endswith(reader.rest())


def test_a_caller_that_stops_early_gets_the_other_frames_later() -> None:
    """Else the front end would read all answers to its questions again and again."""
    reader = FrameReader()
    for _ in reader.feed(b"".join(FRAMES)):
        break
    assert [kind for kind, _ in reader.feed(b"")] == [MESSAGE, MESSAGE, TOKENS]
    assert reader.rest() == b""


def test_a_frame_of_a_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of 4,294,967,295 bytes"):
        list(FrameReader().feed(HEAD.pack(2**32 - 1, MESSAGE)))


PARAMS = SamplingParams(
    structured_outputs={"regex": "a+"}, reasoning_tags=("<a>", "</a>"), logit_bias={3: 1.0}, stop=["a"],
    repetition_detection={"max_pattern_size": 3, "min_count": 2},
)  # fmt: skip
PROMPT = {"prompt_token_ids": [1, 2], "cache_salt": "a", "prediction": [3]}


@pytest.mark.parametrize(
    "message",
    [
        Begin(1, "a", True, PROMPT, PARAMS, "client", 3, True, LoRARequest("a", 1, "/a")),
        Begin(1, "a", False, PROMPT, PoolingParams(task="embed"), "client"), Abort(1), Stop(1, 2, 3),
        Call(1, "sleep", (1,), {"mode": "abort"}),
    ],
)  # fmt: skip
def test_what_a_front_end_sends(message: Any) -> None:
    assert message_of_front_end(frame(message)[HEAD.size :]) == message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFull("max_queued_requests", "8 wait"), CapacityError), (NoWeightsError("none"), NoWeightsError),
        (RequestError("n", 0, "must be 1"), RequestError), (LogitsError(), EngineError),
        (ModelLoadError("broken"), ModelLoadError),
    ],
)  # fmt: skip
def test_errors_cross_with_their_kind(error: JPagedError, kind: type[JPagedError]) -> None:
    """A full queue was an error of the server (500)."""
    found = message_of_engine(frame(Answer(1, error=portable(error)))[HEAD.size :]).error
    assert type(found) is kind
    assert str(found) == str(error)
    assert getattr(found, "retry_after", None) == getattr(error, "retry_after", None)


def test_a_step_that_failed_without_weights_crosses_as_its_cause() -> None:
    """The server answers with 503."""
    error = StepError(("a",), NoWeightsError("deleted"))
    error.__cause__ = NoWeightsError("deleted")
    assert (type(portable(error)), str(portable(error))) == (NoWeightsError, "deleted")


class Runs:
    """A pickle of it calls `os.system`."""

    def __reduce__(self) -> Any:
        return os.system, ("echo taken over",)


@pytest.mark.parametrize(
    "sent",
    [
        Runs(), Begin(1, "a", True, {"prompt": Runs()}, PARAMS, ""), Call(1, "stats", (Runs(),)), EngineError("a"),
        Answer(1), pickle.loads, os.system, getattr, eval, RequestError, print,
    ],
)  # fmt: skip
def test_the_engine_reads_nothing_else(sent: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match="a front end may not send"):
        message_of_front_end(pickle.dumps(sent))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["Begin.__init__", "dataclasses.replace", "pickle.loads", "struct.pack"])
def test_names_within_an_allowed_module_are_refused(name: str) -> None:
    """The modules of the messages import others: their names must not be reached."""
    module = b"jpaged.frontend.remote.messages"
    stream = b"\x80\x04" + b"\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name.encode()
    with pytest.raises(pickle.UnpicklingError, match="a front end may not send"):
        message_of_front_end(stream + b"\x93.")


@dataclasses.dataclass
class Side:
    """A channel, and the frames that it has received."""

    sock: socket.socket

    def __post_init__(self) -> None:
        self.received: list[bytes] = []
        self.num_ended = 0
        self.channel = Channel(self.sock, lambda kind, content: self.received.append(content), self.end)

    def end(self) -> None:
        """Count."""
        self.num_ended += 1

    async def until(self, condition: Callable[["Side"], bool]) -> None:
        """Wait for the other side."""
        async with asyncio.timeout(10):
            while not condition(self):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def raw(content: bytes) -> bytes:
    return HEAD.pack(len(content), MESSAGE) + content


async def connected() -> tuple[Side, Side]:
    sides = tuple(map(Side, socket.socketpair()))
    for side in sides:
        await side.channel.open()
    return sides[0], sides[1]


@pytest.fixture(params=LOOPS, ids=lambda make: make.__module__)
def run(request: pytest.FixtureRequest) -> Any:
    """Runs a coroutine on asyncio's event loop, and on that of the server."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


def test_large_and_small_frames_arrive_in_order_both_ways(run: Any) -> None:
    """Frames larger than the socket's buffer are sent in parts, from several threads."""
    rng = random.Random(0)
    sent = [[rng.randbytes(rng.choice([1, 100, 300_000, 900_000])) for _ in range(8)] for _ in range(2)]

    async def main() -> None:
        first, second = sides = await connected()
        sending = []
        for side, contents in zip(sides, sent, strict=True):
            def send(side: Side = side, contents: list[bytes] = contents) -> None:
                for content in contents:
                    side.channel.send(raw(content))

            sending.append(asyncio.to_thread(send))
        await asyncio.gather(*sending)
        await second.until(lambda side: len(side.received) == 8)
        await first.until(lambda side: len(side.received) == 8)
        assert (second.received, first.received) == (sent[0], sent[1])
        first.channel.close()
        await second.until(lambda side: side.num_ended)
        assert (first.num_ended, second.num_ended) == (1, 1)

    run(main())


def test_what_is_sent_before_the_other_side_reads_arrives(run: Any) -> None:
    async def main() -> None:
        first, second = map(Side, socket.socketpair())
        content = os.urandom(5_000_000)  # as the welcome, with a large tokeniser
        first.channel.send(raw(content))
        first.channel.send(raw(b"later"))
        await second.channel.open()
        await first.channel.open()
        await second.until(lambda side: len(side.received) == 2)
        assert second.received == [content, b"later"]
        second.channel.close()
        await first.until(lambda side: side.num_ended == 1)

    run(main())


def test_a_side_that_does_not_read_is_cut_off(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT", 2**20)

    async def main() -> None:
        sock, other = socket.socketpair()
        side = Side(sock)
        await side.channel.open()
        sent = 0
        while side.channel.is_open:
            side.channel.send(raw(b"a" * 10_000))
            sent += 10_000
        assert 2**20 < sent < 3 * 2**20
        with pytest.raises(RuntimeError, match="the other process is gone"):
            side.channel.send(raw(b"a"))
        assert not side.channel.is_open
        await side.until(lambda side: side.num_ended == 1)
        with pytest.raises(RuntimeError):
            side.channel.send(raw(b"a"))
        other.settimeout(5)

        def read() -> None:
            while other.recv(2**20):  # then the connection has ended
                pass

        with other:
            await asyncio.to_thread(read)  # meanwhile the event loop closes the connection
        await asyncio.sleep(0.01)
        assert side.num_ended == 1

    run(main())


def test_a_slow_reader_is_not_cut_off(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT", 2**20)

    async def main() -> None:
        sock, other = socket.socketpair()
        other.setblocking(False)
        side, found = Side(sock), 0
        await side.channel.open()
        for _ in range(40):
            side.channel.send(raw(b"a" * 100_000))
            with contextlib.suppress(BlockingIOError):
                while piece := other.recv(2**20):
                    found += len(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        while found < 40 * (100_000 + HEAD.size):
            with contextlib.suppress(BlockingIOError):
                found += len(other.recv(2**20))
            await asyncio.sleep(0.001)
        assert side.channel.is_open
        side.channel.close()
        other.close()

    run(main())


@pytest.mark.parametrize("content", [HEAD.pack(2**31, MESSAGE), raw(b"not read")])
def test_a_side_that_sends_nonsense_is_cut_off(run: Any, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        sock, other = socket.socketpair()
        side = Side(sock)
        side.channel = Channel(sock, lambda kind, content: message_of_front_end(content), side.end)
        await side.channel.open()
        other.sendall(content)
        await side.until(lambda side: side.num_ended == 1)
        other.settimeout(5)
        assert other.recv(1) == b""
        other.close()

    run(main())
    assert "is cut off" in caplog.text


class Slow:
    """An engine that answers late, or not at all."""

    def __init__(self) -> None:
        self.wait = threading.Event()
        self.weight_version = 7

    def stats(self) -> str:
        assert self.wait.wait(10)
        return "stats"

    def metrics(self, engine: int) -> Any:
        if engine > 1:
            raise ValueError("no such engine")
        raise RequestError("engine", engine, "must be 0")


@pytest.fixture
def asked() -> Any:
    """An engine, and the questions of a front end."""
    here, there = socket.socketpair()
    engine = Slow()
    answer_questions(engine, there)  # type: ignore[arg-type]
    questions = Questions(here)
    yield engine, questions
    engine.wait.set()
    questions.close()


def test_questions(asked: Any) -> None:
    engine, questions = asked
    for _ in range(200):
        assert questions.ask("weight_version") == 7
    assert questions._frames.rest() == b""
    engine.wait.set()
    assert questions.ask("stats") == "stats"
    with pytest.raises(RequestError, match="must be 0"):
        questions.ask("metrics", 1)
    with pytest.raises(EngineError, match="metrics: ValueError: no such engine"):
        questions.ask("metrics", 2)
    with pytest.raises(EngineError, match="may not ask for close"):
        questions.ask("close")


def test_a_late_answer_is_not_that_of_the_next_question(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, questions = asked
    questions._sock.settimeout(0.05)
    with pytest.raises(EngineError, match=r"the engine's process does not answer \(stats: timed out\)"):
        questions.ask("stats")
    engine.wait.set()
    time.sleep(0.02)
    assert questions.ask("weight_version") == 7
    assert questions.ask("stats") == "stats"


def test_questions_to_a_process_that_is_gone() -> None:
    here, there = socket.socketpair()
    questions = Questions(here)
    there.close()
    with pytest.raises(EngineError, match="does not answer"):
        questions.ask("weight_version")
    questions.close()
    with pytest.raises(EngineError, match="does not answer"):
        questions.ask("weight_version")


def test_many_threads_ask_at_once(asked: Any) -> None:
    engine, questions = asked
    engine.wait.set()
    found: list[bool] = []

    def ask(number: int) -> None:
        name, wanted = (("weight_version", 7), ("stats", "stats"))[number % 2]
        found.extend(questions.ask(name) == wanted for _ in range(50))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [True] * 400
