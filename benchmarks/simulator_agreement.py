"""Error of the simulator: a real engine and its simulation under the same load.

    python benchmarks/simulator_agreement.py --cost-model FILE [--model demo] [--rates inf 2] [--num-requests 60]

FILE is from `jpaged bench steps` with the same engine options, on the same machine. Requests arrive in real time, with
lengths from a seed. The simulation gets the same arrivals. Prints both results for each rate. Real runs of all rates
alternate. For each rate the run with the smallest median time between tokens counts: it was disturbed least.
"""

import argparse
import dataclasses
import itertools
import time
from typing import Any

import numpy as np

from jpaged.cli.bench.steps import engine_shape
from jpaged.cli.common.results import machine
from jpaged.engine.engine import Engine
from jpaged.frontend.build import build_engine
from jpaged.params.sampling import SamplingParams
from jpaged.simulator.cost import read_cost_model
from jpaged.simulator.load import Arrival, ArrivalTimes, GeneratedLoad, LengthDistribution
from jpaged.simulator.simulation import SimulationOptions, simulate


def run_real(engine: Engine, arrivals: list[Arrival], vocab_size: int) -> dict[str, float]:
    """Serve a load in real time. Returns metrics under the same names as `run_simulated`."""
    rng = np.random.default_rng(1)
    engine.reset_stats()
    token_times: dict[str, list[float]] = {str(number): [] for number in range(len(arrivals))}
    left = list(enumerate(arrivals))[::-1]
    start = time.perf_counter()
    while left or engine.has_work:
        now = time.perf_counter() - start
        while left and left[-1][1].time <= now:
            number, arrival = left.pop()
            prompt = {"prompt_token_ids": rng.integers(0, vocab_size, arrival.prompt_tokens).tolist()}
            params = SamplingParams(temperature=1.0, max_tokens=arrival.output_tokens, ignore_eos=True)
            engine.add_request(str(number), prompt, params, stream=True)
        if not engine.has_work:
            time.sleep(min(0.001, max(left[-1][1].time - now, 0)))
            continue
        outputs: Any = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            token_times[output.request_id].append(now)
    first = [times[0] - arrival.time for times, arrival in zip(token_times.values(), arrivals, strict=True)]
    ends = [times[-1] - arrival.time for times, arrival in zip(token_times.values(), arrivals, strict=True)]
    gaps = [late - early for times in token_times.values() for early, late in itertools.pairwise(times)]
    duration = max(times[-1] for times in token_times.values())
    stats = engine.stats()
    return {
        "output tokens/s": sum(arrival.output_tokens for arrival in arrivals) / duration,
        "duration, s": duration,
        "steps": stats.steps,
        "first token p50, s": float(np.percentile(first, 50)),
        "first token p90, s": float(np.percentile(first, 90)),
        "between tokens p50, s": float(np.percentile(gaps, 50)),
        "between tokens p90, s": float(np.percentile(gaps, 90)),
        "end to end p50, s": float(np.percentile(ends, 50)),
        "end to end p90, s": float(np.percentile(ends, 90)),
        "KV waste, %": 100 * stats.kv_waste,
    }


def run_simulated(arrivals: list[Arrival], options: SimulationOptions) -> dict[str, float]:
    """Simulate a load. Returns its metrics."""
    result = simulate(arrivals, options)
    return {
        "output tokens/s": result.per_second(result.output_tokens),
        "duration, s": result.duration,
        "steps": result.steps,
        "first token p50, s": result.first_token.p50,
        "first token p90, s": result.first_token.p90,
        "between tokens p50, s": result.inter_token.p50,
        "between tokens p90, s": result.inter_token.p90,
        "end to end p50, s": result.end_to_end.p50,
        "end to end p90, s": result.end_to_end.p90,
        "KV waste, %": 100 * result.kv_waste,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cost-model", required=True, help="file of `jpaged bench steps`, or name of a shipped model")
    parser.add_argument("--model", default="demo", help="folder or name of the model (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[float("inf"), 2.0], help="requests a second")
    parser.add_argument("--num-requests", type=int, default=60, help="requests of each run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="real runs of each rate (default: %(default)s)")
    args = parser.parse_args()
    cost = read_cost_model(args.cost_model)
    built = build_engine(args.model, None, {"enable_prefix_caching": False}, progress=True)
    shape = engine_shape(built.engine.runner)
    if cost.engine is not None and dataclasses.astuple(cost.engine) != dataclasses.astuple(shape):
        print(f"the cost model was measured on an engine with other sizes: {cost.engine}")
    loads = {
        rate: list(
            GeneratedLoad(
                num_requests=args.num_requests,
                times=ArrivalTimes("poisson", rate),
                prompt_tokens=LengthDistribution("prompt_tokens", "lognormal:128:0.6"),
                output_tokens=LengthDistribution("output_tokens", "lognormal:48:0.6"),
                max_model_len=shape.max_model_len,
            )
        )
        for rate in args.rates
    }
    run_real(built.engine, loads[args.rates[0]][:8], built.spec.vocab_size)  # warm-up: every program has run once
    runs: dict[float, list[dict[str, float]]] = {rate: [] for rate in loads}
    for _ in range(args.repeats):
        for rate, arrivals in loads.items():
            runs[rate].append(run_real(built.engine, arrivals, built.spec.vocab_size))
    for rate, arrivals in loads.items():
        real = min(runs[rate], key=lambda run: run["between tokens p50, s"])
        simulated = run_simulated(arrivals, SimulationOptions(shape=shape, cost=cost, prefix_caching=False))
        print(f"\n{args.num_requests} requests, {rate} a second{'':<20}{'engine':>12}{'simulated':>12}{'off':>8}")
        for name, value in real.items():
            print(f"{name:<50}{value:>12.4g}{simulated[name]:>12.4g}{simulated[name] / value - 1:>+8.0%}")
    built.engine.close()
    print("\nMachine: " + ", ".join(f"{name} {value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
