"""Speed and memory of the simulator: seconds, MiB, and its own share of the time apart from the scheduler's.

    python benchmarks/simulator.py [--num-requests 1000000] [--rows 256] [--plot FILE.png] [--output-json FILE]

Requests have 256 prompt tokens on average, 64 of them from one of 100 shared prefixes, and 128 output tokens. There is
one replica with a prefix cache, and 1.25 times as many clients as rows. The step times are made up: they do not affect
the measurement. It uses one core. CPU seconds are those of the process, and matter more than wall time on a machine
with other work.
"""

import argparse
import datetime
import os
import pathlib
import platform
import time
from typing import Any

from jpaged.cli.results import check_writable, machine, write_json
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import ArrivalTimes, GeneratedLoad, LengthDistribution
from jpaged.simulator.plot import check_plot, draw
from jpaged.simulator.results import SimulationResult
from jpaged.simulator.simulation import SimulationOptions, simulate
from jpaged.simulator.step_load import EngineShape

# A step of 256 rows takes about 10 ms, as for a model of 8 billion parameters on an accelerator.
COST = CostModel(fixed=5e-3, per_token=1e-5, per_kv_token=5e-8, origin="made up: 5 ms + 10 us a token")


def resident_mib() -> float:
    """Return the resident memory of the process in MiB (Linux)."""
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Progress:
    """Prints a line per tenth of the requests, and keeps memory and load of the machine at each tenth."""

    def __init__(self, num_requests: int):
        self._num_requests = num_requests
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._ended = 0
        self.resident: dict[int, float] = {}  # tenth -> MiB
        self.machine_load: dict[int, float] = {0: os.getloadavg()[0]}  # tenth -> load average of a minute

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._began

    @property
    def cpu_seconds(self) -> float:
        """CPU time since the start."""
        return time.process_time() - self._cpu_began

    def __call__(self, count: int) -> None:
        """Count requests that ended."""
        self._ended += count
        tenth = self._ended * 10 // self._num_requests
        if tenth not in self.resident:
            self.resident[tenth], self.machine_load[tenth] = resident_mib(), os.getloadavg()[0]
            print(
                f"{self._ended:>12,} requests, {self.seconds:8.1f} s, {self.cpu_seconds:.1f} s of CPU, "
                f"{self.resident[tenth]:6.1f} MiB; load of the machine {self.machine_load[tenth]:.1f}", flush=True
            )  # fmt: skip


def main() -> None:
    """Run and print."""
    args = _arguments()
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
    in_scheduler = [_timed(name) for name in ("schedule", "finish", "add")]
    progress = Progress(args.num_requests)
    result = simulate(
        load, SimulationOptions(shape=shape, cost=COST, concurrency=args.rows * 5 // 4), progress=progress
    )
    seconds, cpu_seconds = progress.seconds, progress.cpu_seconds
    scheduler = sum(total for (total,) in in_scheduler)
    resident = progress.resident
    print(result.table())
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        f"{seconds:.1f} s in total, {cpu_seconds:.1f} s of CPU; "
        f"resident {resident[10]:.1f} MiB at the end, {resident[1]:.1f} after a tenth"
    )
    for name, spent in (("scheduler and KV manager", scheduler), ("the simulator itself", seconds - scheduler)):
        print(
            f"{name:<26}{spent:>8.1f} s {spent / result.steps * 1e6:>8.1f} us a step "
            f"{spent / result.output_tokens * 1e6:>7.3f} us a sampled token"
        )
    machine_load = progress.machine_load
    report = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "num_requests": args.num_requests,
        "seconds": seconds, "cpu_seconds": cpu_seconds, "seconds_in_scheduler": scheduler,
        "resident_mib": {"after_a_tenth": resident[1], "at_the_end": resident[10]},
        "machine_load": {"before": machine_load[0], "in_the_middle": machine_load[5], "after": machine_load[10]},
        "simulated": _without_curves(result),
    }  # fmt: skip
    write_json(args.output_json, report)
    if args.plot is not None:
        draw(result, args.plot, f"{result.finished_requests:,} requests, {args.rows} rows; {COST.origin}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="rows of the request table (default: %(default)s)")
    parser.add_argument("--plot", type=pathlib.Path, help="file for a picture of the run")
    parser.add_argument("--output-json", type=pathlib.Path, help="file for the figures")
    args = parser.parse_args()
    check_writable(args.output_json)
    if args.plot is not None:
        check_plot(args.plot)
    return args


def _without_curves(result: SimulationResult) -> dict[str, Any]:
    """Return the result as JSON, without its long arrays."""
    figures = result.as_json()
    del figures["timeline"]
    for latency in figures["seconds"].values():
        del latency["edges"], latency["shares"]
    return figures


def _timed(name: str) -> list[float]:
    """Replace a method of the scheduler with one that adds its time to the returned list's only item."""
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
