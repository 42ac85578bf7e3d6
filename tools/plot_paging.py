"""Draw the KV pool of the demo model while it serves requests that begin alike: docs/paging.png.

python tools/plot_paging.py      (needs matplotlib)
"""

import asyncio
import pathlib
from contextlib import aclosing, closing

from jpaged import AsyncLLM, EngineSnapshot, SamplingParams
from jpaged.cli.block_picture import draw

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
SAMPLES = {"stack": 3}  # answers, where there are several
TOKENS = 75  # that each has when the picture is taken


async def until(engine: AsyncLLM, name: str, prompt: str, tokens: int) -> None:
    """Generate until there are so many tokens."""
    params = SamplingParams(n=SAMPLES.get(name, 1), temperature=0.8, seed=3, max_tokens=None, ignore_eos=True)
    async with aclosing(engine.generate(prompt, params, name)) as outputs:
        async for output in outputs:
            if len(output.outputs[0].token_ids) >= tokens:
                return


async def watch(engine: AsyncLLM) -> EngineSnapshot:
    """What the pool holds while six requests run, four of which begin alike, and one of the same kind has ended.

    One of the others has three answers.
    """
    await until(engine, "finished", COMMON + "def copy(source, target):\n", 50)  # leaves its blocks in the cache
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
    """Write the picture."""
    # A pool of 96 blocks: small enough that each can be seen.
    small = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 9 * 2**20}
    with closing(AsyncLLM("demo", row_buckets=(8,), token_buckets=(64,), **small)) as engine:
        snapshot = asyncio.run(watch(engine))
    print(snapshot.pool)
    draw(snapshot, ROOT / "docs" / "paging.png")


if __name__ == "__main__":
    main()
