"""`jpaged bench throughput`: measures the time of many requests that arrive at once.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import time

from jpaged.cli.bench.workloads import WorkloadFlags
from jpaged.cli.common.results import OutputJson, check_writable, machine, write_json
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput(WorkloadFlags):
    """Run many requests at once. Prints requests and tokens per second, and the wasted fraction of KV memory.

    As in vLLM's benchmark, every request generates a fixed number of tokens, at temperature 1.

    Example: jpaged bench throughput demo --num-prompts 100 --input-len 128 --output-len 64
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""

    output_json: OutputJson = None
    """Write the results to this file, as JSON."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Run the workload once and print the results."""
        options = engine_options(self.engine, self.model_argument)
        check_writable(self.output_json)
        from jpaged import LLM, SamplingParams

        with LLM(**options) as llm:
            llm.wait_until_ready()
            tokenizer = llm.get_tokenizer()
            requests = self.requests(
                vocab_size=llm.spec.vocab_size,
                max_model_len=llm.max_model_len,
                seed=options["seed"],
                encode=tokenizer.encode if tokenizer is not None else None,
            )
            prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
            params = [
                SamplingParams(temperature=self.temperature, max_tokens=request.output_len, ignore_eos=True)
                for request in requests
            ]
            llm.reset_stats()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=True)
            elapsed = time.perf_counter() - start
            stats = llm.stats()
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        output_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        figures = {
            "model": options["model"],
            "elapsed_time": elapsed,
            "num_requests": len(outputs),
            "total_num_tokens": prompt_tokens + output_tokens,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "requests_per_second": len(outputs) / elapsed,
            "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
            "output_tokens_per_second": output_tokens / elapsed,
            "kv_waste": stats.kv_waste,
            "peak_used_blocks": stats.peak_used_blocks,
            "num_blocks": stats.num_blocks,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "preemptions": stats.preemptions,
            "recomputed_tokens": stats.recomputed_tokens,
            "compiles_after_ready": stats.compiles_after_ready,
            "speculation": None if stats.speculation is None else dataclasses.asdict(stats.speculation),
            "machine": machine(),
        }
        print(
            f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
            f"{figures['tokens_per_second']:.2f} total tokens/s, "
            f"{figures['output_tokens_per_second']:.2f} output tokens/s"
        )
        print(f"Total num prompt tokens:  {prompt_tokens}")
        print(f"Total num output tokens:  {output_tokens}")
        print(f"Elapsed time:             {elapsed:.2f} s")
        print(f"KV waste:                 {stats.kv_waste:.2%}")
        print(f"KV blocks, peak:          {stats.peak_used_blocks} of {stats.num_blocks}")
        print(f"Prefix hit tokens:        {stats.prefix_hit_tokens}")
        print(f"Preemptions:              {stats.preemptions} ({stats.recomputed_tokens} tokens recomputed)")
        if (drafts := stats.speculation) is not None:
            print(
                f"Drafts accepted:          {drafts.acceptance_rate:.2%} of {drafts.draft_tokens}, "
                f"{drafts.tokens_per_draft:.2f} tokens per row and step with drafts"
            )
        print(f"Compiles after ready:     {stats.compiles_after_ready}")
        print("Machine:                  " + ", ".join(f"{name} {value}" for name, value in figures["machine"].items()))
        write_json(self.output_json, figures)
        return 0
