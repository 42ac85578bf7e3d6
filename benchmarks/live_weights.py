"""Updates of a running engine's weights: time, memory, compiles and buffers. On CPU, with a Llama of 29M parameters.

    python benchmarks/live_weights.py --kinds donated check --output-json benchmarks/results/live_weights.json
    python benchmarks/live_weights.py --kinds kept names --output-json benchmarks/results/live_weights.json

An optimiser makes new weights with a jitted function, which donates the old ones. `LLM.update_weights` hands them to
the engine, which then generates. Prints:

    donated   the trainer's arrays by reference, one update after each step of the optimiser: the time of a call,
              resident memory, compiles, buffers that are not the trainer's
    kept      the same, with an optimiser that donates nothing: the engine drops the old arrays
    names     numpy arrays by Hugging Face's names, which are copied: the time, and the peak of memory above the start
    check     time to notice deleted weights, which every step of the engine does, and the time of a step of one row
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jpaged import LLM, SamplingParams
from jpaged.cli.common.results import machine
from jpaged.models.families.llama import LLAMA

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from benchmarks.lora import llama_29m

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}
PROMPT = [list(range(1, 17))]
TOKENS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
WARM = 100  # updates before the first measurement; 400 calls of `generate` alone add 3 MiB
MIB = 2**20
KINDS = ("donated", "kept", "names", "check")


def resident() -> float:
    """Memory of this process, in MiB."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def peak_of(call: Callable[[], Any]) -> float:
    """Peak of resident memory during a call above that before it, in MiB."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    call()
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024 - before


def pointers(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def step(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * np.asarray(0.9999, leaf.dtype), tree)


def by_reference(llm: LLM, tree: Any, optimiser: Callable[[Any], Any], updates: int) -> tuple[dict[str, Any], Any]:
    """Run updates. Returns their measurements, and the last tree."""
    calls, pauses, memory, foreign, versions = [], [], [], 0, []
    runner: Any = llm.engine.runner  # a ModelRunner
    for number in range(updates + WARM):
        tree = jax.block_until_ready(optimiser(tree))
        began = time.perf_counter()
        update = llm.update_weights(tree)
        seconds = time.perf_counter() - began
        foreign += sum(a != b for a, b in zip(pointers(runner.params), pointers(tree), strict=True))
        foreign += update.num_leaves - update.num_by_reference
        [output] = llm.generate(PROMPT, TOKENS, use_tqdm=False)
        versions.append(output.outputs[0].weight_version == update.version)
        if number >= WARM:
            calls.append(seconds * 1000)
            pauses.append(update.seconds * 1000)
            memory.append(resident())
    assert all(versions)
    return {
        "updates": updates, "median_ms": statistics.median(calls), "max_ms": max(calls),
        "median_pause_ms": statistics.median(pauses), "max_pause_ms": max(pauses),
        "first_mib": memory[0], "least_mib": min(memory), "most_mib": max(memory), "last_mib": memory[-1],
        "most_of_first": max(memory) / memory[0], "buffers_not_the_trainers": foreign, "leaves": update.num_leaves,
        "compiles_after_ready": llm.stats().compiles_after_ready,
    }, tree  # fmt: skip


def named(llm: LLM, tree: Any) -> dict[str, np.ndarray]:
    """The weights as numpy arrays by Hugging Face's names."""
    found = {}
    for leaf in LLAMA.tensors(tree):
        array = np.asarray((tree if leaf.layer is None else tree["layers"][leaf.layer])[leaf.leaf])
        for tensor in leaf.tensors:
            found[tensor.name] = np.array(tensor.rule.gather(leaf.block(array, tensor)))
    return found


def by_name(llm: LLM, tree: Any, updates: int = 20) -> dict[str, Any]:
    arrays = named(llm, tree)
    calls, peaks = [], []
    for _ in range(updates):
        began = time.perf_counter()
        peaks.append(peak_of(lambda: llm.update_weights(arrays)))
        calls.append((time.perf_counter() - began) * 1000)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(tree)) / MIB
    return {
        "updates": updates, "median_ms": statistics.median(calls), "max_ms": max(calls),
        "model_mib": sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / MIB, "largest_leaf_mib": largest,
        "median_peak_mib": statistics.median(peaks), "max_peak_mib": max(peaks),
        "compiles_after_ready": llm.stats().compiles_after_ready,
    }  # fmt: skip


def of_check(llm: LLM, tree: Any) -> dict[str, float]:
    llm.update_weights(tree)
    runner, times = llm.engine.runner, []
    for _ in range(2000):
        began = time.perf_counter()
        runner.weights_problem()
        times.append(time.perf_counter() - began)
    params = SamplingParams(temperature=0, max_tokens=101, ignore_eos=True)
    steps = []
    for _ in range(5):
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        metrics = output.metrics
        steps.append(((metrics.last_token_time or 0) - (metrics.first_token_time or 0)) / 100)
    check, taken = statistics.median(times), statistics.median(steps)
    return {"check_us": check * 1e6, "step_us": taken * 1e6, "of_step": check / taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--output-json", help="results are added to those in the file")
    args = parser.parse_args()
    if "donated" not in args.kinds:
        # M_MMAP_THRESHOLD: memory of large arrays goes back when they are freed. Freeing takes longer then.
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
    spec, tree = llama_29m()
    results: dict[str, Any] = {}
    with LLM(spec, params=tree, **OPTIONS) as llm:
        llm.wait_until_ready()
        for kind in args.kinds:
            if kind == "check":
                results[kind] = of_check(llm, tree)
            elif kind == "names":
                results[kind] = by_name(llm, tree)
            else:
                optimiser = jax.jit(step, donate_argnums=0) if kind == "donated" else jax.jit(step)
                results[kind], tree = by_reference(llm, tree, optimiser, args.updates)
            print(f"{kind:8}", json.dumps(results[kind]), flush=True)
    if args.output_json:
        path = pathlib.Path(args.output_json)
        before = json.loads(path.read_text())["results"] if path.exists() else {}
        values = {"shape": "29m", "machine": machine(), "results": before | results}
        path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
