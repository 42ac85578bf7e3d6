"""Draws the KV pool of the demo model while it serves requests with a common prefix: docs/paging.png.

    python tools/plot_paging.py      # needs matplotlib
"""

import argparse
import asyncio
import pathlib
from contextlib import aclosing, closing
from typing import Any

from jpaged import AsyncLLM, EngineSnapshot, SamplingParams
from jpaged.cli.common.block_picture import draw

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMON = '''"""Read and write files: JSON, CSV and plain text. Every function closes what it opens."""

import csv
import json
import pathlib


def read_json(path):
    """Parse a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


'''
BEGUN_ALIKE = {
    "write-json": COMMON + "def write_json(path, value):\n",
    "read-csv": COMMON + "def read_csv(path):\n",
    "read-text": COMMON + "def read_text(path):\n",
    "append-line": COMMON + "def append_line(path, line):\n",
}
STACK = '''class Stack:
    """Last in, first out: push, pop, peek, and how many there are. Raises IndexError when it is empty."""

    def __init__(self):
        self.items = []

'''
ALONE = {"stack": STACK, "fibonacci": "def fibonacci(n):\n"}
SAMPLES = {"stack": 3}  # number of answers, if more than 1
TOKENS = 75  # output tokens of each request when the picture is drawn


async def until(engine: AsyncLLM, name: str, prompt: str, tokens: int) -> None:
    """Generate until an answer has `tokens` tokens."""
    params = SamplingParams(n=SAMPLES.get(name, 1), temperature=0.8, seed=3, max_tokens=None, ignore_eos=True)
    async with aclosing(engine.generate(prompt, params, name)) as outputs:
        async for output in outputs:
            if len(output.outputs[0].token_ids) >= tokens:
                return


async def watch(engine: AsyncLLM) -> EngineSnapshot:
    """Take a snapshot of the pool while six requests run: four have a common prefix, one of the others has `n` = 3."""
    await until(engine, "finished", COMMON + "def copy(source, target):\n", 50)  # its blocks stay in the prefix index
    running = [asyncio.create_task(until(engine, *it, 10**9)) for it in (BEGUN_ALIKE | ALONE).items()]
    while True:
        snapshot = await engine.inspect()
        rows = len(running) + sum(SAMPLES.values()) - len(SAMPLES)
        if len(snapshot.running) == rows and all(r.output_tokens >= TOKENS for r in snapshot.running):
            break
        await asyncio.sleep(0.02)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return snapshot


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    # 96 blocks: few enough to see each.
    small: dict[str, Any] = {
        "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 9 * 2**20,
    }  # fmt: skip
    with closing(AsyncLLM("demo", row_buckets=(8,), token_buckets=(64,), **small)) as engine:
        snapshot = asyncio.run(watch(engine))
    print(snapshot.pool)
    draw(snapshot, ROOT / "docs" / "paging.png")


if __name__ == "__main__":
    main()
