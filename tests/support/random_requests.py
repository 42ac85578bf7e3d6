"""Random requests and the options of an engine for them, for tests that compare answers bit for bit."""

import random

from jpaged import SamplingParams

OPTIONS = {
    "dtype": "float32",
    "row_buckets": (8,),
    "token_buckets": (64,),
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
}


def workload(count, seed, longest=120):
    """Return random prompts and various sampling parameters, half of them greedy and half seeded."""
    rng = random.Random(seed)
    prompts, params = [], []
    for i in range(count):
        length = rng.choice([1, 2, 15, 16, 17, rng.randint(3, longest)])
        prompts.append({"prompt_token_ids": [rng.randrange(3, 300) for _ in range(length)]})
        sampling = {"temperature": 0} if i % 2 else {"temperature": rng.uniform(0.5, 1.5), "seed": i}
        if i % 4 == 0:
            sampling |= rng.choice([{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.95, "top_k": 40}])
        if i % 7 == 0:
            sampling["logprobs"] = 3
        params.append(SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, **sampling))
    return prompts, params


def answers(outputs):
    """Return (token ids, log-probabilities, finish reason) of each first answer."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].finish_reason) for o in outputs]
