"""Compare jpaged with other engines on CPU, and write docs/performance.md.

    python benchmarks/run.py --suite cpu --peers PEERS         # about 25 minutes: throughput, first token, memory
    python benchmarks/run.py --suite startup --peers PEERS     # about 25 minutes: cold and warm starts
    python benchmarks/run.py --suite scaling --peers PEERS     # about 15 minutes: decode steps by rows, keys, threads
    python benchmarks/run.py --suite recurrent --peers PEERS   # about 10 minutes: throughput with recurrent layers
    python benchmarks/run.py --report                          # seconds: writes the document from recorded results

PEERS is the folder of the peers' environments and of the models. benchmarks/peers/README.md has the commands that make
it. Peers that are not installed are left out. The minutes are for three rounds on two quiet cores.

A suite appends a line of JSON for each run to SUITE_suite.jsonl in benchmarks/results, then writes the document. It
first removes this machine's former results, unless --append is used. It exits with 1 if a run of jpaged fails, compiles
after ready, or returns a wrong number of tokens.
"""

import argparse
import json
import os
import pathlib
import sys

from suite.configurations import PEERS, Installation
from suite.machine import describe
from suite.plans import MODELS, Choice, run_cpu, run_recurrent, run_scaling, run_startup
from suite.records import machine_name, read
from suite.session import Conditions, Session, exit_status

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUITES = {"cpu": run_cpu, "startup": run_startup, "scaling": run_scaling, "recurrent": run_recurrent}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    limits = Conditions()
    parser.add_argument("--suite", choices=SUITES, help="measurements to make")
    parser.add_argument("--report", action="store_true", help="only write the document")
    parser.add_argument("--peers", type=pathlib.Path, help="folder of the peers and models")
    parser.add_argument(
        "--python", type=pathlib.Path, default=pathlib.Path(sys.executable), help="interpreter that has jpaged"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: both)")
    parser.add_argument(
        "--workloads", nargs="+", choices=["W1", "W2", "W3"],
        help="workloads of the suite cpu (default: all; W1 and W2 for the larger model)",
    )  # fmt: skip
    parser.add_argument(
        "--peers-only", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME",
        help=f"peers to measure next to jpaged: {', '.join(PEERS)} (default: all; no name: jpaged alone)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", nargs="+", type=positive, default=[1, 2],
        help="CPU threads, in scaling and recurrent (default: 1 2)",
    )  # fmt: skip
    parser.add_argument(
        "--max-others", type=float, default=limits.max_others, help="CPU share of others (default: %(default)s)"
    )
    parser.add_argument(
        "--quiet-wait", type=float, default=limits.quiet_wait, help="seconds to wait for quiet (default: %(default)s)"
    )
    parser.add_argument("--retries", type=int, default=limits.retries, help="of a noisy run (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=limits.timeout, help="seconds of a run (default: %(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the recorded results of former runs")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks/results", help="folder of results")
    parser.add_argument("--document", type=pathlib.Path, default=ROOT / "docs/performance.md", help="document to write")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if args.report == (args.suite is not None):
        parser.error("needs either --suite or --report")
    if args.suite is not None:
        if args.peers is None:
            parser.error("--suite needs --peers, the folder of the peers (benchmarks/peers/README.md)")
        if not (args.peers / "workload.json").is_file():
            parser.error(f"--peers {args.peers}: has no workload.json: make it (benchmarks/peers/README.md)")
        cpus = len(os.sched_getaffinity(0))
        if args.suite in ("scaling", "recurrent") and max(args.threads) > cpus:
            parser.error(f"--threads {max(args.threads)}: this process may use {cpus} CPUs")
    if not args.results.is_dir():
        parser.error(f"--results {args.results}: is not a folder")
    return args


def forget(results: pathlib.Path) -> None:
    """Remove this machine's results from a file."""
    name = machine_name({"machine": describe()})
    kept = [record for record in read(results) if machine_name(record) != name]
    results.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    args = parse(make_parser(), arguments)
    try:
        from suite.report import write
    except ImportError as error:
        sys.exit(f"the plots need matplotlib ({error}): python -m pip install matplotlib")
    status = 0
    if args.suite is not None:
        results = args.results / f"{args.suite}_suite.jsonl"
        if not args.append:
            forget(results)
        conditions = Conditions(args.max_others, args.quiet_wait, args.retries, args.timeout)
        session = Session(args.suite, results, Installation(args.peers.resolve(), args.python), conditions)
        workloads = None if args.workloads is None else tuple(args.workloads)
        choice = Choice(args.rounds, tuple(args.models), workloads, tuple(args.peers_only), tuple(args.threads))
        SUITES[args.suite](session, choice)
        status = exit_status(session)
    write(args.results, args.document)
    print(f"wrote {args.document}")
    return status


if __name__ == "__main__":
    sys.exit(main())
