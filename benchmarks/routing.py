"""Routers of several engines: their time per request, and the simulated effect of each on prefix hits and latency.

    python benchmarks/routing.py [--seeds 4] [--output FILE]

The time is of `prefix_names`, in a thread that tokenises, and of `choose`, on the event loop. The table is known: each
prompt begins with one of 100 prefixes. The simulated load is that of docs/simulator.md: twelve requests a second, 20
prefixes of 256 tokens, 4 engines of 512 blocks. Takes about a minute.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import random
import statistics
import tempfile
import time

from tqdm import tqdm

from jpaged import cli
from jpaged.cli.results import machine
from jpaged.routing import ROUTERS, prefix_names

BLOCK_SIZE = 16
LENGTHS = (100, 1_000, 10_000, 100_000)
LOAD = (
    "simulate --cost-model demo-cpu --num-requests 3000 --rate 12 --arrivals gamma:2 --prompt-tokens lognormal:128:0.6 "
    "--output-tokens lognormal:48:0.6 --prefixes 20 --prefix-tokens 256 --num-replicas 4 --max-num-seqs 16 "
    "--num-blocks 512"
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Times of one request, in microseconds."""

    router: str
    prompt_tokens: int
    names_us: float
    choose_us: float


def cost(name: str, length: int, repeats: int = 400) -> Cost:
    """Measure a router on 4 engines. Medians."""
    rng, router = random.Random(0), ROUTERS[name]()
    loads, times = [rng.randrange(8) for _ in range(4)], ([], [])
    tail = [rng.randrange(100_000) for _ in range(length)]
    for turn in range(repeats):
        prompt = [turn % 100] * (length // 2) + tail[length // 2 :]
        began = time.perf_counter()
        names = prefix_names(prompt, BLOCK_SIZE) if name == "prefix_affine" else ()
        middle = time.perf_counter()
        router.choose(names, loads)
        times[0].append(middle - began)
        times[1].append(time.perf_counter() - middle)
    names_us, choose_us = (round(statistics.median(each[repeats // 2 :]) * 1e6, 1) for each in times)
    return Cost(name, length, names_us, choose_us)


@dataclasses.dataclass(frozen=True)
class Effect:
    """Result of one simulated run. Times to the first token are in seconds."""

    router: str
    seed: int
    hit_rate: float
    first_token_mean: float
    first_token_p99: float


def effect(name: str, seed: int) -> Effect:
    """Simulate the load with a router."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = pathlib.Path(folder, "result.json")
        words = [*LOAD.split(), "--routing", name.replace("_", "-"), "--seed", str(seed), "--output-json", str(path)]
        if cli.main(words):
            raise SystemExit(f"jpaged {' '.join(words)} failed")
        found = json.loads(path.read_text())
    first = found["seconds"]["first_token"]
    return Effect(name, seed, round(found["hit_rate"], 4), round(first["mean"], 4), round(first["p99"], 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file of the rows")
    args = parser.parse_args()
    costs = [cost(name, length) for name in ROUTERS for length in LENGTHS]
    print(f"{'router':<16}{'prompt tokens':>14}{'names, us':>12}{'choose, us':>12}")
    for row in costs:
        print(f"{row.router:<16}{row.prompt_tokens:>14,}{row.names_us:>12}{row.choose_us:>12}")
    runs = [(name, seed) for name in ROUTERS for seed in range(args.seeds)]
    effects = [effect(*run) for run in tqdm(runs, desc="simulations")]
    print(f"{'router':<16}{'seed':>5}{'hits':>8}{'first token, mean s':>21}{'p99 s':>8}")
    for row in effects:
        print(f"{row.router:<16}{row.seed:>5}{row.hit_rate:>8.1%}{row.first_token_mean:>21}{row.first_token_p99:>8}")
    if args.output:
        rows = {"costs": costs, "effects": effects}
        listed = {name: [dataclasses.asdict(row) for row in of] for name, of in rows.items()}
        args.output.write_text(json.dumps({"machine": machine(), **listed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
