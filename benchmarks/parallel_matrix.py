"""Answers of models that are split over several devices, compared with Transformers' and with one device.

    python benchmarks/parallel_matrix.py [--sizes 1 2 4 8] [--stages 1 2] [--contexts 1 2] [--variants llama qwen3 ...]
        [--output FILE]

Runs the checkpoints of tests/golden on forced CPU devices, in float32: every `tensor_parallel_size` with every
`pipeline_parallel_size` and `prefill_context_parallel_size` that 8 devices allow. Stages and contexts are not combined
with each other. Models with experts also run with `enable_expert_parallel`, and all runs repeat with `deterministic`.
Prints a row for each run:
- tokens: greedy tokens equal Transformers' (a difference counts only if the best two are at least 1e-5 apart);
- logprobs: the largest difference from Transformers' log-probabilities;
- bits: with `deterministic`, tokens and log-probabilities equal those of the first run, on one device by default.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm  # noqa: E402

import jpaged  # noqa: E402
from jpaged.errors import ModelLoadError  # noqa: E402
from tests.golden.checkpoints import VARIANTS, Variant, write_checkpoint  # noqa: E402

NEAR = 1e-5  # the best two log-probabilities may swap if they are closer
# one variant of each family
FAMILIES = (
    "llama", "mistral-window", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "mixtral", "gemma", "gemma2", "gemma3",
    "phi3", "olmo2", "olmo3", "smollm3", "starcoder2", "granite", "gpt2", "gpt-neox", "bloom", "falcon-7b",
    "falcon-new", "opt-125m", "deepseek-v2-lite", "deepseek-v3", "gpt-oss",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    variant: str
    tensor: int
    stages: int
    context: int
    experts: bool
    deterministic: bool
    tokens_equal: bool | None = None
    largest_difference: float | None = None
    equal_bits: bool | None = None
    refused: str | None = None
    seconds: float = 0.0


def answers(folder: str, variant: Variant, prompts: list[list[int]], **options: Any) -> list[list[dict[int, float]]]:
    """For each prompt and token: log-probabilities by id, the sampled token first."""
    sizes: dict[str, Any] = {"row_buckets": (8,), "token_buckets": (64,)}
    sizes |= {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    count = len(prompts)
    if options["prefill_context_parallel_size"] > 1:  # so that each device has some tokens of the last third
        sizes |= {"max_num_seqs": 32, "token_buckets": (512,), "max_num_batched_tokens": 512}
        prompts = prompts * 3
    params = jpaged.SamplingParams(temperature=0, max_tokens=variant.num_tokens, ignore_eos=True, logprobs=5)
    with jpaged.LLM(folder, dtype="float32", max_model_len=256, **sizes, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = []
    for output in outputs[-count:]:
        one = output.outputs[0]
        found.append([
            {token: step[token].logprob} | {other: value.logprob for other, value in step.items()}
            for token, step in zip(one.token_ids, one.logprobs or (), strict=True)
        ])  # fmt: skip
    return found


def compare(found: list[list[dict[int, float]]], golden: dict) -> tuple[bool, float]:
    """(tokens equal Transformers', largest difference of log-probabilities), up to each first different token."""
    equal, largest = True, 0.0
    for steps, answer in zip(found, golden["answers"], strict=True):
        for i, step in enumerate(steps):
            recorded = {answer["tokens"][i]: answer["logprobs"][i]}
            recorded |= dict(zip(answer["top_tokens"][i], answer["top_logprobs"][i], strict=True))
            if next(iter(step)) != answer["tokens"][i]:
                best = sorted(recorded.values(), reverse=True)
                if best[0] - best[1] >= NEAR:
                    equal = False
                break
            largest = max([largest, *(abs(step[token] - value) for token, value in recorded.items() if token in step)])
    return equal, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--variants", nargs="+", default=list(FAMILIES), help="names of tests/golden, or all")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file of the rows")
    args = parser.parse_args()
    names = {variant.name for variant in VARIANTS} if args.variants == ["all"] else set(args.variants)
    if unknown := names - {variant.name for variant in VARIANTS}:
        parser.error(f"--variants {' '.join(sorted(unknown))}: not in tests/golden")
    rows: list[Run] = []
    for variant in tqdm([v for v in VARIANTS if v.name in names], desc="models", file=sys.stderr):
        golden = json.loads(variant.answers.read_text())
        prompts = [answer["prompt"] for answer in golden["answers"]]
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(variant, golden["seed"], pathlib.Path(folder))
            config = json.loads(pathlib.Path(folder, "config.json").read_text())
            sparse = any("expert" in key for key in config)
            for deterministic in (False, True):
                for experts in (False, True) if sparse else (False,):
                    first = None
                    for context, stages, size in itertools.product(args.contexts, args.stages, args.sizes):
                        if context * stages * size > DEVICES or context > 1 < stages:
                            continue
                        row = Run(variant.name, size, stages, context, experts, deterministic)
                        began = time.perf_counter()
                        try:
                            found = answers(
                                folder, variant, prompts, tensor_parallel_size=size, pipeline_parallel_size=stages,
                                prefill_context_parallel_size=context, enable_expert_parallel=experts,
                                deterministic=deterministic,
                            )  # fmt: skip
                        except ModelLoadError as error:
                            row = dataclasses.replace(row, refused=str(error))
                        else:
                            first = found if first is None else first
                            equal, largest = compare(found, golden)
                            bits = found == first if deterministic else None
                            row = dataclasses.replace(
                                row, tokens_equal=equal, largest_difference=largest, equal_bits=bits,
                                seconds=round(time.perf_counter() - began, 1),
                            )  # fmt: skip
                        rows.append(row)
                        result = row.refused or f"tokens {row.tokens_equal} logprobs {row.largest_difference:.1e}"
                        bits = "" if row.equal_bits is None else f" bits {row.equal_bits}"
                        kind = f"{' experts' if experts else ''}{' deterministic' if deterministic else ''}"
                        if args.output:
                            args.output.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
                        name = f"{variant.name:20} tensor {size} stages {stages} context {context}{kind}"
                        print(f"{name}: {result}{bits} ({row.seconds} s)", flush=True)
    bad = [row for row in rows if row.tokens_equal is False or row.equal_bits is False]
    print(f"{len(rows)} rows, {len(bad)} with a difference, {sum(row.refused is not None for row in rows)} refused")


if __name__ == "__main__":
    main()
