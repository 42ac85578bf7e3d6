"""Write workload.json: three workloads, as prompt token ids and output lengths. The same on every machine.

    python benchmarks/peers/make_workload.py PEERS

- W1: one request, 128 prompt tokens, 128 output tokens.
- W2: 32 requests, prompts of 32 to 256 tokens, outputs of 16 to 256.
- W3: 32 requests that share 512 prompt tokens and have 32 of their own, 32 output tokens.

Each has a warm-up list with the same prompt lengths and at most 8 output tokens. Its prompts have other tokens, so that
it fills no prefix cache. Standard library only.
"""

import argparse
import json
import pathlib
import random

from common import FIRST_TOKEN_ID, LAST_TOKEN_ID

SHARED = 512  # prompt tokens that the requests of W3 share
WARMUP_OUTPUT = 8


def token_ids(rng: random.Random, count: int) -> list[int]:
    """Draw token ids that the tokenizer of both models has."""
    return [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]


def measured_requests(seed: int) -> dict[str, list[dict]]:
    """Draw the requests of each workload. The order of the draws is part of the workload: all lengths come first."""
    rng = random.Random(seed)
    lengths = [(rng.randint(32, 256), rng.randint(16, 256)) for _ in range(32)]
    prefix = token_ids(rng, SHARED)
    return {
        "W1": [{"prompt": token_ids(rng, 128), "output_len": 128}],
        "W2": [{"prompt": token_ids(rng, prompt), "output_len": output} for prompt, output in lengths],
        "W3": [{"prompt": prefix + token_ids(rng, 32), "output_len": 32} for _ in range(32)],
    }


def warmup_requests(name: str, requests: list[dict]) -> list[dict]:
    """Draw other tokens for the prompts of a workload. The prompts of W3 share another prefix."""
    rng = random.Random(f"warm {name}")
    prefix = token_ids(rng, SHARED)
    result = []
    for request in requests:
        prompt = token_ids(rng, len(request["prompt"]))
        if name == "W3":
            prompt = prefix + prompt[SHARED:]
        result.append({"prompt": prompt, "output_len": min(WARMUP_OUTPUT, request["output_len"])})
    return result


def workloads() -> dict[str, dict[str, list[dict]]]:
    """All workloads by name: their `requests` and their `warmup`."""
    return {
        name: {"requests": requests, "warmup": warmup_requests(name, requests)}
        for name, requests in measured_requests(1).items()
    }


def main() -> None:
    """Write the file, and print the size of each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=pathlib.Path, help="folder for workload.json")
    args = parser.parse_args()
    made = workloads()
    for name, lists in made.items():
        prompt = sum(len(request["prompt"]) for request in lists["requests"])
        output = sum(request["output_len"] for request in lists["requests"])
        print(f"{name}: {len(lists['requests'])} requests, {prompt} prompt tokens, {output} output tokens")
    (args.peers / "workload.json").write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main()
