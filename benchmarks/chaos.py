"""Minutes of chaos against a real `jpaged serve` process: nothing is lost, wrong or leaked. Linux only.

    python benchmarks/chaos.py --minutes 10 --seed 1 --output benchmarks/results/chaos.json

Clients send random requests on all generating routes: as a stream or whole, greedy or seeded, some with structured
output, several answers or a shared prompt prefix. Some leave at a random moment. Others send malformed requests.
Meanwhile a schedule of events, drawn from the seed, disturbs the server:

    stop     SIGSTOP, and SIGCONT up to 3 s later
    drain    POST /admin/drain, and DELETE up to 3 s later
    restart  SIGTERM under load, and a new process
    kill     SIGKILL under load, and a new process
    cache    files of the compile cache are truncated, emptied or overwritten, then SIGTERM and a new process
    disk     the file system of the log and of the compile cache is full for some seconds, or during a restart
    clock    the wall clock jumps by seconds to years
    front    SIGKILL of a front end, which is started again; with --api-server-count only

The system clock does not change: `chaos_clock.py` starts the server and wraps `time.time` in its process. The
full disk is a small tmpfs, or a limit on the size of files (RLIMIT_FSIZE) where mounting is not allowed.

Checked for each request: it gets its answer, or a documented error because the server drains, stops or starts. None
hangs or gets an error 500. Each finished text equals the text that `jpaged.LLM` computed before the chaos.

Checked while the load pauses, every 30 s and at the end: the server holds no request and no block, and its memory and
open files are within a limit.

The same seed gives the same cases, the same schedule, and the same requests of each client in the same order. Their
timing depends on the machine.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import http.client
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from attack import CONNECTIONS, resident
from chaos_load import MAX_SECONDS, Case, Outcome, draw_cases, offline_answers, send
from chaos_server import SIZES, Disk, ServerProcess
from drawn_requests import COMPLETIONS, ask, drawn_request, fault_of, sent

# Weight of each kind of event.
EVENTS = {"stop": 6, "drain": 4, "restart": 2, "kill": 1, "cache": 2, "disk": 4, "clock": 5, "front": 6}
NUM_CASES = 120
NUM_CLIENTS, NUM_MALFORMED = 12, 2
QUIET_EVERY = 30.0           # seconds between two pauses of the load
QUIET_SECONDS = 30.0         # limit until a paused load has no requests and no blocks
PROGRESS_EVERY = 10.0
MAX_MEMORY_GROWTH = 256 * 2**20  # bytes of the server and its child processes, after warm-up
MAX_FILES_GROWTH = 32        # open files and sockets, after warm-up
LATE = 1.0                   # a request sent up to this many seconds before SIGTERM may meet a closed socket
JUMPS = (-86_400.0, -3_600.0, -5.0, 5.0, 3_600.0, 86_400.0, 10 * 365 * 86_400.0)
DOCUMENTED = {"draining", "stopping", "restarting", "overloaded_error"}  # the last is Anthropic's
ENGINE_ENDED = {"engine_error", "api_error"}  # the last is Anthropic's
MAX_FINDINGS = 50            # written per kind


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    pause: float        # seconds before it
    kind: str
    seconds: float      # duration, unless the event restarts the server
    seed: int           # for its details
    with_restart: bool  # a full disk: restart the server


def draw_schedule(seed: int, seconds: float, kinds: Sequence[str]) -> list[Event]:
    """Draw the events of a run of at most `seconds`. The run may end before the last ones."""
    rng, events = random.Random(f"{seed} events"), []
    while kinds and sum(event.pause for event in events) < seconds:
        kind = rng.choices(kinds, [EVENTS[kind] for kind in kinds])[0]
        seconds_of_it, details = rng.uniform(0.2, 3.0), rng.randrange(1_000_000)
        events.append(Event(rng.uniform(1.0, 6.0), kind, seconds_of_it, details, rng.random() < 0.3))
    return events


class Chaos:
    """The clients, the events and the checks of one run."""

    def __init__(self, server: ServerProcess, cases: Sequence[Case], wanted: Sequence[list[str]], seed: int):
        self.server = server
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.malformed: collections.Counter[str] = collections.Counter()
        self.events: collections.Counter[str] = collections.Counter()
        self.damages: collections.Counter[str] = collections.Counter()
        self.findings: list[dict[str, Any]] = []
        self.quiet: list[dict[str, Any]] = []
        self.slowest = 0.0
        self._cases, self._wanted, self._seed = cases, wanted, seed
        self._lock = threading.Lock()
        self._go, self._end = threading.Event(), threading.Event()
        self._busy = 0
        self._began = time.monotonic()

    def run(self, seconds: float, schedule: Sequence[Event]) -> None:
        """Run the load and the events for `seconds`."""
        threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(NUM_CLIENTS)]
        threads += [threading.Thread(target=self._attacker, args=(n,), daemon=True) for n in range(NUM_MALFORMED)]
        threads.append(threading.Thread(target=self._report, daemon=True))
        self._warm_up()
        self._began = time.monotonic()
        self._go.set()
        for thread in threads:
            thread.start()
        next_quiet, left, last = QUIET_EVERY, list(schedule), 0.0
        while (now := time.monotonic() - self._began) < seconds:
            if now >= next_quiet:
                self._check_quiet()
                next_quiet = time.monotonic() - self._began + QUIET_EVERY
            elif left and now >= last + left[0].pause:
                self._disturb(left.pop(0))
                last = time.monotonic() - self._began
            else:
                time.sleep(0.05)
        self._check_quiet()
        self._end.set()
        self._go.set()  # clients that wait see the end
        for thread in threads:
            thread.join(timeout=QUIET_SECONDS)
        self.server.terminate()
        for fault in self.server.faults:
            self._finding("server", fault)

    # -- load

    def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        while not self._end.is_set():
            case = rng.choice(self._cases)
            stream, leaves, pause = rng.random() < 0.6, rng.random() < 0.2, rng.choice([0, 0, 0, 0.2, 1.0])
            leave_after = rng.uniform(0.0, 1.5) if leaves else None
            if not self._begin():
                return
            start = time.monotonic()
            try:
                wanted = self._wanted[case.number]
                outcome = send(self.server.port, case, wanted, stream=stream, leave_after=leave_after)
                self._judge(case, outcome, start, time.monotonic())
            finally:
                self._done()
            time.sleep(pause if outcome.kind != "no connection" else 1.0)

    def _attacker(self, number: int) -> None:
        """Send malformed and unusual requests."""
        rng = random.Random(f"{self._seed} attacker {number}")
        while not self._end.is_set():
            drawn, way = rng.randrange(2**31), rng.random()
            if not self._begin():
                return
            start = time.monotonic()
            try:
                name, fault = self._attack(rng, drawn, way)
            except (OSError, http.client.HTTPException) as error:
                name = fault = f"no answer: {type(error).__name__}"
                if self._during(start, time.monotonic(), "restart", "kill", "front"):
                    name, fault = "server down", None
            finally:
                self._done()
            if fault and fault.endswith("status 500") and self.server.has_front_ends:
                fault = None if self._during(start, time.monotonic(), "kill") else fault
            with self._lock:
                self.malformed[name] += 1
            if fault is not None:
                self._finding("malformed", f"drawn request {drawn}, {way:.3f}: {fault}")
            time.sleep(0.05 if name != "server down" else 1.0)

    def _attack(self, rng: random.Random, drawn: int, way: float) -> tuple[str, str | None]:
        """Send one malformed request. Returns its name for the report, and its fault."""
        port = self.server.port
        if way < 0.04:
            name = rng.choice(sorted(CONNECTIONS))
            status = CONNECTIONS[name](port)[9:12].decode(errors="replace")
            return f"bad HTTP: {name}", f"{name}: status {status}" if status == "500" else None
        if way < 0.07:
            size = rng.choice([2**20, 12 * 2**20, 40 * 2**20])
            status, _ = ask(port, "POST", COMPLETIONS, b'{"prompt": "' + b"a " * (size // 2) + b'"}')
            return f"body of {size // 2**20} MiB", f"a huge body: status {status}" if status in (200, 500) else None
        method, path, body, kind = drawn_request(drawn)
        start = time.monotonic()
        status, answer = sent(port, method, path, body, kind, random.Random(drawn))
        fault = fault_of(path, body, status, answer, 0.0)
        if (seconds := time.monotonic() - start) > MAX_SECONDS:  # `fault_of` expects a server that nothing disturbs
            fault = f"an answer after {seconds:.1f} s"
        if fault == "a stream that ends with an error" and self._during(start, time.monotonic(), "restart"):
            fault = None
        if status == 503 and not self._during(start, time.monotonic(), "restart", "kill", "drain", "keeper"):
            fault = f"status 503 without a reason: {answer[:300]!r}"
        return f"{kind}: status {status}" if status else f"{kind}: not waited for", fault

    def _begin(self) -> bool:
        """Wait while the load pauses, then count a running request. Returns False at the end of the run."""
        while True:
            self._go.wait()
            with self._lock:
                if self._end.is_set():
                    return False
                if self._go.is_set():
                    self._busy += 1
                    return True

    def _done(self) -> None:
        with self._lock:
            self._busy -= 1

    def _judge(self, case: Case, outcome: Outcome, start: float, end: float) -> None:
        """Count an outcome. One that is neither right nor documented is a finding."""
        name = f"{outcome.code} {outcome.status}" if outcome.kind == "error" else outcome.kind
        match outcome.kind:
            case "right" | "left":
                good = True
            case "no connection":
                good = self._during(start, end, "restart", "kill")
            case "broken":
                good = self._during(start, end, "kill", "front") or self._during(start, end, "restart", late=True)
                good = good or (self._during(start, end, "restart") and self._during(start, end, "starting"))
            case "error" if outcome.code in ENGINE_ENDED:  # a front end tells its clients that the engine was killed
                good = self.server.has_front_ends and self._during(start, end, "kill")
            case "error":
                good = outcome.code in DOCUMENTED and outcome.status in (200, 503)
                good = good and self._during(start, end, "restart", "drain", "kill", "keeper")
            case _:
                good = False
        with self._lock:
            self.outcomes[name] += 1
            if outcome.kind == "right":
                self.slowest = max(self.slowest, end - start)
        if not good:
            at = f"case {case.number}, {case.route}, {start - self._began:.1f} to {end - self._began:.1f} s"
            self._finding(name, f"{at}: {outcome.detail}")

    def _during(self, start: float, end: float, *kinds: str, late: bool = False) -> bool:
        """True if a span of these kinds overlaps start to end. late: it must begin at most LATE s after start."""
        return any(
            span.start <= end and start <= span.end and not (late and start < span.start - LATE)
            for span in list(self.server.spans)
            if span.kind in kinds
        )

    def _finding(self, kind: str, detail: str) -> None:
        with self._lock:
            self.findings.append({"kind": kind, "seconds": round(time.monotonic() - self._began, 1), "detail": detail})
        print(f"FINDING {kind}: {detail[:400]}", flush=True)

    # -- events

    def _disturb(self, event: Event) -> None:
        """Run one event. The main thread calls it."""
        server, rng = self.server, random.Random(event.seed)
        self.events[event.kind] += 1
        match event.kind:
            case "stop":
                with server.stopped():
                    time.sleep(event.seconds)
            case "drain":
                with server.draining():
                    time.sleep(event.seconds)
                    status, answer = ask(server.port, "POST", COMPLETIONS, b'{"prompt": "a"}')
                    if status != 503 or b"draining" not in answer:
                        self._finding("drain", f"a draining server answers {status}: {answer[:300]!r}")
            case "restart":
                self._restart()
            case "kill":
                server.kill()
                server.start()
                self._warm_up()
            case "cache":
                self.damages.update(server.damage_cache(rng, rng.randint(1, 4)))
                self._restart()
            case "disk":
                server.disk.fill(server.process.pid)
                if event.with_restart:
                    self.damages.update(server.damage_cache(rng, 1))
                    self._restart()
                    self.events["restart with a full disk"] += 1
                else:
                    time.sleep(event.seconds)
                server.disk.free(server.process.pid)
            case "clock":
                server.move_clock(rng.choice(JUMPS))
            case "front":
                if not server.kill_front_end(rng):
                    self._finding("front end", "a front end that was killed is not started again")
            case _:
                raise ValueError(event.kind)

    def _restart(self) -> None:
        self.server.terminate()
        self.server.start()
        self._warm_up()

    # -- checks

    def _warm_up(self) -> None:
        """Send requests that start the server's child processes, then record its memory and open files."""
        server = self.server
        for size in (300_000, 3_000_000):
            ask(server.port, "POST", COMPLETIONS, b'{"prompt": "' + b"a" * size + b'"}')
        for case in self._cases[:8]:
            send(server.port, case, self._wanted[case.number], stream=True, leave_after=None)
        server.memory_at_start, server.files_at_start = resident(server.process.pid), server.num_files()

    def _check_quiet(self) -> None:
        """Pause the load, and check that the server holds no request and no block."""
        self._go.clear()
        began = time.monotonic()
        while time.monotonic() - began < QUIET_SECONDS * 3:
            with self._lock:
                if not self._busy:
                    break
            time.sleep(0.05)
        else:
            self._finding("hung", f"{self._busy} clients still wait {QUIET_SECONDS * 3} s after the load has paused")
        began = time.monotonic()
        while True:
            held = self.server.held()
            files = self.server.num_files() - self.server.files_at_start
            if (not any(held.values()) and files <= MAX_FILES_GROWTH) or time.monotonic() - began > QUIET_SECONDS:
                break
            time.sleep(0.2)
        grown = resident(self.server.process.pid) - self.server.memory_at_start
        at = round(time.monotonic() - self._began, 1)
        self.quiet.append({"seconds": at, "held": held, "files_grown": files, "memory_grown_bytes": grown})
        if any(held.values()):
            self._finding("leak", f"held {QUIET_SECONDS} s after the last request: {held}")
        if files > MAX_FILES_GROWTH:
            self._finding("leak", f"{files} more open files than after the start")
        if grown > MAX_MEMORY_GROWTH:
            self._finding("memory", f"{grown / 2**20:.0f} MiB more than after the start")
        self._go.set()

    def _report(self) -> None:
        while not self._end.wait(PROGRESS_EVERY):
            with self._lock:
                outcomes, malformed, found = dict(self.outcomes), sum(self.malformed.values()), len(self.findings)
            other = sum(outcomes.values()) - outcomes.get("right", 0) - outcomes.get("left", 0)
            print(
                f"{time.monotonic() - self._began:5.0f} s: {outcomes.get('right', 0)} right, "
                f"{outcomes.get('wrong', 0)} wrong, {outcomes.get('left', 0)} left, {other} refused or cut, "
                f"{malformed} malformed, {self.events.total()} events, {found} findings",
                flush=True,
            )

    def figures(self) -> dict[str, Any]:
        shown: collections.Counter[str] = collections.Counter()
        kept = []
        for finding in self.findings:
            shown[finding["kind"]] += 1
            if shown[finding["kind"]] <= MAX_FINDINGS:
                kept.append(finding)
        held = [each["held"] for each in self.quiet]
        return {
            "requests": self.outcomes.total(), "outcomes": dict(sorted(self.outcomes.items())),
            "wrong_streams": self.outcomes["wrong"], "disconnects": self.outcomes["left"],
            "malformed_requests": self.malformed.total(), "malformed": dict(sorted(self.malformed.items())),
            "events": dict(sorted(self.events.items())), "cache_damages": dict(sorted(self.damages.items())),
            "starts": len(self.server.start_seconds), "start_seconds": self.server.start_seconds,
            "leaked_blocks": sum(each["used_blocks"] for each in held), "slowest_right_seconds": round(self.slowest, 1),
            "quiet": self.quiet, "findings_by_kind": dict(shown), "findings": kept,
        }  # fmt: skip


