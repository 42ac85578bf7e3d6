"""Kill and stop an engine of two processes at random moments, and check how its processes and streams end.

    python benchmarks/process_chaos.py [--tries 50] [--seed 1] [--output FILE]

Each try starts `jpaged serve demo` as two processes with one CPU device each, opens streams, and does one of these:
- follower killed, leader killed (SIGKILL): the other process must end with status 1, within seconds;
- both stopped, or only the leader (SIGTERM): open streams must be complete, and both processes end with status 0;
- other options on one node: both must end with status 2, and name the option.
Prints a row for each try. A process that has not ended after 60 s is a hang, and the script ends with status 1.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from tqdm import tqdm

LONGEST = 60.0  # seconds until a process counts as hung
EVENTS = ("follower killed", "leader killed", "both stopped", "leader stopped", "other options")
STREAMS = 4


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                for i in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + i))
            except OSError:
                continue
            return port


class Pair:
    """The two processes of an engine, with their logs in a folder."""

    def __init__(
        self, folder: pathlib.Path, *, other_options: bool = False, tensor: int = 2, slurm: bool = False
    ):
        """slurm: start both with the same command, and with the variables that Slurm sets."""
        self.port, group_port = free_port(), free_port(2)
        shared = ["demo", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"]
        shared += ["--tensor-parallel-size", str(tensor), "--master-port", str(group_port), "--join-timeout", "60"]
        flags = f"--xla_force_host_platform_device_count={tensor // 2}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        self.logs, self.processes = [], []
        for rank in (0, 1):
            own = ["--nnodes", "2", "--node-rank", str(rank)]
            own += ["--port", str(self.port)] if rank == 0 else ["--headless"]
            if slurm:
                own = ["--detect-nodes", "--port", str(self.port)]
                env |= {"SLURM_STEP_NODELIST": "127.0.0.1,other", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2"}
                env |= {"SLURM_PROCID": str(rank)}
            if rank == 1 and other_options:
                own += ["--max-num-batched-tokens", "256"]
            self.logs.append(folder / f"node-{rank}.log")
            command = [sys.executable, "-m", "jpaged", "serve", *shared, *own]
            with self.logs[rank].open("w") as log:
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder))

    def wait_until_ready(self) -> None:
        """Wait for the server. Raises RuntimeError after 300 s, or if a process ends."""
        began = time.monotonic()
        while "ready: http" not in self.logs[0].read_text():
            if any(process.poll() is not None for process in self.processes) or time.monotonic() - began > 300:
                raise RuntimeError("\n".join(log.read_text() for log in self.logs))
            time.sleep(0.1)

    def complete(self, prompt: str, **body: Any) -> dict[str, Any]:
        return json.loads(self._post(prompt=prompt, temperature=0, **body))

    def stream(self, prompt: str) -> bool:
        """Read a stream of 200 tokens. Returns True if it is complete."""
        try:
            return b"data: [DONE]" in self._post(prompt=prompt, max_tokens=200, ignore_eos=True, stream=True)
        except (OSError, http.client.HTTPException):
            return False

    def _post(self, **body: Any) -> bytes:
        data = json.dumps({"model": "demo", **body}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LONGEST) as answer:
            return answer.read()

    def statuses(self, seconds: float = LONGEST) -> list[int | None]:
        """Exit statuses of both processes; None for a process that still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        found: list[int | None] = []
        for process in self.processes:
            try:
                found.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                found.append(None)
        return found

    def end(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def attempt(event: str, rng: random.Random, folder: pathlib.Path) -> dict[str, Any]:
    pair = Pair(folder, other_options=event == "other options")
    whole: list[bool] = []
    try:
        if event == "other options":
            began, statuses = time.monotonic(), pair.statuses(120)
            named = all("max_num_batched_tokens is None on node 0 and 256" in log.read_text() for log in pair.logs)
            right = statuses == [2, 2] and named
        else:
            pair.wait_until_ready()
            with concurrent.futures.ThreadPoolExecutor(STREAMS) as threads:
                streams = [threads.submit(pair.stream, f"Request {i}:") for i in range(STREAMS)]
                time.sleep(rng.uniform(0.0, 0.6))
                began = time.monotonic()
                victims = {"follower killed": [1], "leader killed": [0], "both stopped": [1, 0], "leader stopped": [0]}
                for rank in victims[event]:
                    pair.processes[rank].send_signal(signal.SIGKILL if "killed" in event else signal.SIGTERM)
                statuses = pair.statuses()
                seconds = time.monotonic() - began
                whole = [stream.result() for stream in streams]
            if "killed" in event:
                right = sorted(statuses, key=str) == [-9, 1] and seconds < 20
            else:
                right = statuses == [0, 0] and all(whole)
        seconds = time.monotonic() - began
        row = {"event": event, "statuses": statuses, "seconds": round(seconds, 2), "streams_whole": sum(whole)}
        if not right:
            row["logs"] = [log.read_text()[-2000:] for log in pair.logs]
        return row | {"right": right, "hung": None in statuses}
    finally:
        pair.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file of the rows")
    args = parser.parse_args()
    rng, rows = random.Random(args.seed), []
    for number in tqdm(range(args.tries), desc="tries", file=sys.stderr):
        with tempfile.TemporaryDirectory() as folder:
            row = attempt(EVENTS[number % len(EVENTS)], rng, pathlib.Path(folder))
        rows.append(row)
        print({key: value for key, value in row.items() if key != "logs"}, flush=True)
    for event in EVENTS:
        of_event = [row for row in rows if row["event"] == event]
        slowest = max((row["seconds"] for row in of_event), default=0.0)
        right = sum(row["right"] for row in of_event)
        print(f"{event:16} {right} of {len(of_event)} right, slowest end {slowest:.1f} s")
    hung = sum(row["hung"] for row in rows)
    print(f"{len(rows)} tries, {hung} hung, {sum(not row['right'] for row in rows)} wrong")
    if args.output:
        args.output.write_text(json.dumps({"command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")
    sys.exit(1 if hung else 0)


if __name__ == "__main__":
    main()
