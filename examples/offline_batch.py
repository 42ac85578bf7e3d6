"""Complete a few prompts in one batch: `python examples/offline_batch.py [MODEL]`."""

import sys

from jpaged import LLM, SamplingParams


def main() -> None:
    """Print a greedy and a sampled answer to each prompt."""
    prompts = ["def read_json(path):", "class Stack:\n    def __init__(self):"]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        for params in (SamplingParams(temperature=0, max_tokens=48), SamplingParams(seed=1, top_p=0.9, max_tokens=48)):
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                print(f"--- temperature {params.temperature}, {output.outputs[0].finish_reason}")
                print(prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
