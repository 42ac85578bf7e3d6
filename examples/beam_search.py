"""A beam search over two prompts with the same beginning, and the KV blocks that sharing saves.

Run it with `python examples/beam_search.py`.

The prompts ask to explain quantum entanglement: one with formulas, one with examples. The demo model cannot answer
them; replace "demo" with a folder or hub id of a larger model for that.
"""

from typing import Any

from jpaged import LLM, SamplingParams


def main(**engine_options: Any) -> None:
    """Print the best answer to each prompt, and the number of KV blocks that were used."""
    llm = LLM(model="demo", trust_remote_code=True, **engine_options)
    sampling_params = SamplingParams(temperature=0.7, top_p=0.9, use_beam_search=True, best_of=4)
    prompts = ["解释量子纠缠现象，并给出数学公式：", "解释量子纠缠现象，并举例说明："]
    outputs = llm.generate(prompts, sampling_params)
    for i, output in enumerate(outputs):
        print(f"请求 {i + 1}: {output.outputs[0].text[:50]}...\n")
    shared = llm.stats()
    llm.close()

    # For comparison: the same number of answers of the same length, each its own request, without sharing.
    with LLM(model="demo", enable_prefix_caching=False, **engine_options) as apart:
        alone = SamplingParams(temperature=0.7, top_p=0.9, ignore_eos=True)
        apart.generate([prompt for prompt in prompts for _ in range(4)], alone)
        separate = apart.stats()
    print(
        f"2 beam searches of 4: {shared.peak_used_blocks} blocks of {shared.block_size} tokens at most, "
        f"{shared.copied_blocks} copied on write; the second found {outputs[1].num_cached_tokens} tokens of the first\n"
        f"8 separate requests:  {separate.peak_used_blocks} blocks; sharing saves "
        f"{1 - shared.peak_used_blocks / separate.peak_used_blocks:.0%}"
    )


if __name__ == "__main__":
    main()
