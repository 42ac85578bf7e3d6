"""Runs measurements one after another on a quiet machine, and appends a JSON line for each to a file of results."""

import dataclasses
import datetime
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from suite.configurations import Configuration, Installation
from suite.machine import describe, wait_until_quiet

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """Limits of a measurement."""

    max_others: float = 0.10    # share of the CPUs that other processes may use, before and during a run
    quiet_wait: float = 60.0    # seconds to wait for a quiet machine before a run
    retries: int = 1            # repeats of a run with more than `max_others`
    timeout: float = 600.0      # seconds of one run


@dataclasses.dataclass(frozen=True, slots=True)
class Caches:
    """Folder for compiled programs, in place of the user's own. It is emptied before a cold run."""

    folder: pathlib.Path
    cold: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """A process that has ended. `record` is the last line of JSON that it printed."""

    record: dict[str, Any]
    started_at: float   # monotonic clock
    wall_s: float
    cpu_s: float        # with all children that the process has waited for


@dataclasses.dataclass(slots=True)
class Session:
    """One run of a suite. `broken` counts runs of jpaged that failed."""

    suite: str
    results: pathlib.Path
    installation: Installation
    conditions: Conditions
    broken: int = 0
    started: str = dataclasses.field(default_factory=lambda: datetime.datetime.now().isoformat(timespec="seconds"))

    def measure(
        self, configuration: Configuration, model: str, arguments: Sequence[str], caches: Caches | None = None,
        **labels: Any,
    ) -> dict[str, Any] | None:
        """Measure a configuration and append the record. Returns it, or None if there is nothing to compare.

        A run is repeated if other processes used more than `max_others`. The quietest run counts.
        """
        missing = self.installation.missing(configuration, model)
        if missing is not None:
            print(f"{configuration.name} on {model}: skipped, {missing} does not exist", flush=True)
            return None
        command = self.installation.command(configuration, model, *arguments)
        labels = {"configuration": configuration.name, "model": model, **labels}
        best: dict[str, Any] | None = None
        for _ in range(1 + self.conditions.retries):
            record = labels | self._run(command, configuration, caches)
            print(one_line(record), flush=True)
            if "skipped" in record or "failed" in record:
                best = best or record
                break
            if best is None or others(record) < others(best):
                best = record
            if others(best) <= self.conditions.max_others:
                break
        assert best is not None
        self.append(best)
        return None if "skipped" in best or "failed" in best else best

    def _run(self, command: list[str], configuration: Configuration, caches: Caches | None) -> dict[str, Any]:
        wait_until_quiet(self.conditions.max_others, self.conditions.quiet_wait)
        if caches is not None and caches.cold:
            shutil.rmtree(caches.folder, ignore_errors=True)
        environment = child_environment(configuration.is_jpaged, caches)
        finished = run_process(command, environment, self.conditions.timeout)
        record = finished.record | {"process_wall_s": finished.wall_s, "process_cpu_s": finished.cpu_s}
        if "first_token_at" in record:
            record["to_first_token_s"] = record.pop("first_token_at") - finished.started_at
        if record.get("compiles_after_ready"):
            record["failed"] = f"{record['compiles_after_ready']} programs were compiled after the engine was ready"
        if configuration.is_jpaged and "failed" in record:
            self.broken += 1
        return record

    def append(self, record: dict[str, Any]) -> None:
        """Append a record, with the machine and the start of the session."""
        common = {"suite": self.suite, "session": self.started, "commit": commit(), "machine": describe()}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(common | rounded(record)) + "\n")


def run_process(command: list[str], environment: dict[str, str], timeout: float) -> Finished:
    """Run a process in its own process group, and wait for it. After a failure the record has the field `failed`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as errors:
        start = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True, text=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
            failure = f"exit status {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            failure = f"not done after {timeout:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        wall = time.monotonic() - start
        errors.seek(0)
        last_lines = errors.read().decode(errors="replace").strip().splitlines()[-3:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    record = json.loads(lines[-1]) if lines else {}
    if failure is not None:
        record["failed"] = ": ".join([failure, *last_lines])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(record, start, wall, cpu)


def child_environment(is_jpaged: bool, caches: Caches | None = None) -> dict[str, str]:
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if is_jpaged:
        environment["JAX_PLATFORMS"] = "cpu"
    else:
        environment.pop("PYTHONPATH", None)  # names of jpaged's checkout would hide a peer's packages
    if caches is not None:
        # vLLM, Transformers and jpaged keep compiled code in the first folder, torch.compile in the second
        environment |= {
            "XDG_CACHE_HOME": str(caches.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(caches.folder / "torchinductor"),
        }
    return environment


def others(record: Mapping[str, Any]) -> float:
    """Share of the CPUs that other processes used during a record's measurement. 0 where it was not measured."""
    return max([record.get("others_cpu", 0.0), *(step["others_cpu"] for step in record.get("steps", []))])


def rounded(value: Any) -> Any:
    """Round floats to 5 significant digits, also inside lists and dicts."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def one_line(record: dict[str, Any]) -> str:
    """Describe a record in a line for the terminal."""
    labels = [str(record[name]) for name in ("round", "model", "workload", "start", "configuration") if name in record]
    for reason in ("failed", "skipped"):
        if reason in record:
            return f"{' '.join(labels)}: {reason}: {record[reason]}"
    figures = [
        f"{record[name]:.4g} {unit}"
        for name, unit in (
            ("output_tok_s", "tokens/s"), ("first_token_ms", "ms to the first token"),
            ("to_first_token_s", "s to the first token"), ("process_cpu_s", "s of CPU"), ("peak_rss_mib", "MiB"),
        )
        if name in record
    ]  # fmt: skip
    figures += [f"{step['rows']}x{step['keys']} {step['step_ms']:.3g} ms" for step in record.get("steps", [])]
    return f"{' '.join(labels)}: {', '.join(figures)}; others {others(record):.2f}"


def commit() -> str:
    """Return the commit of this checkout, or an empty string outside of one."""
    try:
        found = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def exit_status(session: Session) -> int:
    """Return 1 if a run of jpaged failed."""
    if session.broken:
        print(f"{session.broken} runs of jpaged failed", file=sys.stderr)
    return int(session.broken > 0)
