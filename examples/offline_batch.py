"""Complete a few prompts in one batch. Run `python examples/offline_batch.py [MODEL]`."""

import dataclasses
import sys

from jpaged import LLM, SamplingParams


def main() -> None:
    """Print a greedy and a sampled answer to each prompt."""
    prompts = ["def split_path(path):", "class Lock:\n    def __enter__(self):"]
    greedy = SamplingParams(temperature=0, repetition_penalty=1.15, stop="\n\n\n", max_tokens=64)
    sampled = dataclasses.replace(greedy, temperature=0.3, seed=1)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        for params in (greedy, sampled):
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                print(f"--- temperature {params.temperature}, {output.outputs[0].finish_reason}")
                print(prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
