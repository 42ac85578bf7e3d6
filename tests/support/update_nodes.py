"""The two processes of `tests/parallel/test_group_updates.py`: python -m tests.support.update_nodes RANK PORT FOLDER.

FOLDER has the checkpoints `old` (served first), `new` and `other` (of another model). A path below /proc/self/cwd is
another folder in each process. Node 0 updates the weights in many ways, and prints a line of JSON for each. At the end
node 1 ends itself, in the middle of an update.
"""

import asyncio
import json
import os
import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jpaged import AsyncLLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import JPagedError
from jpaged.frontend.build import run_headless
from jpaged.loading import load_model
from jpaged.runtime import weight_update
from tests.support.tiny_engine import sampling_programs
from tests.support.trainer_trees import Checkpoint, easydel

SIZES = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 32, "row_buckets": (8,),
    "token_buckets": (32,), "kv_cache_memory_bytes": 2_000_000, "block_size": 16, "tensor_parallel_size": 2,
}  # fmt: skip
PROMPTS = [[3 + (5 * i + j * (i + 1)) % 90 for j in range(18 + i)] for i in range(3)]
NUM_TOKENS, FEW = 100, 8  # of a request during an update, and of one after it
HERE = "/proc/self/cwd"
FAIL, END = "fail", "end"  # files in node 1's folder: the fifth leaf is refused, or ends the process


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def follow(options: dict[str, Any], folder: pathlib.Path) -> int:
    check, calls = weight_update._check, []

    def checked(*leaf: Any) -> None:
        calls.append(leaf)
        if len(calls) % 5 == 0 and pathlib.Path(END).exists():
            os._exit(9)
        if len(calls) % 5 == 0 and pathlib.Path(FAIL).exists():
            raise ValueError("the leaf cannot be read")
        check(*leaf)

    with mock.patch.object(weight_update, "_check", checked):
        return run_headless(str(folder / "old"), options)


def tell(name: str, **values: Any) -> None:
    print(json.dumps({"name": name, **values}), flush=True)


class Leader:
    """Node 0. others: folder of node 1."""

    def __init__(self, llm: AsyncLLM, folder: pathlib.Path, others: pathlib.Path):
        self.llm, self.folder, self.others = llm, folder, others
        self.arrays = load_file(folder / "new" / "model.safetensors")

    async def answer(
        self, prompt: list[int], count: int = FEW, started: asyncio.Event | None = None
    ) -> dict[str, Any]:
        last = None
        try:
            async for output in self.llm.generate({"prompt_token_ids": prompt}, greedy(count)):
                last = output.outputs[0]
                if started is not None and len(last.token_ids) >= FEW:
                    started.set()
        except JPagedError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"ids": list(last.token_ids), "changes": last.weight_changes, "reason": last.finish_reason}

    async def update(self, name: str, weights: Any, **options: Any) -> None:
        """Update the weights, then print the answer of a request."""
        try:
            result = await self.llm.update_weights(weights, version=name, **options)
            told = {"version": result.version, "leaves": result.num_leaves, "references": result.num_by_reference}
        except Exception as error:
            told = {"error": type(error).__name__, "message": str(error)}
        tell(name, **told, problem=self.llm.weights_problem, answer=await self.answer(PROMPTS[0]))

    async def during(self, name: str, weights: Any, mode: str) -> None:
        """Update the weights while requests run."""
        started = [asyncio.Event() for _ in PROMPTS]
        running = [
            asyncio.create_task(self.answer(prompt, NUM_TOKENS, event))
            for prompt, event in zip(PROMPTS, started, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        await self.llm.update_weights(weights, version=name, mode=mode)
        tell(name, running=await asyncio.gather(*running), answer=await self.answer(PROMPTS[0]))
        await self.llm.update_weights(self.folder / "old", version="old")

    async def run(self) -> None:
        new, old = self.folder / "new", self.folder / "old"
        tree = load_model(EngineConfig(model=str(new), dtype="float32")).params
        tell("start", answer=await self.answer(PROMPTS[0]))
        # refused: the old weights serve
        for name in ("alone", "different", "stale"):
            await self.update(f"path {name}", f"{HERE}/{name}")
        for name in ("other", "none"):
            await self.update(f"path {name}", str(self.folder / name))
        mesh = Mesh(np.array(jax.devices()), ("all",))
        spread = jax.make_array_from_callback((2,), NamedSharding(mesh, PartitionSpec("all")), lambda _: np.ones(1))
        await self.update("spread tree", tree | {"final_norm": spread})
        await self.update("spread name", self.arrays | {"model.norm.weight": spread})
        await self.update("wrong shape", self.arrays | {"model.norm.weight": np.ones(3, np.float32)})
        # while requests run
        await self.during("recompute", new, "recompute")
        await self.during("keep", self.arrays, "keep")
        await self.during("wait", tree, "wait")
        await self.during("abort", str(new), "abort")
        # in all forms
        await self.update("iterator", iter(self.arrays.items()))
        await self.update("old path", old)
        await self.update("jax arrays", {name: jnp.asarray(array) for name, array in self.arrays.items()})
        config = json.loads(new.joinpath("config.json").read_text())
        await self.update("trainer", easydel(Checkpoint(config, self.arrays)))
        # errors in the middle
        await self.update("early end", iter(list(self.arrays.items())[:-3]))
        await self.update("repaired", old)
        for name, weights in (("failed path", new), ("failed arrays", self.arrays)):
            self.others.joinpath(FAIL).touch()
            await self.update(name, weights)
            self.others.joinpath(FAIL).unlink()
            await self.update(f"after {name}", weights)
        for level in (1, 2):
            await self.llm.sleep(level)
            await self.llm.wake_up()
            if level == 2:
                await self.update("level 2", tree)
            tell(f"awake {level}", answer=await self.answer(PROMPTS[0]))
        tell("compiles", number=self.llm.stats().compiles_after_ready)
        self.others.joinpath(END).touch()
        await self.update("never", iter(self.arrays.items()))


def main() -> int:
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    options = SIZES | {"nnodes": 2, "node_rank": rank, "master_port": port, "join_timeout": 60}
    with sampling_programs(SamplerVariant.GREEDY):
        if rank == 1:
            return follow(options, folder)
        llm = AsyncLLM(str(folder / "old"), **options)
    llm.wait_until_ready()
    asyncio.run(Leader(llm, folder, folder / "node1").run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
