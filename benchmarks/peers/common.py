"""Code that all runners share: arguments, the three kinds of measurement, and the JSON line that they print.

A runner is a class that loads an engine and generates tokens. `main` measures it in one of three ways:

- `--workload FILE --name W1`: output tokens a second of a workload, after a warm-up.
- the same with `--first-token`: the first token's time on the monotonic clock, and CPU seconds until then.
- `--steps 4x8192 ...`: duration of a decode step for a number of rows and a number of keys per row.

Standard library only, because every peer has its own virtual environment. Linux only, because it reads /proc.
"""

import abc
import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

STEP_TOKENS = 32  # output tokens of each row when decode steps are timed
FIRST_TOKEN_ID, LAST_TOKEN_ID = 3, 8191  # ids that both models and their tokenizer have


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the exact number of tokens to generate."""

    prompt: list[int]
    output_len: int


class Arrivals:
    """Arrival times of output tokens, by index of the request."""

    def __init__(self, num_requests: int):
        self.times: list[list[float]] = [[] for _ in range(num_requests)]

    def add(self, request: int, count: int = 1) -> None:
        """Record that `count` tokens of a request arrive now."""
        self.times[request].extend([time.perf_counter()] * count)


class Engine(abc.ABC):
    """A loaded engine."""

    version = ""  # names and versions of the engine's packages

    @abc.abstractmethod
    def generate(self, requests: Sequence[Request], arrivals: Arrivals) -> list[list[int]]:
        """Generate greedily, ignoring end tokens. Returns the token ids of each request."""

    def wait_until_ready(self) -> None:  # noqa: B027 most engines are ready once they are loaded
        """Wait until the engine runs at full speed. Not called before the first token of a start is timed."""

    def figures(self) -> dict[str, Any]:
        """Additional fields of the JSON line."""
        return {}

    def close(self) -> None:  # noqa: B027 most engines end with the process
        """Free the engine."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every runner."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", required=True, type=pathlib.Path, help="folder of the Hugging Face checkpoint")
    result.add_argument("--workload", type=pathlib.Path, help="workload.json, made by make_workload.py")
    result.add_argument("--name", choices=["W1", "W2", "W3"], help="the workload to run")
    result.add_argument("--first-token", action="store_true", help="stop after the first token of the workload")
    result.add_argument("--steps", nargs="+", type=step_case, metavar="ROWSxKEYS", help="time decode steps instead")
    result.add_argument("--threads", type=int, help="run on this many CPUs (default: all that the process may use)")
    result.add_argument("--warmup", type=int, help="requests of the warm-up (default: all of its list)")
    result.add_argument("--max-model-len", type=int, default=1024, help="(default: %(default)s)")
    result.add_argument("--max-num-seqs", type=int, default=32, help="(default: %(default)s)")
    result.add_argument("--kv-gib", type=int, help="size of the KV cache (default: jpaged's own, 1 for others)")
    result.add_argument("--converted", type=pathlib.Path, help="converted checkpoint, for llama.cpp and OpenVINO")
    return result


