"""Compares jpaged with other engines on this CPU, and writes docs/performance.md.

    python benchmarks/run.py --suite cpu --peers PEERS       # about 20 minutes on a quiet machine
    python benchmarks/run.py --suite startup --peers PEERS   # about 5 minutes
    python benchmarks/run.py --suite scaling --peers PEERS   # about 8 minutes; jpaged alone
    python benchmarks/run.py --report                        # write the document from the stored results again

PEERS is a folder with the engines, models and workloads: benchmarks/peers/README.md makes it. Every round runs all
configurations once, in turn, so a slower hour of the machine slows all of them. Every run must generate the number of
tokens that was asked for, and jpaged must compile nothing after it is ready. Results: benchmarks/results/SUITE.jsonl.
"""

import argparse
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import performance_report
from suite import FORMATS, HERE, Config, RunFailed, machine, run, wait_until_quiet
from tqdm import tqdm

MODELS = ("tiny-llama-60m", "qwen2-0.5b-shape")
WORKLOADS = {"tiny-llama-60m": ("W1", "W2", "W3"), "qwen2-0.5b-shape": ("W1", "W2")}
SUITES = ("cpu", "startup", "scaling")
ROWS, KEYS = (1, 4, 16, 64), (64, 512, 2048, 8192)
MOST_KEYS = 131_072  # rows times keys of a scaling case: 1.2 GB of KV for the larger model


def cpu_runs(args: argparse.Namespace) -> Iterator[tuple[Config, str, str]]:
    """Configuration, model and workload of every run of a round. Quantised weights run one stream only."""
    for model in args.models:
        for workload in WORKLOADS.get(model, ("W1",)):
            for name, configs in FORMATS.items():
                if workload in args.workloads and (name == "bf16" or workload == "W1"):
                    yield from ((config, model, workload) for config in configs if chosen(args, config))


def chosen(args: argparse.Namespace, config: Config) -> bool:
    """True if --only names the configuration, or is missing."""
    return args.only is None or config.name in args.only


def measure_cpu(args: argparse.Namespace, results: "Results") -> None:
    """Throughput, time to the first token, and memory."""
    runs = list(cpu_runs(args))
    for number, (config, model, workload) in tqdm(list(itertools.product(range(args.rounds), runs)), unit="run"):
        arguments = ["--workload", str(args.peers / "workload.json"), "--name", workload]
        results.add(config, {"round": number, "model": model, "workload": workload}, args.peers, model, arguments)


def measure_startup(args: argparse.Namespace, results: "Results") -> None:
    """Time and CPU time from the start of the process to the first token of W1, cold and warm.

    Cold is the first start with an empty cache folder. Of jpaged only: other engines keep their caches elsewhere.
    """
    model = args.models[0]
    arguments = ["--workload", str(args.peers / "workload.json"), "--name", "W1", "--first-token"]
    for number, config in tqdm(list(itertools.product(range(args.rounds), FORMATS["bf16"])), unit="run"):
        if not chosen(args, config):
            continue
        with tempfile.TemporaryDirectory() as cache:
            env = {"XDG_CACHE_HOME": cache} if config.is_ours else {}
            for start in ("cold", "warm") if config.is_ours else ("warm",):
                case = {"round": number, "model": model, "start": start}
                results.add(config, case, args.peers, model, arguments, env)


def measure_scaling(args: argparse.Namespace, results: "Results") -> None:
    """Duration of a decode step by rows, keys and threads."""
    model = args.models[0]
    cases = [f"{rows}x{keys}" for rows, keys in itertools.product(ROWS, KEYS) if rows * keys <= MOST_KEYS]
    config = FORMATS["bf16"][0]
    for number, threads in tqdm(list(itertools.product(range(args.rounds), (1, 2))), unit="run"):
        arguments = ["--steps", *cases, "--threads", str(threads), "--max-model-len", str(KEYS[-1] + 64)]
        arguments += ["--max-num-seqs", str(ROWS[-1]), "--kv-gib", "2"]
        results.add(config, {"round": number, "model": model, "threads": threads}, args.peers, model, arguments)


class Results:
    """Lines of JSON in a file, one a run."""

    def __init__(self, path: pathlib.Path):
        self.path, self.machine, self.failed = path, machine(), 0

    def add(self, config: Config, case: dict[str, Any], *arguments: Any) -> None:
        """Run a configuration and append its figures. A failed run is reported and counted."""
        wait_until_quiet()
        try:
            found = run(config, *arguments)
        except (RunFailed, OSError) as error:
            self.failed += 1
            print(f"\n{config.name} {case}: {error}", file=sys.stderr)
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"config": config.name} | case | found | self.machine) + "\n")


def main() -> int:
    """Measure a suite, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES)
    parser.add_argument("--peers", type=pathlib.Path, help="folder with the engines, models and workloads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3"], choices=["W1", "W2", "W3"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="configurations to run, such as jpaged vLLM")
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--append", action="store_true", help="keep the results of earlier runs of the suite")
    parser.add_argument("--report", action="store_true", help="write docs/performance.md from the stored results")
    args = parser.parse_args()
    known = [config.name for configs in FORMATS.values() for config in configs]
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"--only {' '.join(sorted(unknown))}: must be of {', '.join(known)}")
    if args.suite is None and not args.report:
        parser.error("name a --suite, or --report")
    failed = 0
    if args.suite is not None:
        if args.peers is None or not (args.peers / "workload.json").exists():
            parser.error(f"--peers {args.peers}: must be a folder as benchmarks/peers/README.md makes it")
        args.peers = args.peers.resolve()
        results = Results(args.results / f"suite_{args.suite}.jsonl")
        if not args.append:
            results.path.unlink(missing_ok=True)
        {"cpu": measure_cpu, "startup": measure_startup, "scaling": measure_scaling}[args.suite](args, results)
        failed = results.failed
    performance_report.write(args.results, HERE.parent / "docs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
