"""Overhead of a front end alone: streamed tokens per second, processor time a token, and the first byte.

    python benchmarks/server_overhead.py [--streams 64] [--tokens 2000] [--rates 10000 25000 50000]

In place of the engine's process there is a source of tokens. It makes tokens for all streams at each rate, and computes
nothing. It sends one message a step, as the engine does. The front end has one core. The client of `jpaged bench
serve` and the source run on another core. A token that is not sent before the next one exists shares an event with it.
While the streams run, other requests arrive one at a time. The first byte is measured on these requests.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import os
import resource
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any, cast

import uvicorn

import jpaged
from jpaged.cli.common.results import machine
from jpaged.config import EngineConfig
from jpaged.engine.input.model_limits import ModelLimits
from jpaged.frontend.remote.messages import (
    Abort,
    Begin,
    FrameReader,
    Results,
    frame,
    message_of_front_end,
    token_frame,
)
from jpaged.frontend.remote.questions import answer_questions
from jpaged.frontend.remote.remote_engine import RemoteEngine
from jpaged.frontend.remote.welcome import Welcome
from jpaged.load_client.backends import BACKENDS, LoadRequest
from jpaged.load_client.connection import Endpoint
from jpaged.load_client.run import Target, send_all
from jpaged.loading.tokenizer import load_tokenizer
from jpaged.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from jpaged.params.sampling import SamplingParams
from jpaged.serving.application import create_app
from jpaged.serving.front_end import connect_first
from jpaged.serving.server_state import Server
from jpaged.serving.web.connection import bounded_connection

NUM_PROBES = 40


@dataclasses.dataclass
class _Answer:
    """One running answer."""

    count: int          # tokens to make
    made: int = 0


class Source:
    """Stands in for the engine's process: makes a token for every running answer in each step, and one message a step.

    The steps follow a rate of tokens per second.
    """

    def __init__(self, channel: socket.socket, questions: socket.socket, tokens_per_second: float):
        self._channel, self._rate = channel, tokens_per_second
        self._answers: dict[int, _Answer] = {}
        self._lock = threading.Lock()
        answer_questions(cast(Any, self), questions)
        tokenizer = load_tokenizer(Path(jpaged.__file__).parent / "demo_model")
        assert tokenizer is not None
        limits = ModelLimits(vocab_size=len(tokenizer), max_model_len=10**6, max_logprobs=20)
        self._channel.sendall(
            frame(Welcome(EngineConfig(model="demo"), limits, tokenizer, SamplingParams(), 256, 1, None, False))
        )

    is_ready = True

    def stats(self) -> EngineStats:
        """Nothing has run."""
        return EngineStats(1, 16, 0, 0, len(self._answers), 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)

    def metrics(self, engine: int = 0) -> None:
        """None: there are no metrics."""

    def run(self) -> None:
        """Make tokens until the process is killed."""
        threading.Thread(target=self._read, daemon=True).start()
        due = time.perf_counter()
        while True:
            now = time.perf_counter()
            due = max(due, now - 0.1)
            while due <= now:
                due += max(self._step(), 1) / self._rate
            time.sleep(max(due - time.perf_counter(), 0))

    def _step(self) -> int:
        """Make one token of each answer. Returns their number."""
        with self._lock:
            running = list(self._answers.items())
            ended = [number for number, answer in running if answer.made + 1 == answer.count]
            for number in ended:
                del self._answers[number]
        ids = [100 + number % 200 for number, _ in running]
        data = b""
        if len(ended) < len(running):
            pairs = [(number, token_id) for (number, _), token_id in zip(running, ids, strict=True)]
            pairs = [pair for pair in pairs if pair[0] not in ended]
            data = token_frame([number for number, _ in pairs], [token_id for _, token_id in pairs])
        if ended:
            data += frame(Results(tuple((number, _last(100 + number % 200)) for number in ended)))
        for _, answer in running:
            answer.made += 1
        if data:
            self._channel.sendall(data)
        return len(running)

    def _read(self) -> None:
        frames = FrameReader()
        while data := self._channel.recv(2**16):
            for _, content in frames.feed(data):
                message = message_of_front_end(content)
                with self._lock:
                    if isinstance(message, Begin):
                        assert isinstance(message.params, SamplingParams)
                        self._answers[message.number] = _Answer(message.params.max_tokens or 16)
                    elif isinstance(message, Abort):
                        self._answers.pop(message.number, None)


def _last(token_id: int) -> RequestOutput:
    output = CompletionOutput(0, "", [token_id], None, None, "length")
    return RequestOutput("mock", None, [1], [output], True, RequestMetrics(0.0))


def make_tokens(channel: socket.socket, questions: socket.socket, rate: float, core: int | None) -> None:
    """Run a source of tokens until the process is killed. On the client's core: the front end has its own."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    Source(channel, questions, rate).run()


def serve(connection: Any, channel: socket.socket, questions: socket.socket, core: int | None) -> None:
    """Serve until the process is killed. Answers each message on `connection` with the processor seconds so far."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    engine = RemoteEngine(channel, questions)
    app = create_app(Server(engine=engine, model_names=("mock",)))
    connect_first(app, engine)
    with socket.create_server(("127.0.0.1", 0)) as address:
        config = uvicorn.Config(app, http=bounded_connection(), log_level="warning", access_log=False, ws="none")
        server = uvicorn.Server(config)
        connection.send(address.getsockname()[1])

        async def run() -> None:
            asyncio.get_running_loop().add_reader(connection.fileno(), tell)
            await server.serve(sockets=[address])

        def tell() -> None:
            connection.recv()
            used = resource.getrusage(resource.RUSAGE_SELF)
            connection.send(used.ru_utime + used.ru_stime)

        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(run())


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of one rate."""

    asked: float            # tokens per second that the engine makes
    received: float         # tokens per second that the client received
    processor: float        # microseconds of the server's processor time a token
    share: float            # busy share of the server's core
    tokens_an_event: float
    first: list[float]      # milliseconds from a request to its first event, while the streams run


def measure(rate: float, streams: int, tokens: int, cores: list[int | None]) -> Row:
    """Measure one rate, with a new server."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn").Process
    channels, questions = socket.socketpair(), socket.socketpair()
    server = spawn(target=serve, args=(theirs, channels[0], questions[0], cores[0]), daemon=True)
    source = spawn(target=make_tokens, args=(channels[1], questions[1], rate, cores[1]), daemon=True)
    server.start()
    source.start()
    if cores[1] is not None:
        os.sched_setaffinity(0, {cores[1]})
    endpoint = Endpoint.parse(f"http://127.0.0.1:{ours.recv()}/v1/completions")
    target = Target(endpoint=endpoint, backend=BACKENDS["openai"], model="mock", fields={"ignore_eos": True})

    def processor_seconds() -> float:
        ours.send("?")
        return ours.recv()

    asyncio.run(send_all(target, [LoadRequest([1], 20)] * streams, [0.0] * streams))  # warm-up
    before = processor_seconds()
    seconds = streams * tokens / rate  # if the server keeps up
    later = [seconds * (0.2 + 0.6 * place / NUM_PROBES) for place in range(NUM_PROBES)]
    requests = [LoadRequest([1], tokens)] * streams + [LoadRequest([1], 1)] * NUM_PROBES
    run = asyncio.run(send_all(target, requests, [0.0] * streams + later))
    used = processor_seconds() - before
    for process in (server, source):
        process.kill()
        process.join()
    for answer, request in zip(run.answers, requests, strict=True):
        assert answer.error is None, answer.error
        assert answer.num_output_tokens == request.output_len
    total, events = streams * tokens + NUM_PROBES, sum(answer.num_events for answer in run.answers)
    first = [1e3 * answer.first for answer in run.answers[streams:] if answer.first is not None]
    return Row(rate, total / run.seconds, 1e6 * used / total, used / run.seconds, total / events, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="streams at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each stream (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[5_000, 10_000, 20_000, 50_000, 100_000])
    parser.add_argument("--output", type=Path, help="file for the measurements as JSON")
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    cores: list[int | None] = [available[0], available[1]] if len(available) > 1 else [None, None]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{args.streams} streams of {args.tokens} tokens; server and client on one core each\n")
    head = ("tokens/s made", "received", "us a token", "core busy", "tokens an event", "first byte ms", "p99")
    print("".join(f"{name:>16}" for name in head))
    rows = []
    for rate in args.rates:
        row = measure(rate, args.streams, args.tokens, cores)
        p99 = sorted(row.first)[int(len(row.first) * 0.99)]
        print(
            f"{row.asked:>16,.0f}{row.received:>16,.0f}{row.processor:>16.1f}{row.share:>16.0%}"
            f"{row.tokens_an_event:>16.1f}{statistics.median(row.first):>16.1f}{p99:>16.1f}"
        )
        rows.append(dataclasses.asdict(row))
    if args.output:
        facts = {"machine": machine(), "streams": args.streams, "tokens": args.tokens, "rows": rows}
        args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
