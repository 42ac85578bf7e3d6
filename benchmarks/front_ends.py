"""The server against the engine offline, with the engine in a process of its own and without: interleaved rounds.

    python benchmarks/front_ends.py [MODEL] [--streams 64] [--requests 192] [--rounds 5] [--output FILE]

Each round runs the same requests three times: offline (`LLM.generate`), over HTTP with one process, and over HTTP with
a front end in a process of its own. The client and all servers share the machine's cores. A server that has no
requests uses no processor time.

Then small requests arrive, PROBES of them, while as many long streams run. Prints the time to their first tokens in
steps: a step is the time of a token of the long streams.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jpaged.cli.common.results import machine
from jpaged.load_client.backends import BACKENDS, LoadRequest
from jpaged.load_client.connection import Endpoint
from jpaged.load_client.run import Target, send_all

START_SECONDS = 300.0
IDS = range(10, 400)  # of the prompts' tokens: any model has them
PROBES, PROBE_LENGTH, EVERY_SECONDS = 200, 16, 0.04  # small requests, their prompts' tokens, and the time between two


def offline(connection: Any, model: str, options: dict[str, Any]) -> None:
    """Answer each message, a list of prompts and a length, with the seconds that the engine takes."""
    from jpaged import LLM, SamplingParams

    with LLM(model, **options) as llm:
        llm.wait_until_ready()
        connection.send("ready")
        while True:
            prompts, length = connection.recv()
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            llm.reset_prefix_cache()
            began = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            connection.send(time.perf_counter() - began)


@dataclasses.dataclass
class Served:
    """A server."""

    process: subprocess.Popen[str]
    target: Target

    @classmethod
    def start(cls, model: str, options: dict[str, Any], *more: str) -> "subprocess.Popen[str]":
        """Start a server on a free port."""
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", "--disable-ui", *flags, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    @classmethod
    def ready(cls, process: "subprocess.Popen[str]", model: str) -> "Served":
        """Wait until a server is ready."""
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"ready: (\S+)", line):
                endpoint = Endpoint.parse(f"{found[1]}/completions")
                fields = {"ignore_eos": True, "temperature": 0}
                return cls(process, Target(endpoint=endpoint, backend=BACKENDS["openai"], model=model, fields=fields))
        raise SystemExit("a server has ended")

    def seconds(self, prompts: list[list[int]], length: int, streams: int) -> float:
        """Seconds to answer all prompts, `streams` at a time."""
        requests = [LoadRequest(prompt, length) for prompt in prompts]
        run = asyncio.run(send_all(self.target, requests, [0.0] * len(requests), max_concurrency=streams))
        for answer in run.answers:
            assert answer.error is None, answer.error
            assert answer.num_output_tokens == length
        return run.seconds

    def first_tokens(self, rng: random.Random, streams: int, length: int) -> list[float]:
        """Times to the first tokens of small requests while long streams run, in steps."""
        requests = [LoadRequest(rng.choices(IDS, k=PROBE_LENGTH), length) for _ in range(streams)]
        requests += [LoadRequest(rng.choices(IDS, k=PROBE_LENGTH), 1) for _ in range(PROBES)]
        times = [0.0] * streams + [1.0 + i * EVERY_SECONDS for i in range(PROBES)]
        answers = asyncio.run(send_all(self.target, requests, times)).answers
        assert not any(answer.error for answer in answers)
        step = statistics.median(answer.time_per_output_token or 0.0 for answer in answers[:streams])
        end = min(answer.start + answer.latency for answer in answers[:streams])
        beside = [answer for answer in answers[streams:] if answer.start + (answer.first or 0.0) < end]
        print(f"{len(beside)} of {PROBES} small requests beside {streams} streams; a step takes {step * 1e3:.1f} ms")
        return sorted((answer.first or 0.0) / step for answer in beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--length", type=int, default=64, help="tokens of each prompt and of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    options = {"max_num_seqs": args.streams, "max_model_len": 4 * args.length}
    served = options | {"max_num_seqs": args.streams + 8, "max_model_len": 2048}  # room for the small requests
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(
        target=offline, args=(theirs, args.model, options), daemon=True
    )
    engine.start()
    started = {
        "one process": Served.start(args.model, served),
        "a front end": Served.start(args.model, served, "--api-server-count", "1"),
    }
    rng = random.Random(0)
    try:
        servers = {name: Served.ready(process, args.model) for name, process in started.items()}
        assert ours.recv() == "ready"
        ratios: dict[str, list[float]] = {name: [] for name in servers}
        for round_number in range(args.rounds + 1):
            prompts = [rng.choices(IDS, k=args.length) for _ in range(args.requests)]
            ours.send((prompts, args.length))
            alone = ours.recv()
            seconds = {name: each.seconds(prompts, args.length, args.streams) for name, each in servers.items()}
            if round_number:  # the first one warms up
                for name, value in seconds.items():
                    ratios[name].append(alone / value)
            print(round_number, f"offline {alone:.2f} s", *(f"{name} {value:.2f} s" for name, value in seconds.items()))
        for name, values in ratios.items():
            print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) of offline")
        first = {name: each.first_tokens(rng, args.streams, 1_900) for name, each in servers.items()}
        for name, steps in first.items():
            p50, p99 = (steps[int(part * len(steps))] for part in (0.5, 0.99))
            print(f"{name}: first token of a small request after {p50:.1f} steps, p99 {p99:.1f}")
        if args.output:
            facts = {"machine": machine(), **vars(args), "output": None, "ratios": ratios, "first_tokens": first}
            args.output.write_text(json.dumps(facts, indent=1) + "\n")
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait()


if __name__ == "__main__":
    main()
