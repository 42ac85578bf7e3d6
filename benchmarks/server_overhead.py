"""Overhead of the HTTP server alone: streamed tokens per second, processor time a token, and the first byte.

    python benchmarks/server_overhead.py [--streams 64] [--tokens 2000] [--rates 10000 25000 50000]

The engine is a mock: it makes tokens for all streams at each rate, and computes nothing. Like the real engine, it runs
in a thread of the server's process, which has one core. The client of `jpaged bench serve` runs on another core. A
token that is not sent before the next one exists shares an event with it. While the streams run, other requests arrive
one at a time. The first byte is measured on these requests, and the mock makes their first token at once.
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
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvicorn

from jpaged.cli.common.results import machine
from jpaged.frontend.output_stream import OutputStream, put_all
from jpaged.load_client.backends import BACKENDS, LoadRequest
from jpaged.load_client.connection import Endpoint
from jpaged.load_client.run import Target, send_all
from jpaged.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from jpaged.params.sampling import SamplingParams
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from jpaged.serving.web.connection import bounded_connection

NUM_PROBES = 40


@dataclasses.dataclass
class _Answer:
    """One running answer."""

    stream: OutputStream
    count: int          # tokens to make
    made: int = 0

    def next_output(self) -> RequestOutput:
        """Make a token. Returns the new part of the answer, as the engine does for a stream."""
        self.made += 1
        done = "length" if self.made >= self.count else None
        output = CompletionOutput(0, " abc", [7], None, None, done)
        return RequestOutput("mock", None, [1], [output], done is not None, RequestMetrics(0.0))


class MockEngine:
    """Makes a token for every running answer in each step. The steps follow a rate of tokens per second."""

    default_sampling_params = SamplingParams()
    max_model_len = 10**6
    is_ready = True

    def __init__(self, tokens_per_second: float):
        self._rate = tokens_per_second
        self._answers: dict[str, _Answer] = {}
        self._thread: threading.Thread | None = None

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        stream = OutputStream(loop, deltas=True)
        answer = _Answer(stream, sampling_params.max_tokens or 16)
        stream.put(answer.next_output())
        self._answers[request_id] = answer
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
            self._thread.start()
        try:
            while True:
                output = await stream.get()
                assert isinstance(output, RequestOutput)
                yield output
                if output.finished:
                    return
        finally:
            self._answers.pop(request_id, None)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        due = time.perf_counter()
        while True:
            now = time.perf_counter()
            due = max(due, now - 0.1)
            while due <= now:  # several steps, if the server held Python's lock: a device would not wait
                running = [answer for answer in self._answers.copy().values() if answer.made < answer.count]
                if running:
                    loop.call_soon_threadsafe(put_all, [(answer.stream, answer.next_output()) for answer in running])
                due += max(len(running), 1) / self._rate
            time.sleep(max(due - time.perf_counter(), 0))

    def stats(self) -> EngineStats:
        return EngineStats(1, 16, 0, 0, len(self._answers), 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)

    num_engines = 1

    def metrics(self, engine: int = 0) -> None:
        """None: the mock has no metrics."""

    def get_tokenizer(self) -> None:
        """None: prompts are token ids."""

    def close(self) -> None:
        """Do nothing."""


def serve(connection: Any, rate: float, core: int | None) -> None:
    """Serve until the process is killed. Answers each message on `connection` with the processor seconds so far."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    app = create_app(Server(engine=MockEngine(rate), model_names=("mock",)))  # ty: ignore[invalid-argument-type]
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
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, rate, cores[0]), daemon=True)
    server.start()
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
    server.kill()
    server.join()
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
