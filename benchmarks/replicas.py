"""Two servers of the demo model with a front end. One is killed under load: which requests fail?

    python benchmarks/replicas.py [--front smg smg-round-robin ray ray-sessions] [--streams 16] [--output FILE]

The front end is the router smg (`pip install smg`) with its policy cache_aware or round_robin, or Ray Serve (`pip
install 'jpaged[ray]'`). With ray-sessions, Ray sends all requests with the same x-session-id to one server. Each of 30
prefixes begins four prompts. Three phases have the same prompts:
- steady:  all requests must succeed. Hits: the share of requests that found their prefix in the cache of their server.
- killed:  one server gets SIGKILL while streams run. Requests that were open then may fail, others must not.
- after:   starts right after the last stream of the second phase.
Prints a row for each front end, and writes the rows to FILE. Exits with 1 if a request fails that must not, or a text
differs from the first phase.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Protocol

import httpx
from process_chaos import free_port
from tqdm import tqdm

PREFIXES, REQUESTS, TOKENS = 30, 120, 200
SERVER = ["--max-model-len", "512", "--dtype", "float32"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer to a request. error: why the stream is incomplete; empty if it is complete."""

    prompt: str
    began: float
    ended: float
    text: str
    cached_tokens: int
    error: str


class Front(Protocol):
    """Two replicas and their front end."""

    url: str

    def start(self) -> None:
        """Start the replicas and the front end, and wait until they answer requests."""
        ...

    def kill_one(self) -> None:
        """Send SIGKILL to one replica."""
        ...

    def wait_until_whole(self) -> bool:
        """Wait until there are two replicas again. False: the front end does not start servers."""
        ...


class Smg:
    """Two `jpaged serve` processes, and smg."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack, policy: str = "cache_aware"):
        self._folder, self._stack, self._policy = folder, stack, policy
        self._servers: list[subprocess.Popen] = []
        self.url = f"http://127.0.0.1:{free_port()}"

    def start(self) -> None:
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        for number, url in enumerate(urls):
            command = [sys.executable, "-m", "jpaged", "serve", "demo", *SERVER, "--port", url.rpartition(":")[2]]
            self._servers.append(self._run(f"server-{number}", command))
        for url in urls:
            _wait_for(f"{url}/ready")
        port = self.url.rpartition(":")[2]
        metrics = str(free_port())
        self._run("smg", [
            _program("smg"), "launch", "--worker-urls", *urls, "--policy", self._policy, "--port", port,
            "--prometheus-port", metrics,
        ])  # fmt: skip
        _wait_for(f"{self.url}/v1/models")

    def kill_one(self) -> None:
        self._servers[0].send_signal(signal.SIGKILL)

    def wait_until_whole(self) -> bool:
        """Return False: smg does not start servers."""
        return False

    def _run(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, env=_environment())
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process


class Ray:
    """The application `jpaged.ray_serve` with two replicas. Ray restarts a replica that ends."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack, router: str | None = None):
        self._folder, self._stack = folder, stack
        self._router = {} if router is None else {"request_router_config": {"request_router_class": router}}
        self.url = f"http://127.0.0.1:{free_port()}"

    def start(self) -> None:
        """Start a Ray cluster of this machine, and the application in it."""
        config = self._folder / "serve.yaml"
        arguments = {"model": "demo", "device": "cpu", "replicas": 2, "max_model_len": 512, "dtype": "float32"}
        config.write_text(json.dumps({
            "http_options": {"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])},
            "applications": [{
                "name": "jpaged", "route_prefix": "/", "import_path": "jpaged.ray_serve:build", "args": arguments,
                "deployments": [{"name": "jpaged", **self._router}],
            }],
        }))  # fmt: skip
        env = _environment()
        run = [_program("ray"), "start", "--head", "--port", str(free_port()), "--disable-usage-stats"]
        subprocess.run(run, check=True, capture_output=True, env=env)
        self._stack.callback(subprocess.run, [_program("ray"), "stop", "--force"], capture_output=True, env=env)
        subprocess.run([_program("serve"), "deploy", str(config)], check=True, capture_output=True, env=env)
        _wait_for(f"{self.url}/v1/models")
        self.wait_until_whole()

    def kill_one(self) -> None:
        os.kill(self._replicas()[0], signal.SIGKILL)

    def wait_until_whole(self) -> bool:
        """Wait until Ray reports two running replicas."""
        deadline = time.monotonic() + 300
        while len(self._replicas()) < 2 or b"RUNNING: 2" not in self._status():
            if time.monotonic() > deadline:
                raise RuntimeError(self._status().decode())
            time.sleep(0.5)
        return True

    def _status(self) -> bytes:
        return subprocess.run([_program("serve"), "status"], capture_output=True, env=_environment(), check=True).stdout

    def _replicas(self) -> list[int]:
        found = subprocess.run(["pgrep", "-f", "^ray::ServeReplica:jpaged"], capture_output=True, check=False)
        return [int(word) for word in found.stdout.split()]


BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
FRONTS = {
    "smg": Smg, "smg-round-robin": functools.partial(Smg, policy="round_robin"),
    "ray": Ray, "ray-sessions": functools.partial(Ray, router=BY_SESSION),
}  # fmt: skip


def _program(name: str) -> str:
    """Path of a program of this Python's environment."""
    path = pathlib.Path(sys.executable).parent / name
    found = str(path) if path.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed: see the head of this file")
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_AUTH_MODE": "token"}  # Ray 2.60 requires the token mode


def _wait_for(url: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} does not answer")
        time.sleep(0.2)


def prompts_of(seed: int) -> list[str]:
    """Prompts of about 250 characters, each with one of PREFIXES prefixes, in random order."""
    rng = random.Random(seed)
    beginnings = [f"# file {i}\n" + f"def function_{i}(first, second):\n    return first + second * {i}\n" * 3
                  for i in range(PREFIXES)]  # fmt: skip
    found = [f"{beginnings[i % PREFIXES]}\ndef case_{i}(" for i in range(REQUESTS)]
    rng.shuffle(found)
    return found


async def ask(client: httpx.AsyncClient, url: str, prompt: str) -> Answer:
    """Send a request, and read its stream to the end."""
    body = {
        "model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, text, cached, error = time.monotonic(), "", 0, "the stream has no end"
    try:
        session = {"x-session-id": prompt.partition("\n")[0].removeprefix("# ")}
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=session) as answer:
            if answer.status_code != 200:
                error = f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    error = ""
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        error = str(chunk["error"].get("type"))
                        break
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    if usage := chunk.get("usage"):
                        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    except httpx.HTTPError as problem:
        error = type(problem).__name__
    return Answer(prompt, began, time.monotonic(), text, cached, error)


async def phase(
    front: Front, prompts: Sequence[str], streams: int, name: str, kill_after: int | None = None
) -> tuple[list[Answer], float]:  # fmt: skip
    """Run all prompts, `streams` at a time. Returns the answers, and the time at which a replica was killed."""
    waiting, answers, killed = list(reversed(prompts)), [], float("inf")
    bar = tqdm(total=len(prompts), desc=name, unit="request")

    async def client_loop(client: httpx.AsyncClient) -> None:
        nonlocal killed
        while waiting:
            answers.append(await ask(client, front.url, waiting.pop()))
            bar.update()
            if kill_after is not None and len(answers) == kill_after:
                await asyncio.to_thread(front.kill_one)
                killed = time.monotonic()

    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(streams)))
    bar.close()
    return answers, killed


