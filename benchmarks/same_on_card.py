"""Check that a request's answer on this device has the same bits alone, in a batch, and from cached pages.

    python benchmarks/same_on_card.py [--model demo] [--dtype bfloat16]

32 prompts, half of them sampled with seeds. With programs of one size, tokens and log-probabilities must have the same
bits in any batch. With an engine's default programs, the script only prints the number of requests that differ.
"""

import argparse
import random
import time
from typing import Any

import jpaged

SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256}


def workload(count: int) -> tuple[list[dict[str, list[int]]], list[jpaged.SamplingParams]]:
    """Prompts of 1 to 200 tokens, greedy and seeded."""
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(10, 400) for _ in range(rng.choice((1, 15, 16, 17, 64, 200)))]}
        for _ in range(count)
    ]
    params = [
        jpaged.SamplingParams(
            max_tokens=24, ignore_eos=True, logprobs=3, seed=i, temperature=i % 2 * 0.9, top_p=0.9 if i % 4 == 1 else 1
        )
        for i in range(count)
    ]
    return prompts, params


def answers(outputs: Any) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities of each request."""
    return [
        (tuple(o.outputs[0].token_ids), tuple(step[t].logprob for t, step in zip(
            o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True
        )))
        for o in outputs
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    prompts, params = workload(32)
    bad = 0
    for name, sizes in (("one size", {"row_buckets": (16,), "token_buckets": (256,)}), ("default sizes", {})):
        began = time.perf_counter()
        with jpaged.LLM(args.model, dtype=args.dtype, **SIZES, **sizes) as llm:
            print(f"{name}: started in {time.perf_counter() - began:.1f} s", flush=True)
            together = answers(llm.generate(prompts, params, use_tqdm=False))
            again = answers(llm.generate(prompts, params, use_tqdm=False))
            cached = answers(llm.generate(prompts, params, use_tqdm=False))  # as in `again`: prefixes are in the cache
            alone = [answers(llm.generate(p, s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
        for what, one, other in (
            ("cold and cached", together, again), ("cached, twice", again, cached), ("together and alone", again, alone)
        ):  # fmt: skip
            tokens = sum(a[0] != b[0] for a, b in zip(one, other, strict=True))
            bits = sum(a != b for a, b in zip(one, other, strict=True))
            print(f"  {what}: {tokens} of {len(prompts)} have other tokens, {bits} other bits", flush=True)
            bad += bits * bool(sizes)
    if bad:
        raise SystemExit(f"{bad} answers changed")


if __name__ == "__main__":
    main()
