"""Attack a server: hostile requests while 16 streams run, or thousands of drawn requests. Linux only.

    python tools/attack.py hundred --output benchmarks/results/hostile_requests.json
    python tools/attack.py drawn --count 6000 --output benchmarks/results/drawn_requests.json

`hundred` sends each hostile request of the tests in turn, then ten hostile connections. It reports the longest wait of
/health with and without them, and the memory that each request adds to the server and its child processes.

`drawn` draws requests from a seed: fields with unusual values, damaged JSON, and damaged connections. It reports each
answer with a fault (`fault_of`), such as a server error, an error without OpenAI's fields, or a late error.

Both start `jpaged serve demo`, and check that every stream returns the same text as without other requests.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drawn_requests import (
    CHAT,
    COMPLETIONS,
    HEAD,
    PROMPT,
    SECONDS,
    ask,
    drawn_request,
    fault_of,
    good_bodies,
    raw,
    sent,
)
from rich.progress import Progress

from jpaged.cli.common.results import machine

NUM_STREAMS = 16
OPTIONS = [
    "--max-model-len", "512", "--max-num-seqs", "32", "--row-buckets", "32", "--token-buckets", "64",
    "--max-num-batched-tokens", "64",
]  # fmt: skip
MAX_STALL = 0.1  # seconds that hostile requests may add to the longest wait of /health
BODY_FACTOR, BODY_ROOM = 10, 2**20  # memory that a request may add: 10 times its body plus 1 MB


# -- the server, its health and its memory ------------------------------------------------------------------------


@contextlib.contextmanager
def serving(options: Sequence[str], model: str = "demo") -> Iterator[tuple[subprocess.Popen, int]]:
    """Start `jpaged serve`. Yields the process and its port. Exits if SIGTERM does not end it with status 0."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "jpaged", "serve", model, "--port", str(port), *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, port, log)
            yield process, port
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=60)
            log.seek(0)
            text = log.read().decode(errors="replace")
            if status != 0 or "Traceback" in text:
                print(text[-5_000:])
                sys.exit(f"the server ended with status {status}")
        finally:
            process.kill()


def wait_until_ready(process: subprocess.Popen, port: int, log: Any) -> None:
    """Return when /health answers 200."""
    for _ in range(1_200):
        with contextlib.suppress(OSError):
            if ask(port, "GET", "/health")[0] == 200:
                return
        if process.poll() is not None:
            log.seek(0)
            sys.exit(log.read().decode(errors="replace"))
        time.sleep(0.1)
    sys.exit("the server does not become ready")


def watch_health(port: int, stop: Any, results: Any) -> None:
    """Ask /health every 10 ms until `stop`. Puts a list of (time, seconds waited) into `results`."""
    waits = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while not stop.is_set():
            start = time.monotonic()
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert connection.recv(4_096).startswith(b"HTTP/1.1 200")
            waits.append((start, time.monotonic() - start))
            time.sleep(0.01)
    results.put(waits)


def watch_memory(pid: int, stop: Any, results: Any) -> None:
    """Put a list of (time, `resident(pid)`), sampled every 5 ms until `stop`, into `results`."""
    samples = []
    while not stop.is_set():
        samples.append((time.monotonic(), resident(pid)))
        time.sleep(0.005)
    results.put(samples)


def resident(pid: int) -> int:
    """Resident bytes of a process and its child processes."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    pids = [pid]
    while pids:
        each = pids.pop()
        with contextlib.suppress(OSError, ValueError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * page
            pids += children(each)
    return total


def children(pid: int) -> list[int]:
    """Child processes of a process. A thread that ends meanwhile is left out."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def warm_up(port: int) -> None:
    """Make the server start its child processes. They keep their memory, so that later requests do not add it."""
    for size in (300_000, 3_000_000):
        ask(port, "POST", COMPLETIONS, b'{"prompt":"' + b"a" * size + b'"}')
    for bodies in good_bodies().values():
        for body in bodies:
            path = CHAT if "messages" in body else COMPLETIONS
            ask(port, "POST", path, json.dumps(body | {"max_tokens": 2}).encode())


