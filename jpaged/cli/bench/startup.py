"""`jpaged bench startup`: measures the time from the start of an engine's process to its first token.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from jpaged.cli.common.results import OutputJson, check_writable, machine, write_json
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help
from jpaged.errors import EngineError, RequestError

ROOT = pathlib.Path(__file__).parents[3]
WORK = {"trace": "tracing", "lower": "lowering", "compile": "compiling", "read": "reading compiled programs"}


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Startup:
    """Start an engine in a new process, generate one token, and print the phases of the start.

    The first start is cold: the compilation cache is empty, except for machine code of native kernels. Later starts are
    warm. Phases may overlap, and each counts the CPU seconds of all threads. The times to trace, lower, compile and
    read programs are sums over all threads, until all programs exist. They do not include child processes.

    Example: jpaged bench startup demo
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    warm_starts: int = 1
    """Number of warm starts. The one with the earliest first token is printed."""

    output_json: OutputJson = None
    """Write the measurements of all starts to this file, as JSON."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        options = engine_options(self.engine, self.model_argument)
        if self.warm_starts < 1:
            raise RequestError("warm_starts", self.warm_starts, "must be at least 1")
        if options["compilation_cache_dir"] is not None:
            accepted = "leave it out: the cold start needs an empty folder, and makes a temporary one"
            raise RequestError("compilation_cache_dir", options["compilation_cache_dir"], accepted)
        check_writable(self.output_json)
        from tqdm import trange

        with tempfile.TemporaryDirectory() as folder:
            numbers = trange(1 + self.warm_starts, desc="Starts", disable=not sys.stderr.isatty(), leave=False)
            starts = []
            for number in numbers:
                if not sys.stderr.isatty():
                    print(f"start {number + 1} of {1 + self.warm_starts}", file=sys.stderr, flush=True)
                starts.append(start({**options, "compilation_cache_dir": folder}))
        cold, *warm = starts
        best = min(warm, key=lambda one: one["events"]["first token"]["wall"])
        print(table(cold, best))
        about = machine()
        print("Machine: " + ", ".join(f"{name} {value}" for name, value in about.items()))
        write_json(self.output_json, {"model": options["model"], "cold": cold, "warm": warm, "machine": about})
        return 0


def start(options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine in a new process. Returns its phases, work and events, in seconds. Raises EngineError."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "jpaged.cli.bench.startup_child", json.dumps(options)]
    began, events = time.perf_counter(), {}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONPATH": path}
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            found = json.loads(line)
            events[found.pop("event")] = {"wall": time.perf_counter() - began, **found}
        if child.wait():
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:]
            raise EngineError(f"the engine did not start: {''.join(last)}")
    ended = events.pop("end")
    return {"phases": ended["phases"], "work": ended["work"], "events": events}


def table(cold: dict[str, Any], warm: dict[str, Any]) -> str:
    """Table of the phases of a cold and a warm start."""
    phases = [{name: seconds for name, *seconds in start["phases"]} for start in (cold, warm)]
    names, absent = phases[0] | phases[1], (None, None)
    lines = [f"{'seconds':32}{'cold':>9}{'CPU':>9}{'warm':>9}{'CPU':>9}"]
    lines += [_line(name, *phases[0].get(name, absent), *phases[1].get(name, absent)) for name in names]
    for name in cold["events"]:
        one, other = cold["events"][name], warm["events"][name]
        lines.append(_line(f"from start to {name}", one["wall"], one["cpu"], other["wall"], other["cpu"]))
    lines += [_line(f"sum of {WORK[name]}", cold["work"][name], None, warm["work"][name], None) for name in WORK]
    return "\n".join(lines)


def _line(name: str, *seconds: float | None) -> str:
    return f"{name:32}" + "".join(" " * 9 if each is None else f"{each:9.2f}" for each in seconds)
