"""CPU time of the load client for one event of a stream, next to httpx.

    python benchmarks/load_client.py [--rounds 5]

A child process streams 256 events to each of 64 connections, without a model. Both clients parse each event as JSON.
They take turns; the table has the medians.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

from jpaged.cli.results import machine
from jpaged.load_client.backends import BACKENDS, LoadRequest
from jpaged.load_client.connection import Endpoint
from jpaged.load_client.run import Target, send_all

STREAMS, EVENTS, SECONDS_A_STEP = 64, 256, 0.002
CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" a"}]}\n\n'


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(EVENTS):
                writer.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
                await asyncio.sleep(SECONDS_A_STEP)
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    except asyncio.IncompleteReadError:
        writer.close()


def serve(port: Any) -> None:
    """Serve until the process is ended. Sends its port to the parent."""

    async def run() -> None:
        server = await asyncio.start_server(_stream, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def with_ours(url: str) -> int:
    """Receive all events with the load client."""
    target = Target(endpoint=Endpoint.parse(url), backend=BACKENDS["openai"], model="m")
    run = await send_all(target, [LoadRequest("a", 1)] * STREAMS, [0.0] * STREAMS)
    return sum(answer.num_events for answer in run.answers)


async def with_httpx(url: str) -> int:
    """Receive all events with httpx."""

    async def one(client: httpx.AsyncClient) -> int:
        count = 0
        async with client.stream("POST", url, json={"prompt": "a"}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data:") and not line.endswith("[DONE]"):
                    count += len(json.loads(line[5:])["choices"])
        return count

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(STREAMS))))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each client (default: %(default)s)")
    rounds = parser.parse_args().rounds
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}/v1/completions"
    clients: dict[str, Callable[[str], Any]] = {"jpaged": with_ours, "httpx": with_httpx}
    times: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name, receive in clients.items():
            start = time.process_time()
            assert asyncio.run(receive(url)) == STREAMS * EVENTS
            times[name].append((time.process_time() - start) / (STREAMS * EVENTS) * 1e6)
    server.kill()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for name, values in times.items():
        print(f"{name:8} {statistics.median(values):6.1f} us of CPU an event  ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