async def measure(front: Front, streams: int) -> dict[str, Any]:
    """Run the three phases. Returns the row."""
    prompts = prompts_of(0)
    steady, _ = await phase(front, prompts, streams, "steady")
    killed, moment = await phase(front, prompts, streams, "killed", len(prompts) // 3)
    after, _ = await phase(front, prompts, streams, "after")
    whole_again = time.monotonic() - moment if await asyncio.to_thread(front.wait_until_whole) else None
    texts = {answer.prompt: answer.text for answer in steady}
    failed = [answer for answer in killed if answer.error]
    open_then = [answer for answer in killed if answer.began < moment < answer.ended]
    whole = [answer for answer in (*killed, *after) if not answer.error]
    return {
        "requests": len(prompts),
        "streams": streams,
        "steady_failed": sum(bool(answer.error) for answer in steady),
        "hits": sum(answer.cached_tokens > 0 for answer in steady) / len(steady),
        "open_at_kill": len(open_then),
        "failed_of_open": sum(bool(answer.error) for answer in open_then),
        "failed_of_others": len([answer for answer in failed if answer not in open_then]),
        "errors": sorted({answer.error for answer in (*steady, *failed, *after) if answer.error}),
        "after_failed": sum(bool(answer.error) for answer in after),
        "seconds_until_two_again": None if whole_again is None else round(whole_again, 1),
        "other_texts": sum(answer.text != texts[answer.prompt] for answer in whole),
    }


def run(name: str, streams: int) -> dict[str, Any]:
    """Start a front end, and measure. Returns the row."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        front = FRONTS[name](pathlib.Path(folder), stack)
        front.start()
        return {"front": name, **asyncio.run(measure(front, streams))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", choices=FRONTS, nargs="+", default=list(FRONTS))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results/replicas.json")
    options = parser.parse_args()
    rows = []
    for name in options.front:
        rows.append(run(name, options.streams))
        print(json.dumps(rows[-1]))
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
    bad = ("steady_failed", "failed_of_others", "after_failed", "other_texts")
    wrong = sum(row[key] for row in rows for key in bad)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
