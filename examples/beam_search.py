"""Beam search over two prompts with a common prefix, and the KV blocks that sharing saves.

Run `python examples/beam_search.py`. Both prompts are Python, because the demo model continues Python. For other
prompts, replace "demo" with the folder or hub id of a larger model.
"""

from typing import Any

from jpaged import LLM, SamplingParams

STACK = "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
PROMPTS = [f"{STACK}    def push(self, item):", f"{STACK}    def __len__(self):"]


def main(**engine_options: Any) -> None:
    """Print the best answer to each prompt, and the peak number of used KV blocks."""
    llm = LLM(model="demo", **engine_options)
    blank_line = llm.get_tokenizer()("\n\n").input_ids  # ends a method
    search = SamplingParams(use_beam_search=True, best_of=4, max_tokens=32, stop_token_ids=blank_line)
    outputs = llm.generate(PROMPTS, search)
    for i, output in enumerate(outputs):
        print(f"answer {i + 1}:\n{output.prompt}{output.outputs[0].text}\n")
    shared = llm.stats()
    llm.close()

    # For comparison: 8 answers of 32 tokens each, as separate requests without prefix caching.
    with LLM(model="demo", enable_prefix_caching=False, **engine_options) as apart:
        alone = SamplingParams(max_tokens=32, ignore_eos=True)
        apart.generate([prompt for prompt in PROMPTS for _ in range(4)], alone)
        separate = apart.stats()
    print(
        f"2 beam searches of 4: {shared.peak_used_blocks} blocks of {shared.block_size} tokens at most, "
        f"{shared.copied_blocks} copied on write; the second found {outputs[1].num_cached_tokens} tokens of the first\n"
        f"8 separate requests:  {separate.peak_used_blocks} blocks; sharing saves "
        f"{1 - shared.peak_used_blocks / separate.peak_used_blocks:.0%}"
    )


if __name__ == "__main__":
    main()
