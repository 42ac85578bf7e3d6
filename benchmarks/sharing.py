"""How much KV cache is saved where answers share a prompt, and how much of it is wasted: in blocks, on the demo model.

    python benchmarks/sharing.py

Prints a table and the machine. Every figure is the engine's own, `LLM.stats()`: `peak_used_blocks`, of an engine that
shares and, for as many separate requests, of one without a prefix cache; and `kv_waste`. None is reckoned from lengths.
"""

import dataclasses
import random
import sys
from collections.abc import Sequence
from typing import Any

from jpaged import LLM, SamplingParams
from jpaged.cli.results import machine

PROMPT_TOKENS, NEW_TOKENS, SAMPLES = 1024, 64, 4
BEAMS = 4
SEED_PROMPTS = ("解释量子纠缠现象，并给出数学公式：", "解释量子纠缠现象，并举例说明：")
SIZES: dict[str, Any] = {
    "max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 512, "row_buckets": (8, 32),
    "token_buckets": (512,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Most blocks that were in use at a time."""

    name: str
    shared: int
    separate: int

    @property
    def share(self) -> float:
        """What is used, of what separate requests use."""
        return self.shared / self.separate


def peak(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> int:
    """Most blocks in use while these prompts run, on an engine that has nothing in its prefix cache."""
    llm.reset_prefix_cache()
    llm.reset_stats()
    llm.generate(prompts, params, use_tqdm=False)
    return llm.stats().peak_used_blocks


def waste(llm: LLM, lengths: Sequence[int], new_tokens: int) -> float:
    """Share of slots without a token in the blocks of running requests, over a batch of mixed lengths."""
    llm.reset_prefix_cache()
    llm.reset_stats()
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in lengths]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True), use_tqdm=False)
    return llm.stats().kv_waste


def random_prompt(rng: random.Random, length: int) -> dict[str, list[int]]:
    """Token ids that no other prompt begins with."""
    return {"prompt_token_ids": [rng.randrange(100, 4000) for _ in range(length)]}


def samples(sharing: LLM, separate: LLM) -> Sharing:
    """n samples of one prompt, and as many requests of it."""
    prompt = random_prompt(random.Random(0), PROMPT_TOKENS)
    one = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return Sharing(
        f"n={SAMPLES}, prompt of {PROMPT_TOKENS:,} tokens, {NEW_TOKENS} new",
        peak(sharing, [prompt], dataclasses.replace(one, n=SAMPLES)),
        peak(separate, [prompt] * SAMPLES, one),
    )


def beams(sharing: LLM, separate: LLM) -> Sharing:
    """The searches of examples/beam_search.py, and as many requests as they have beams."""
    one = SamplingParams(temperature=0.7, top_p=0.9)
    return Sharing(
        f"{len(SEED_PROMPTS)} beam searches of {BEAMS}, prompts that begin alike",
        peak(sharing, SEED_PROMPTS, dataclasses.replace(one, use_beam_search=True, best_of=BEAMS)),
        peak(separate, [p for p in SEED_PROMPTS for _ in range(BEAMS)], dataclasses.replace(one, ignore_eos=True)),
    )


def main() -> int:
    """Measure and print; the exit status is 1 where a figure is worse than what is promised."""
    lengths = random.Random(3).choices(range(257, 1800), k=32)
    with LLM("demo", **SIZES) as sharing, LLM("demo", **SIZES, enable_prefix_caching=False) as separate:
        rows = [samples(sharing, separate), beams(sharing, separate)]
        wasted = waste(sharing, lengths, 64)
    print("| | shared | separate requests | |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.shared} blocks | {row.separate} blocks | {row.share:.1%} |")
    print(f"\nKV waste, {len(lengths)} prompts of {min(lengths)} to {max(lengths):,} tokens, 64 new each: {wasted:.2%}")
    print(machine())
    return int(rows[0].share > 0.35 or wasted > 0.04)


if __name__ == "__main__":
    sys.exit(main())
