"""The configurations that `run.py` measures, and how one of them runs: a process that prints a line of JSON."""

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
QUIET, QUIET_WAIT = 0.10, 60.0  # share of the CPUs that other processes may use, and seconds to wait for that
TIMEOUT = 600  # seconds of one run


@dataclasses.dataclass(frozen=True)
class Config:
    """An engine with its options."""

    name: str
    runner: str
    venv: str | None  # folder in PEERS/venvs; None: the Python that runs the suite
    options: tuple[str, ...] = ()
    converted: str | None = None  # converted checkpoint in PEERS/converted; {model} stands for the model

    @property
    def is_ours(self) -> bool:
        """True for jpaged."""
        return self.venv is None

    def command(self, peers: pathlib.Path, model: str, arguments: Sequence[str]) -> list[str]:
        """The command line of a run."""
        python = sys.executable if self.venv is None else str(peers / "venvs" / self.venv / "bin" / "python")
        command = [python, str(HERE / "peers" / f"bench_{self.runner}.py"), "--model", str(peers / "models" / model)]
        if self.converted is not None:
            command += ["--converted", str(peers / "converted" / self.converted.format(model=model))]
        return [*command, *self.options, *arguments]


# Configurations by the number format of their weights. Each is compared with the best peer of its format.
FORMATS = {
    "bf16": (
        Config("jpaged", "jpaged", None),
        Config("vLLM", "vllm", "vllm"),
        Config("OpenVINO", "openvino", "ov", converted="ov-{model}-fp16"),
        Config("llama.cpp", "llamacpp", "llama", converted="{model}-bf16.gguf"),
        Config("Transformers", "transformers", "hf"),
    ),
    "8 bits": (
        Config("jpaged int8", "jpaged", None, ("--quantization", "int8")),
        Config("OpenVINO int8", "openvino", "ov", converted="ov-{model}-int8"),
        Config("llama.cpp q8_0", "llamacpp", "llama", converted="{model}-q8_0.gguf"),
    ),
    "4 bits": (
        Config("jpaged int4", "jpaged", None, ("--quantization", "int4")),
        Config("OpenVINO int4", "openvino", "ov", converted="ov-{model}-int4"),
        Config("llama.cpp q4_k_m", "llamacpp", "llama", converted="{model}-q4_k_m.gguf"),
    ),
}  # fmt: skip


class RunFailed(Exception):
    """A run ended with an error, or broke a promise."""


def run(
    config: Config, peers: pathlib.Path, model: str, arguments: Sequence[str], env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a configuration in a process of its own. Returns its figures.

    Raises RunFailed if it fails, or if jpaged compiled a program after it was ready.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (env or {})
    paths = [str(HERE / "peers"), str(HERE.parent)] if config.is_ours else [str(HERE / "peers")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    started = time.monotonic()
    command = config.command(peers, model, arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise RunFailed(f"{' '.join(command)}\n{done.stderr.strip()[-2000:]}")
    found = json.loads(lines[-1])
    if config.is_ours and found.get("compiles_after_ready") != 0:
        raise RunFailed(f"{config.name}: {found.get('compiles_after_ready')} programs compiled after ready")
    if "first_token_at" in found:
        found["to_first_token_s"] = found.pop("first_token_at") - started
    return found


def wait_until_quiet() -> None:
    """Wait until other processes use less than QUIET of the CPUs, QUIET_WAIT seconds at most."""
    end = time.monotonic() + QUIET_WAIT
    while time.monotonic() < end:
        busy, total = _cpu_times()
        time.sleep(1)
        busy_after, total_after = _cpu_times()
        if (busy_after - busy) / max(1, total_after - total) < QUIET:
            return


def _cpu_times() -> tuple[int, int]:
    with open("/proc/stat", encoding="ascii") as file:
        times = [int(word) for word in file.readline().split()[1:9]]
    return sum(times) - times[3] - times[4], sum(times)


def machine() -> dict[str, Any]:
    """The machine and the day."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model, "cpus": len(os.sched_getaffinity(0)), "system": platform.platform(terse=True),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
