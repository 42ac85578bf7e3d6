"""Where a decode step on CPU spends its time: attention, products with weights, other kernels, and operations of XLA.

    python benchmarks/step_cpu.py MODEL [--rows 1 8 32] [--keys 256] [--attention-implementation xla_loop]

Runs an engine with JAX's profiler. Prints milliseconds per step, and each part's share. The parts add up to the compute
time of the device. The last column is the time from step to step, without the profiler.
"""

import argparse
import collections
import pathlib
import random
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax

import jpaged

STEPS = 64
PARTS = {  # by the kernel's folder
    "paged_attention": "attention", "dot": "products", "quantized_dot": "products", "grouped_dot": "products",
    "row_ops": "norms and gates", "write_qkv": "writes",
}  # fmt: skip
# not `while`: the operations of its body have events of their own
OPERATION = re.compile(r"[a-z][a-z0-9_-]*(fusion|copy|slice|scatter|gather|dot|sort|reduce)[\w.-]*")
COLUMNS = ("attention", "products", "norms and gates", "writes", "XLA")


def part_of(name: str, targets: Mapping[str, str]) -> str | None:
    """Part of a step that a profiler event belongs to; None if it is not an operation of a program."""
    if name in targets:
        return PARTS.get(targets[name].split(".")[1], "XLA")
    return "XLA" if OPERATION.fullmatch(name) else None


def kernels(llm: jpaged.LLM) -> dict[str, str]:
    """The native kernel of each custom call of the programs, by the call's name."""
    found: dict[str, str] = {}
    engine: Any = llm.engine
    for program in engine.runner.programs.programs:
        for line in program.run.as_text().splitlines():
            match = re.search(r"%?(\S+) = .* custom-call\(.*custom_call_target=\"(pallas_kernels\.[\w.]+)", line)
            if match:
                found[match[1].lstrip("%")] = match[2]
    return found


def measure(llm: jpaged.LLM, rows: int, keys: int) -> tuple[dict[str, float], float]:
    """Milliseconds of each part of a decode step, and from step to step."""
    rng = random.Random(rows)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 8000) for _ in range(keys)]} for _ in range(rows)]
    one, many = (
        jpaged.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in (1, STEPS + 1)
    )
    llm.generate(prompts, many, use_tqdm=False)  # the prompts stay in the prefix cache
    seconds = []
    for params in (one, many, one, many):
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    step = (min(seconds[1::2]) - min(seconds[::2])) / STEPS * 1e3
    spent: collections.Counter[str] = collections.Counter()
    targets = kernels(llm)
    for params, sign in ((many, 1), (one, -1)):  # subtract the time of the prompts' last blocks
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                llm.generate(prompts, params, use_tqdm=False)
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    for event in line.events:
                        part = part_of(event.name, targets)
                        if part is not None:
                            spent[part] += sign * event.duration_ns
    return {part: spent[part] / 1e6 / STEPS for part in COLUMNS}, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, or demo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--keys", type=int, default=256, help="keys of a row at the first step (default: %(default)s)")
    parser.add_argument("--attention-implementation", help="cpu or xla_loop (default: jpaged's choice)")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    llm = jpaged.LLM(
        args.model, dtype="bfloat16", max_model_len=args.keys + STEPS + 2, max_num_seqs=max(args.rows),
        attention_implementation=args.attention_implementation, quantization=args.quantization,
        mask_unknown_tokens=False,
    )  # fmt: skip
    llm.wait_until_ready()
    print("rows", *(f"{column:>20}" for column in COLUMNS), f"{'step':>9}")
    for rows in args.rows:
        parts, step = measure(llm, rows, args.keys)
        whole = sum(parts.values())
        cells = (f"{parts[column]:10.2f} ms {parts[column] / whole:6.0%}" for column in COLUMNS)
        print(f"{rows:4}", *cells, f"{step:6.2f} ms", flush=True)
    llm.close()


if __name__ == "__main__":
    main()
