"""The measurements of the three suites, in order.

Every round measures each configuration once, one process each, so that a slow hour of the machine affects all of them.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from suite.configurations import CONFIGURATIONS, JPAGED, LONG, PEERS, Configuration
from suite.session import Caches, Session, child_environment, one_line, run_process

MODELS = ("tiny-llama-60m", "qwen2-0.5b-shape")
WORKLOADS = {"tiny-llama-60m": ("W1", "W2", "W3"), "qwen2-0.5b-shape": ("W1", "W2")}
SLOW_SECONDS, SLOW_RATIO = 30.0, 0.5
RECURRENT_MODEL = "qwen3.5-30m"
STEP_MODEL = "tiny-llama-60m"
STEP_ROWS, STEP_KEYS = (1, 4, 16, 64), (64, 512, 1024, 2048, 4096, 8192)
MOST_KEYS = 65_536  # keys of all rows: 512 MiB of KV in bfloat16
STEP_ENGINES = ("jpaged", "openvino", "vllm")  # engines that keep the KV of finished requests


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The part of a suite to run."""

    rounds: int = 3
    models: tuple[str, ...] = MODELS
    workloads: tuple[str, ...] | None = None   # None: WORKLOADS
    peers: tuple[str, ...] = PEERS
    threads: tuple[int, ...] = (1, 2)          # of the suites `scaling` and `recurrent`

    def configurations(self, weights: Sequence[str], engines: Sequence[str] | None = None) -> list[Configuration]:
        """Return jpaged and the chosen peers, with the given kinds of weights."""
        chosen = [each for each in CONFIGURATIONS if each.is_jpaged or each.engine in self.peers]
        return [each for each in chosen if each.weights in weights and (engines is None or each.engine in engines)]


def rotated(configurations: list[Configuration], number: int) -> list[Configuration]:
    """Return the configurations of a round. Each round begins with another one."""
    start = number % len(configurations)
    return configurations[start:] + configurations[:start]


def run_cpu(session: Session, choice: Choice) -> None:
    """Measure throughput, the first token and memory. W1 has all weights, W2 has bf16 and int8, W3 has bf16."""
    slow: set[tuple[str, str, str]] = set()
    for number in range(choice.rounds):
        for model in choice.models:
            for workload in choice.workloads or WORKLOADS[model]:
                weights = ("bf16", "int8", "int4")[: {"W1": 3, "W2": 2, "W3": 1}[workload]]
                records = []
                for configuration in rotated(choice.configurations(weights), number):
                    if (model, workload, configuration.name) not in slow:
                        arguments = session.installation.workload(workload)
                        records.append(
                            session.measure(configuration, model, arguments, workload=workload, round=number + 1)
                        )
                slow |= {(model, workload, name) for name in not_repeated([r for r in records if r is not None])}


def run_recurrent(session: Session, choice: Choice) -> None:
    """Measure the throughput of W2 on a model with recurrent layers, next to Transformers."""
    for number in range(choice.rounds):
        for threads in choice.threads:
            for configuration in rotated(choice.configurations(("bf16",), (JPAGED, "transformers")), number):
                arguments = (*session.installation.workload("W2"), "--threads", str(threads))
                session.measure(configuration, RECURRENT_MODEL, arguments, workload="W2", round=number + 1)


def not_repeated(records: Sequence[dict[str, Any]]) -> set[str]:
    """Names of peers that need no further round: long runs at less than half of the best peer's rate."""
    rates = {r["configuration"]: r["output_tok_s"] for r in records if not r["configuration"].startswith(f"{JPAGED} ")}
    long = {r["configuration"] for r in records if r["seconds"] > SLOW_SECONDS}
    return {name for name, rate in rates.items() if name in long and rate < SLOW_RATIO * max(rates.values())}


def run_startup(session: Session, choice: Choice) -> None:
    """Measure from the start of a process to its first token: without compiled programs, then with stored ones."""
    with tempfile.TemporaryDirectory(prefix="jpaged-startup-") as folder:
        for number in range(choice.rounds):
            for model in choice.models:
                for configuration in rotated(choice.configurations(("bf16",)), number):
                    arguments = (*session.installation.workload("W1"), "--first-token")
                    for start in ("cold", "warm"):
                        caches = Caches(pathlib.Path(folder) / configuration.engine, start == "cold")
                        session.measure(configuration, model, arguments, caches, start=start, round=number + 1)
            _run_command(session, pathlib.Path(folder) / "command", number + 1)


def _run_command(session: Session, folder: pathlib.Path, number: int) -> None:
    """Measure the whole command `jpaged generate --model demo`, cold and warm."""
    command = [str(session.installation.python), "-m", "jpaged", "generate", "--model", "demo"]
    for start in ("cold", "warm"):
        name = "jpaged generate --model demo"
        environment = child_environment(True, Caches(folder / str(number), start == "cold"))
        finished = run_process(command, environment, session.conditions.timeout)
        record: dict[str, Any] = {"configuration": name, "model": "demo", "start": start, "round": number}
        record |= {"process_wall_s": finished.wall_s, "process_cpu_s": finished.cpu_s}
        if "failed" in finished.record:
            record["failed"] = finished.record["failed"]
            session.broken += 1
        print(one_line(record), flush=True)
        session.append(record)


def step_cases() -> Iterator[str]:
    """ROWSxKEYS of the suite `scaling`. Shorter contexts come first: longer ones find them in the prefix cache."""
    for keys in STEP_KEYS:
        for rows in STEP_ROWS:
            if rows * keys <= MOST_KEYS:
                yield f"{rows}x{keys}"


def run_scaling(session: Session, choice: Choice) -> None:
    """Measure decode steps by rows, keys and threads, in an engine for 8,192 keys and 64 rows."""
    model = long_model(session.installation.peers, STEP_MODEL)
    arguments = ("--max-model-len", str(STEP_KEYS[-1] + 64), "--max-num-seqs", str(STEP_ROWS[-1]), "--kv-gib", "2")
    for number in range(choice.rounds):
        for threads in choice.threads:
            for configuration in rotated(choice.configurations(("bf16",), STEP_ENGINES), number):
                session.measure(
                    configuration, model, (*arguments, "--threads", str(threads), "--steps", *step_cases()),
                    round=number + 1,
                )  # fmt: skip


def long_model(peers: pathlib.Path, model: str) -> str:
    """Make a copy of a model that accepts 16,384 positions, with links to the model's files. Returns the name."""
    source, folder = peers / "models" / model, peers / "models" / f"{model}{LONG}"
    if not source.is_dir():
        sys.exit(f"{source} does not exist: make the models first (benchmarks/peers/README.md)")
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        link = folder / path.name
        if path.name != "config.json" and not link.exists():
            link.symlink_to(path.resolve())
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"max_position_embeddings": 16_384}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder.name
