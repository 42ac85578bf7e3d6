"""The simulator at size: seconds, memory, and how much of the time is its own beside the scheduler's.

    python benchmarks/simulator.py [--num-requests 1000000] [--rows 256] [--plot FILE.png] [--output-json FILE]

256 prompt tokens (64 of them one of 100 shared prefixes) and 128 output tokens on average, one replica, prefix cache
on, as many clients as rows and a quarter more. One core. The step times are made up: they do not change what is
measured. CPU seconds are the process's own: on a machine that others use as well they tell more than the clock.
"""

import argparse
import datetime
import os
import pathlib
import platform
import time
from typing import Any

from jpaged.cli.results import check_writable, machine, write_json
from jpaged.engine.scheduler import Scheduler
from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import ArrivalTimes, GeneratedLoad, LengthDistribution
from jpaged.simulator.plot import check_plot, draw
from jpaged.simulator.simulation import SimulationOptions, simulate
from jpaged.simulator.step_load import EngineShape

# A step of 256 rows takes about 10 ms: what an accelerator needs for a model of 8 billion parameters.
COST = CostModel(fixed=5e-3, per_token=1e-5, per_kv_token=5e-8, origin="made up: 5 ms + 10 us a token")


def resident_mib() -> float:
    """Memory that the process has now (Linux)."""
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--output-json", type=pathlib.Path)
    args = parser.parse_args()
    check_writable(args.output_json)
    if args.plot is not None:
        check_plot(args.plot)
    load = GeneratedLoad(
        num_requests=args.num_requests,
        times=ArrivalTimes("poisson", float("inf")),
        prompt_tokens=LengthDistribution("prompt_tokens", "lognormal:192:0.5"),
        output_tokens=LengthDistribution("output_tokens", "lognormal:128:0.5"),
        max_model_len=2048,
        prefixes=100,
        prefix_tokens=64,
    )
    shape = EngineShape(32 * args.rows, 16, args.rows, 2048, 2048)
    inside = {name: _timed(name) for name in ("schedule", "finish", "add")}
    resident: dict[int, float] = {}
    machine_load: dict[int, float] = {0: os.getloadavg()[0]}
    ended = 0

    def progress(count: int) -> None:
        nonlocal ended
        ended += count
        mark = ended * 10 // args.num_requests
        if mark not in resident:
            resident[mark], machine_load[mark] = resident_mib(), os.getloadavg()[0]
            print(
                f"{ended:>12,} requests, {time.perf_counter() - began:8.1f} s, {time.process_time() - cpu_began:.1f} s "
                f"of CPU, {resident[mark]:6.1f} MiB; load of the machine {machine_load[mark]:.1f}", flush=True
            )  # fmt: skip

    began, cpu_began = time.perf_counter(), time.process_time()
    result = simulate(
        load, SimulationOptions(shape=shape, cost=COST, concurrency=args.rows * 5 // 4), progress=progress
    )
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    scheduler = sum(times[0] for times in inside.values())
    print(result.table())
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        f"{seconds:.1f} s in all, {cpu_seconds:.1f} s of CPU; "
        f"resident {resident[10]:.1f} MiB at the end, {resident[1]:.1f} after a tenth"
    )
    for name, spent in (("scheduler and KV manager", scheduler), ("the simulator itself", seconds - scheduler)):
        print(
            f"{name:<26}{spent:>8.1f} s {spent / result.steps * 1e6:>8.1f} us a step "
            f"{spent / result.output_tokens * 1e6:>7.3f} us a sampled token"
        )
    figures = result.as_json()
    del figures["timeline"]
    for latency in figures["seconds"].values():
        del latency["edges"], latency["shares"]
    report = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "num_requests": args.num_requests,
        "seconds": seconds, "cpu_seconds": cpu_seconds, "seconds_in_scheduler": scheduler,
        "resident_mib": {"after_a_tenth": resident[1], "at_the_end": resident[10]},
        "machine_load": {"before": machine_load[0], "in_the_middle": machine_load[5], "after": machine_load[10]},
        "simulated": figures,
    }  # fmt: skip
    write_json(args.output_json, report)
    if args.plot is not None:
        draw(result, args.plot, f"{result.finished_requests:,} requests, {args.rows} rows; {COST.origin}")


def _timed(name: str) -> list[float]:
    """Have a method of the scheduler add up its time in the list."""
    method = getattr(Scheduler, name)
    total = [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            total[0] += time.perf_counter() - start

    setattr(Scheduler, name, timed)
    return total


if __name__ == "__main__":
    main()