class Watch:
    """A process that runs `target(*args, stop event, result queue)` until `stop`."""

    def __init__(self, target: Callable[..., None], *args: Any):
        context = multiprocessing.get_context("spawn")
        self._stop, self._results = context.Event(), context.Queue()
        self._process = context.Process(target=target, args=(*args, self._stop, self._results), daemon=True)
        self._process.start()

    def stop(self) -> Any:
        """End the process and return its result."""
        self._stop.set()
        samples = self._results.get(timeout=30)
        self._process.join()
        return samples


# -- the streams --------------------------------------------------------------------------------------------------


def stream_body(number: int) -> dict[str, Any]:
    """Body of a stream. `number % 4` chooses greedy, JSON, log-probabilities or penalties."""
    schema = {
        "type": "object", "required": ["name", "size"], "additionalProperties": False,
        "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    }  # fmt: skip
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "ignore_eos": True},
        {"structured_outputs": {"json": schema}},
        {"logprobs": 2, "top_p": 0.9, "min_tokens": 30},
        {"frequency_penalty": 0.5, "min_p": 0.01, "stop": ["zebra"]},
    ]
    prompt = f"{PROMPT}    x = {number}\n"
    return {"prompt": prompt, "max_tokens": 120, "seed": number, "stream": True} | kinds[number % 4]


def streamed(port: int, number: int, headers: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str | None]:
    """Run a stream to its end. Returns its text and finish reason. headers: additional headers, such as keys."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    sent_headers = {"content-type": "application/json", **headers}
    connection.request("POST", COMPLETIONS, json.dumps(stream_body(number)), sent_headers)
    answer, text, reason, done = connection.getresponse(), "", None, False
    for line in answer:
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"] or reason
        done = done or line.startswith(b"data: [DONE]")
    connection.close()
    return text, reason if done else "no [DONE]"


def run_streams(port: int, count: int, wanted: list[tuple[str, str | None]], stop: Any, results: Any) -> None:
    """Repeat streams until `stop`. Puts (ended runs of each stream, runs that differ from `wanted`) into `results`."""
    ended, wrong = [0] * count, []

    def run(number: int) -> None:
        while not stop.is_set():
            try:
                got = streamed(port, number)
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                got = (repr(error), None)
            ended[number] += 1
            if got != wanted[number]:
                wrong.append([number, *got])

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))
    results.put((ended, wrong))


# -- hostile requests ---------------------------------------------------------------------------------------------


def hostile_bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, path, body): the hostile bodies of the tests, then four bodies of 12 MB."""
    from tests.serving import hostile_bodies as bodies

    for name, (begin, rest, _) in (bodies.FAST | bodies.many_bodies()).items():
        body = begin + rest()
        yield name, bodies.path_of(body), body
    for fields in bodies.REFUSED_FIELDS:
        name = ", ".join(fields)
        yield name, COMPLETIONS, json.dumps({"prompt": PROMPT, "max_tokens": 8} | fields).encode()
    for number, tool in enumerate(bodies.REFUSED_TOOLS):
        chat = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
        yield f"tool {number}", CHAT, json.dumps(chat | {"max_tokens": 8}).encode()
    words = "a line of code, and another one;\n"
    text = words * (12_000_000 // len(words))
    talk = [{"role": "user", "content": text}]
    yield "12 MB that are truncated", COMPLETIONS, json.dumps({"prompt": text, "truncate_prompt_tokens": 9}).encode()
    yield "12 MB of chat", CHAT, json.dumps({"messages": talk, "truncate_prompt_tokens": 9}).encode()
    yield "blanks", COMPLETIONS, json.dumps({"prompt": " " * 12_000_000, "truncate_prompt_tokens": 9}).encode()
    yield "one word", COMPLETIONS, json.dumps({"prompt": "a" * 12_000_000, "truncate_prompt_tokens": 9}).encode()


def idle_connections(port: int) -> bytes:
    """Open 1,100 connections that send nothing for two seconds. One address may have 1,024."""
    with contextlib.ExitStack() as stack:
        for _ in range(1_100):
            # Not the address of the streams: they must still be able to connect.
            connection = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
            stack.enter_context(connection)
        time.sleep(2)
    return b"HTTP/1.1 0"


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
CONNECTIONS: dict[str, Callable[[int], bytes]] = {
    "header of 30 MB": lambda port: raw(port, HEAD + b"a: " + b"b" * 30_000_000),
    "header in bytes": lambda port: raw(port, HEAD + b"a: " + b"b" * 3_000, piece=1, pause=0.001),
    "a million headers": lambda port: raw(port, HEAD + b"a: b\r\n" * 1_000_000),
    "target of 30 MB": lambda port: raw(port, b"GET /" + b"a" * 30_000_000),
    "chunks of one byte": lambda port: raw(port, CHUNKED + b"1\r\na\r\n" * 1_000_000 + b"0\r\n\r\n"),
    "chunk extension": lambda port: raw(port, CHUNKED + b"1;" + b"a" * 30_000_000),
    "endless trailer": lambda port: raw(port, CHUNKED + b"1\r\na\r\n0\r\n" + b"a: b\r\n" * 1_000_000),
    "pipelined requests": lambda port: raw(port, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 20_000),
    "body of 1 GB announced": lambda port: raw(port, HEAD + b"content-length: 1000000000\r\n\r\n" + b"a" * 2**20),
    "1,100 connections": idle_connections,
}


def hundred(output: Path, flags: Sequence[str] = ()) -> None:
    """Send the hostile requests while the streams run, and write the measurements."""
    with serving([*OPTIONS, *flags]) as (process, port):
        wanted = [streamed(port, number) for number in range(NUM_STREAMS)]
        requests = list(hostile_bodies())
        actions: list[tuple[str, int, Callable[[], tuple[int, bytes]]]] = [
            (name, len(body), lambda path=path, body=body: ask(port, "POST", path, body))
            for name, path, body in requests
        ]
        actions += [(name, 0, lambda act=act: _status(act(port))) for name, act in CONNECTIONS.items()]
        warm_up(port)
        health, memory = Watch(watch_health, port), Watch(watch_memory, process.pid)
        streams = Watch(run_streams, port, NUM_STREAMS, wanted)
        time.sleep(5)
        quiet = (time.monotonic(), time.monotonic() + 30)
        time.sleep(30)
        spans = []
        with Progress() as progress:
            for name, size, act in progress.track(actions, description="hostile requests"):
                start = time.monotonic()
                try:
                    status, answer = act()
                except (OSError, http.client.HTTPException) as error:
                    status, answer = 0, repr(error).encode()
                spans.append((name, size, start, time.monotonic(), status, answer[:200].decode(errors="replace")))
                time.sleep(0.3)
        ended, wrong = streams.stop()
        waits, samples = health.stop(), memory.stop()
    without = sorted(wait for at, wait in waits if quiet[0] <= at < quiet[1])
    rows: list[dict[str, Any]] = []
    for name, size, start, end, status, answer in spans:
        before = [used for at, used in samples if start - 0.15 <= at < start]
        during = [used for at, used in samples if start <= at <= end + 0.2]
        longest = max(wait for at, wait in waits if start - 1 <= at <= end + 0.2 and at + wait >= start)
        rows.append({
            "name": name, "bytes": size, "status": status, "seconds": round(end - start, 3),
            "longest_wait_ms": round(longest * 1e3, 1),
            "memory_bytes": max(0, max(during) - before[-1]), "answer": answer,
        })  # fmt: skip
    hostile = sorted(wait for at, wait in waits if at >= spans[0][2])
    worst = max(rows, key=lambda row: row["longest_wait_ms"])
    over = [row for row in rows if row["bytes"] and row["memory_bytes"] > BODY_FACTOR * row["bytes"] + BODY_ROOM]
    report = {
        "command": " ".join(["python tools/attack.py hundred", *flags]), "machine": machine(), "requests": len(rows),
        "wait_ms_without": _waits(without), "wait_ms_with": _waits(hostile),
        "longest_stall_ms": round(worst["longest_wait_ms"] - without[-1] * 1e3, 1),
        "streams_ended": ended, "streams_wrong": wrong, "rows": rows,
    }  # fmt: skip
    output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(f"/health without: {report['wait_ms_without']}\n/health with:    {report['wait_ms_with']}")
    print(f"longest stall: {report['longest_stall_ms']} ms in {worst['name']!r}")
    print(f"streams: {sum(ended)} ended, {len(wrong)} wrong")
    for row in over:
        print(f"memory: {row['name']}: {row['memory_bytes'] / row['bytes']:.1f} times its {row['bytes']:,} bytes")
    bad = [row for row in rows if row["status"] >= 500 and row["status"] != 503]
    sys.exit(bool(wrong or over or bad or min(ended) == 0 or report["longest_stall_ms"] > MAX_STALL * 1e3))


def _waits(waits: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in ms, of sorted seconds."""
    at = {"median": len(waits) // 2, "p99": len(waits) * 99 // 100, "max": len(waits) - 1}
    return {name: round(waits[index] * 1e3, 1) for name, index in at.items()}


def _status(answer: bytes) -> tuple[int, bytes]:
    """Status of a raw answer, 0 if it has none, and the answer."""
    first = answer.partition(b"\r\n")[0].split()
    return (int(first[1]) if len(first) > 1 and first[1].isdigit() else 0), answer


# -- drawn requests -----------------------------------------------------------------------------------------------


def drawn(output: Path, count: int, seed: int, clients: int, flags: Sequence[str] = ()) -> None:
    """Send drawn requests with several clients while four streams run, and write the findings."""
    statuses: collections.Counter[str] = collections.Counter()
    findings: list[dict[str, Any]] = []
    slow: list[tuple[float, int]] = []
    lock = threading.Lock()
    with serving([*OPTIONS, *flags]) as (process, port), Progress() as progress:
        wanted = [streamed(port, number) for number in range(4)]
        warm_up(port)
        before = resident(process.pid)
        streams = Watch(run_streams, port, 4, wanted)
        task = progress.add_task("drawn requests", total=count)
        numbers = itertools.count(seed)

        def client() -> None:
            while (number := next(numbers)) < seed + count:
                method, path, body, kind = drawn_request(number)
                start = time.monotonic()
                try:
                    status, answer = sent(port, method, path, body, kind, random.Random(number))
                    seconds = time.monotonic() - start
                    fault = fault_of(path, body, status, answer, seconds)
                except (OSError, http.client.HTTPException) as error:
                    status, answer, fault, seconds = -1, b"", repr(error), time.monotonic() - start
                with lock:
                    statuses[str(status)] += 1
                    slow.append((round(seconds, 2), number))
                    if fault is not None:
                        findings.append({
                            "seed": number, "fault": fault, "kind": kind, "method": method, "path": path,
                            "status": status, "body": body[:600].decode(errors="replace"),
                            "answer": answer[:600].decode(errors="replace"),
                        })  # fmt: skip
                    progress.advance(task)

        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            for each in [pool.submit(client) for _ in range(clients)]:
                each.result()
        ended, wrong = streams.stop()
        time.sleep(1)
        health, _ = ask(port, "GET", "/health")
        after = [streamed(port, number) for number in range(4)] == wanted
        grown = resident(process.pid) - before
    command = ["python tools/attack.py drawn", f"--count {count} --seed {seed} --clients {clients}", *flags]
    report = {
        "command": " ".join(command),
        "machine": machine(), "requests": count, "statuses": dict(sorted(statuses.items())),
        "memory_grown_bytes": grown,
        "streams_ended": ended, "streams_wrong": wrong, "health_after": health, "streams_right_after": after,
        "slowest": sorted(slow, reverse=True)[:10], "findings": findings,
    }  # fmt: skip
    output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print({key: each for key, each in report.items() if key not in ("machine", "findings")})
    for finding in findings[:40]:
        print(finding)
    sys.exit(bool(findings or wrong or not after or health != 200))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.serving.hostile_bodies
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=["hundred", "drawn"])
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--count", type=int, default=6_000, help="number of drawn requests")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first drawn request")
    parser.add_argument("--clients", type=int, default=8, help="clients that send drawn requests at the same time")
    parser.add_argument("--api-server-count", help="as for jpaged serve")
    options = parser.parse_args()
    flags = [] if options.api_server_count is None else ["--api-server-count", options.api_server_count]
    if options.attack == "hundred":
        hundred(options.output, flags)
    else:
        drawn(options.output, options.count, options.seed, options.clients, flags)


if __name__ == "__main__":
    main()