def main() -> None:
    """Run the chaos and print the results. Exits with status 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="demo", help="as for jpaged serve")
    parser.add_argument(
        "--events", nargs="*", choices=EVENTS, default=list(EVENTS), metavar="EVENT", help=", ".join(EVENTS)
    )
    parser.add_argument("--api-server-count", type=int, help="as for jpaged serve")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    front_ends = options.api_server_count
    if front_ends is None:
        options.events = [kind for kind in options.events if kind != "front"]
    cases = draw_cases(options.seed, NUM_CASES)
    schedule = draw_schedule(options.seed, options.minutes * 60, options.events)
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder) / "disk")
        server = ServerProcess(options.model, Path(folder), disk, front_ends)
        try:
            print(f"{len(cases)} offline answers, {len(schedule)} events", flush=True)
            with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # has JAX
                wanted = pool.submit(offline_answers, options.model, cases, SIZES, str(server.cache)).result()
            server.start()
            chaos = Chaos(server, cases, wanted, options.seed)
            chaos.run(options.minutes * 60, schedule)
        finally:
            if hasattr(server, "process"):
                server.process.kill()
                server.process.wait()
            disk.close()
    from jpaged.cli.common.results import machine

    asked = f"--minutes {options.minutes:g} --seed {options.seed} --model {options.model}"
    asked += "" if front_ends is None else f" --api-server-count {front_ends}"
    report = {
        "command": f"python benchmarks/chaos.py {asked} --events {' '.join(options.events)}",
        "machine": machine(), "disk": "tmpfs" if disk.is_mounted else "RLIMIT_FSIZE", **chaos.figures(),
    }  # fmt: skip
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    shown = {key: each for key, each in report.items() if key not in ("machine", "findings", "quiet")}
    print(json.dumps(shown, indent=1))
    sys.exit(bool(chaos.findings))


if __name__ == "__main__":
    main()
