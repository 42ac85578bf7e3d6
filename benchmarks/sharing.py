"""KV blocks saved by sharing prompts between answers, and KV waste, on the demo model.

    python benchmarks/sharing.py

Prints a table and the machine. All figures are from `LLM.stats()`; none is computed from lengths. `peak_used_blocks` is
compared between an engine that shares, and one without a prefix cache that runs the same number of separate requests.
`kv_waste` is measured on a batch of mixed lengths. Exits with 1 if a figure is worse than promised.
"""

import argparse
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
    """Peak number of blocks in use, with shared prompts and with separate requests."""

    name: str
    shared: int
    separate: int

    @property
    def share(self) -> float:
        """Blocks used with sharing, divided by those of separate requests."""
        return self.shared / self.separate


def peak(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> int:
    """Return the peak number of blocks in use while the prompts run. The prefix cache is emptied first."""
    llm.reset_prefix_cache()
    llm.reset_stats()
    llm.generate(prompts, params, use_tqdm=False)
    return llm.stats().peak_used_blocks


def waste(llm: LLM, lengths: Sequence[int], new_tokens: int) -> float:
    """Return the KV waste of a batch of mixed lengths: the share of running requests' slots without a token."""
    llm.reset_prefix_cache()
    llm.reset_stats()
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in lengths]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True), use_tqdm=False)
    return llm.stats().kv_waste


def random_prompt(rng: random.Random, length: int) -> dict[str, list[int]]:
    """Return a prompt of random token ids, which has no prefix in common with other prompts."""
    return {"prompt_token_ids": [rng.randrange(100, 4000) for _ in range(length)]}


def samples(sharing: LLM, separate: LLM) -> Sharing:
    """Compare n samples of one prompt with n requests of the same prompt."""
    prompt = random_prompt(random.Random(0), PROMPT_TOKENS)
    one = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return Sharing(
        f"n={SAMPLES}, prompt of {PROMPT_TOKENS:,} tokens, {NEW_TOKENS} new",
        peak(sharing, [prompt], dataclasses.replace(one, n=SAMPLES)),
        peak(separate, [prompt] * SAMPLES, one),
    )


def beams(sharing: LLM, separate: LLM) -> Sharing:
    """Compare two beam searches of 4 with one request per beam."""
    one = SamplingParams(temperature=0.7, top_p=0.9)
    return Sharing(
        f"{len(SEED_PROMPTS)} beam searches of {BEAMS}, prompts with a common prefix",
        peak(sharing, SEED_PROMPTS, dataclasses.replace(one, use_beam_search=True, best_of=BEAMS)),
        peak(separate, [p for p in SEED_PROMPTS for _ in range(BEAMS)], dataclasses.replace(one, ignore_eos=True)),
    )


def main() -> int:
    """Measure and print. Returns 1 if a figure is worse than promised, else 0."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
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
