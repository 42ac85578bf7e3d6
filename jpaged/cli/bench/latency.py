"""`jpaged bench latency`: measures the time from start to end of one batch of equal requests.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import time

import numpy as np

from jpaged.cli.bench.workloads import random_ids
from jpaged.cli.common.results import OutputJson, check_writable, machine, write_json
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help
from jpaged.errors import RequestError

PERCENTILES = (10, 25, 50, 75, 90, 99)


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Measure how long one batch takes. Repeats the batch, and prints the mean and the percentiles."""

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    input_len: int = 32
    """Prompt tokens per request. Their ids are random and differ in each iteration."""

    output_len: int = 128
    """Tokens that each request generates; end-of-sequence tokens are ignored."""

    batch_size: int = 8
    """Requests that run at once."""

    num_iters_warmup: int = 10
    """Warm-up iterations, which are not measured."""

    num_iters: int = 30
    """Measured iterations."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""

    output_json: OutputJson = None
    """Write the results to this file, as JSON."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Run the iterations and print the results."""
        options = engine_options(self.engine, self.model_argument)
        lowest = {"input_len": 1, "output_len": 1, "batch_size": 1, "num_iters_warmup": 0, "num_iters": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise RequestError(name, getattr(self, name), f"must be at least {low}")
        check_writable(self.output_json)
        from jpaged import LLM, SamplingParams

        latencies: list[float] = []
        with LLM(**options) as llm:
            llm.wait_until_ready()
            if self.input_len + self.output_len > llm.max_model_len:
                total = self.input_len + self.output_len
                accepted = f"with --output-len; the engine accepts {llm.max_model_len} tokens: lower one of them"
                raise RequestError("input_len", total, accepted)
            rng = np.random.default_rng(options["seed"])
            params = SamplingParams(temperature=self.temperature, max_tokens=self.output_len, ignore_eos=True)
            for iteration in range(self.num_iters_warmup + self.num_iters):
                prompts = [
                    {"prompt_token_ids": random_ids(rng, self.input_len, llm.spec.vocab_size)}
                    for _ in range(self.batch_size)
                ]
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if iteration >= self.num_iters_warmup:
                    latencies.append(time.perf_counter() - start)
        percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
        mean = float(np.mean(latencies))
        print(f"Avg latency: {mean} seconds")
        for percent, seconds in percentiles.items():
            print(f"{percent}% percentile latency: {seconds} seconds")
        print(f"Output tokens/s: {self.batch_size * self.output_len / mean:.2f}")
        about = machine()
        print("Machine: " + ", ".join(f"{name} {value}" for name, value in about.items()))
        result = {"model": options["model"], "avg_latency": mean, "latencies": latencies, "percentiles": percentiles}
        write_json(self.output_json, {**result, "machine": about})
        return 0
