"""Bubbles of the pipeline: turns in which the stages get no step, by number of stages and of requests.

    python benchmarks/pipeline_bubbles.py [--stages 1 2 4] [--requests 1 4 16 32] [--output FILE]

Runs a model of 8 layers with random weights on forced CPU devices. With S stages each turn starts a step of one of S
micro-batches, and S steps are in flight. A turn without a step is a bubble: every stage is idle for the time of a step
once. Prints a row for each load, with
- bubbles: share of turns without a step. With R < S requests S - R of S turns are empty;
- rows: requests of a step that only decodes, smallest and largest, without the first and last tenth of all steps.
No time is measured: CPU devices share the machine's cores.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm  # noqa: E402

from jpaged import LLM, SamplingParams  # noqa: E402
from jpaged.engine.step_plan import StepPlan  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
OUTPUT_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    stages: int
    requests: int
    bubbles: float
    smallest_rows: int
    largest_rows: int


class Load:
    """An engine, and what its steps were."""

    def __init__(self, folder: str, stages: int):
        self.llm = LLM(
            folder, load_format="dummy", dtype="float32", max_model_len=256, max_num_seqs=32,
            pipeline_parallel_size=stages, row_buckets=(8, 16, 32), token_buckets=(128,), max_num_batched_tokens=128,
        )  # fmt: skip
        self.plans: list[StepPlan] = []
        runner: Any = self.llm.engine.runner
        dispatch = runner.dispatch

        def noted(plan: StepPlan) -> object:
            self.plans.append(plan)
            return dispatch(plan)

        runner.dispatch = noted

    def run(self, requests: int) -> tuple[float, list[int]]:
        """The share of empty turns, and the rows of each step of decodes."""
        self.plans.clear()
        self.llm.reset_stats()
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        prompts = [{"prompt_token_ids": [5, 6, 7, 8 + i]} for i in range(requests)]
        self.llm.generate(prompts, params, use_tqdm=False)
        stats = self.llm.stats()
        kept = self.plans[len(self.plans) // 10 : len(self.plans) * 9 // 10]
        rows = [len(plan.rows) for plan in kept if plan.decodes_only]
        return stats.empty_turns / (stats.steps + stats.empty_turns), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--output", type=pathlib.Path, help="JSON file of the rows")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(CONFIG))
        loads = {stages: Load(folder, stages) for stages in tqdm(args.stages, desc="engines", file=sys.stderr)}
        print(f"{'stages':>6} {'requests':>8} {'bubbles':>8} {'rows':>8}")
        for requests in args.requests:
            for stages, load in loads.items():
                bubbles, of_steps = load.run(requests)
                row = Row(stages, requests, round(bubbles, 4), min(of_steps), max(of_steps))
                rows.append(row)
                span = f"{row.smallest_rows}-{row.largest_rows}"
                print(f"{stages:6} {requests:8} {bubbles:8.1%} {span:>8}", flush=True)
        for load in loads.values():
            load.llm.close()
    if args.output:
        args.output.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