def step_case(text: str) -> tuple[int, int]:
    rows, _, keys = text.partition("x")
    if not (rows.isdecimal() and keys.isdecimal() and int(rows) > 0 and int(keys) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxKEYS with two positive numbers, such as 4x8192")
    return int(rows), int(keys)


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and keep the process on `--threads` CPUs."""
    args = arguments.parse_args()
    if args.steps is None and (args.workload is None or args.name is None):
        arguments.error("needs --workload and --name, or --steps")
    cpus = sorted(os.sched_getaffinity(0))
    if args.threads is None:
        args.threads = len(cpus)
    if not 1 <= args.threads <= len(cpus):
        arguments.error(f"--threads {args.threads}: this process may use 1 to {len(cpus)} CPUs")
    os.sched_setaffinity(0, cpus[: args.threads])
    return args


def main(args: argparse.Namespace, load: Callable[[argparse.Namespace], Engine]) -> None:
    """Load the engine, measure it, and print the results as one line of JSON."""
    started = time.perf_counter()
    engine = load(args)
    result: dict[str, Any] = {"version": engine.version, "threads": args.threads}
    result["load_s"] = time.perf_counter() - started
    if not args.first_token:
        engine.wait_until_ready()
    if args.steps is not None:
        result["steps"] = [time_steps(engine, *case) for case in args.steps]
    elif args.first_token:
        result |= time_first_token(engine, read_requests(args, "requests")[0])
        engine.wait_until_ready()  # so that the next start finds all programs
    else:
        result |= time_workload(engine, read_requests(args, "warmup")[: args.warmup], read_requests(args, "requests"))
    result["peak_rss_mib"] = peak_rss_mib()
    result |= engine.figures()
    engine.close()
    sys.stdout.flush()
    print("\n" + json.dumps(result), flush=True)


def skip(reason: str) -> None:
    """Print that this measurement is not possible here, and exit."""
    print(json.dumps({"skipped": reason}), flush=True)
    sys.exit(0)


def read_requests(args: argparse.Namespace, part: str) -> list[Request]:
    """Read the `warmup` or the `requests` of the chosen workload."""
    with args.workload.open(encoding="utf-8") as file:
        return [Request(each["prompt"], each["output_len"]) for each in json.load(file)[args.name][part]]


def generate(engine: Engine, requests: Sequence[Request], arrivals: Arrivals) -> list[list[int]]:
    """Generate. Exits with an error unless every request has exactly `output_len` tokens."""
    outputs = engine.generate(requests, arrivals)
    lengths, wanted = [len(output) for output in outputs], [request.output_len for request in requests]
    if lengths != wanted:
        sys.exit(f"output lengths are {lengths}, the requests ask for {wanted}")
    return outputs


def time_workload(engine: Engine, warmup: list[Request], requests: list[Request]) -> dict[str, Any]:
    """Warm up, then time all requests together."""
    before = time.perf_counter()
    if warmup:
        generate(engine, warmup, Arrivals(len(warmup)))
    warm = time.perf_counter() - before
    arrivals = Arrivals(len(requests))
    meter = OtherProcesses()
    start = time.perf_counter()
    outputs = generate(engine, requests, arrivals)
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"others_cpu": meter.share(), "warmup_s": warm, "seconds": seconds}
    tokens = sum(len(output) for output in outputs)
    result |= {"output_tokens": tokens, "output_tok_s": tokens / seconds, "requests": len(requests)}
    result["tokens_sha"] = hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:12]
    if len(requests) == 1 and len(arrivals.times[0]) == tokens:
        times = arrivals.times[0]
        result["first_token_ms"] = (times[0] - start) * 1e3
        result["token_gap_ms"] = statistics.median(after - before for before, after in itertools.pairwise(times)) * 1e3
    return result


def time_first_token(engine: Engine, request: Request) -> dict[str, Any]:
    """Generate one token. `first_token_at` is on the machine's monotonic clock, which the parent process shares."""
    generate(engine, [Request(request.prompt, 1)], Arrivals(1))
    return {"first_token_at": time.monotonic(), "cpu_to_first_token_s": cpu_seconds()}


def time_steps(engine: Engine, rows: int, keys: int) -> dict[str, Any]:
    """Time decode steps of `rows` rows with `keys` prompt tokens each.

    A first pass computes the prompts. The second pass finds them in the engine's prefix cache, so all rows decode soon.
    Only the gaps between tokens while all rows decode count.
    """
    prompts = [row_prompt(row, keys) for row in range(rows)]
    generate(engine, [Request(prompt, 1) for prompt in prompts], Arrivals(rows))
    arrivals = Arrivals(rows)
    meter = OtherProcesses()
    generate(engine, [Request(prompt, STEP_TOKENS) for prompt in prompts], arrivals)
    others = meter.share()
    begin, end = max(times[0] for times in arrivals.times), min(times[-1] for times in arrivals.times)
    pairs = [pair for times in arrivals.times for pair in itertools.pairwise(times)]
    gaps = [after - before for before, after in pairs if begin <= before and after <= end]
    if len(gaps) < rows * 4:
        sys.exit(f"{rows} rows of {keys} keys: only {len(gaps)} gaps between tokens while all rows decode")
    step = statistics.median(gaps) * 1e3
    return {"rows": rows, "keys": keys, "keys_read": keys + STEP_TOKENS / 2, "step_ms": step, "others_cpu": others}


def row_prompt(row: int, length: int) -> list[int]:
    """Return a row's prompt. A shorter prompt of the same row is a prefix of a longer one."""
    rng = random.Random(f"row {row}")
    return [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length)]


class OtherProcesses:
    """Measures the share of the CPUs that other processes use, time stolen by the host included."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), machine_cpu_seconds(), cpu_seconds()

    def share(self) -> float:
        """Return the share since the start. It is 0 on an otherwise idle machine."""
        others = (machine_cpu_seconds() - self._busy) - (cpu_seconds() - self._own)
        return max(0.0, others) / ((time.perf_counter() - self._start) * (os.cpu_count() or 1))


def machine_cpu_seconds() -> float:
    """CPU seconds that the machine has spent: all but idle time and waiting for I/O."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_tree() -> list[int]:
    """Return the ids of this process and of its live descendants."""
    children: dict[int, list[int]] = {}
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [os.getpid()]
    for process in found:  # grows while it is read
        found += children.get(process, [])
    return found


def cpu_seconds() -> float:
    """CPU seconds of this process, its live descendants, and the children that they have waited for."""
    fields = [_stat(process) for process in process_tree()]
    return sum(sum(map(int, each[11:15])) for each in fields) / os.sysconf("SC_CLK_TCK")


def peak_rss_mib() -> float:
    """Sum of the peak resident memory of this process and of its live descendants, in MiB."""
    total = 0
    for process in process_tree():
        try:
            status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        except OSError:
            continue  # the process has ended
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total / 1024


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on. Empty if the process has ended."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []
