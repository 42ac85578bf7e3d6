"""The server's part of the processor time of a token, and the memory that 1,000 streams take for good.

    python benchmarks/server_share.py [--model demo] [--concurrency 64] [--streams 1000] [--output FILE.json]

Linux only. `jpaged serve` runs as a process of its own. Its first thread is the event loop: HTTP, JSON, and the events
of streams. All its other threads count as the engine: steps, XLA, prompts that are tokenised. The client's time is not
counted, but client and server share the machine's cores. Then 1,000 streams run at a time, three times; the resident
memory is read before and after the later ones.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

from jpaged.cli.results import machine
from jpaged.load_client.backends import BACKENDS, LoadRequest
from jpaged.load_client.connection import Endpoint
from jpaged.load_client.run import Run, Target, send_all

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from attack import resident, serving

TICKS = os.sysconf("SC_CLK_TCK")
PROMPT = "def read_json(path):"
REPEATS = 8  # requests of each concurrent client


def thread_seconds(pid: int) -> tuple[float, float]:
    """Processor seconds of the process's first thread, and of all its other threads."""
    first = others = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / TICKS  # utime, stime
        if int(task.name) == pid:
            first = used
        else:
            others += used
    return first, others


def streams(port: int, model: str, count: int, concurrency: int, tokens: int) -> Run:
    """Run streams, and check that each is complete."""
    endpoint = Endpoint.parse(f"http://127.0.0.1:{port}/v1/completions")
    target = Target(endpoint=endpoint, backend=BACKENDS["openai"], model=model, fields={"ignore_eos": True})
    requests = [LoadRequest(PROMPT, tokens)] * count
    run = asyncio.run(send_all(target, requests, [0.0] * count, max_concurrency=concurrency))
    for answer in run.answers:
        assert answer.error is None, answer.error
        assert answer.num_output_tokens == tokens
    return run


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=64, help="streams at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=1000, help="streams for the memory (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    args = parser.parse_args()
    options = ["--max-num-seqs", str(args.concurrency), "--max-model-len", "512", "--max-queued-requests", "2000"]
    with serving(options, args.model) as (process, port):
        pid = process.pid
        streams(port, args.model, args.concurrency, args.concurrency, args.tokens)  # warm-up
        first, others = thread_seconds(pid)
        run = streams(port, args.model, REPEATS * args.concurrency, args.concurrency, args.tokens)
        server, engine = (now - then for now, then in zip(thread_seconds(pid), (first, others), strict=True))
        memory = []
        for _ in range(3):
            streams(port, args.model, args.streams, args.streams, 16)
            time.sleep(1)
            memory.append(resident(pid))
    tokens = REPEATS * args.concurrency * args.tokens
    figures = {
        "machine": machine(),
        "tokens_per_second": round(tokens / run.seconds),
        "server_us_a_token": round(1e6 * server / tokens, 1),
        "engine_us_a_token": round(1e6 * engine / tokens, 1),
        "share": round(server / engine, 3),
        "streams": args.streams,
        "resident_mib_after_each_round": [round(size / 2**20, 1) for size in memory],
        "growth": round(memory[-1] / memory[0] - 1, 4),
    }
    print(json.dumps(figures, indent=1))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
