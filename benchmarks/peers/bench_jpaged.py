"""Runs jpaged: continuous batching, paged KV, prefix cache.

    python benchmarks/peers/bench_jpaged.py --model DIR --workload FILE --name W2 [--quantization int8]

W1 and timed decode steps (`--steps`) read streams, so that each token has a time. Other workloads use `LLM.generate`,
like a user's batch.
"""

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import common

import jpaged


class Jpaged(common.Engine):
    """Methods that `LLM` and `AsyncLLM` share."""

    def __init__(self, engine: jpaged.LLM | jpaged.AsyncLLM):
        import jax

        self._any = engine
        self.version = f"jpaged {jpaged.__version__}, jax {jax.__version__}, python {sys.version.split()[0]}"

    def wait_until_ready(self) -> None:
        """Wait for programs that compile in the background while the engine runs."""
        wait = getattr(self._any, "wait_until_ready", None)  # versions without it are ready once they are loaded
        if wait is not None:
            wait()

    def figures(self) -> dict[str, Any]:
        """Programs compiled after the engine was ready. The suite fails if there is one."""
        return {"compiles_after_ready": self._any.stats().compiles_after_ready}

    def close(self) -> None:
        self._any.close()


class Batch(Jpaged):
    """`LLM.generate` with all requests at once."""

    def __init__(self, args: argparse.Namespace):
        self._engine = jpaged.LLM(str(args.model), **engine_options(args))
        super().__init__(self._engine)

    def generate(self, requests: Sequence[common.Request], arrivals: common.Arrivals) -> list[list[int]]:
        """Generate, without times of tokens."""
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        outputs = self._engine.generate(prompts, [sampling(request) for request in requests], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Streams(Jpaged):
    """`AsyncLLM`, a stream for each request."""

    def __init__(self, args: argparse.Namespace):
        self._engine = jpaged.AsyncLLM(str(args.model), **engine_options(args))
        self._loop = asyncio.Runner()
        super().__init__(self._engine)

    def generate(self, requests: Sequence[common.Request], arrivals: common.Arrivals) -> list[list[int]]:
        """Generate, and record each token's time."""

        async def all_streams() -> list[list[int]]:
            return await asyncio.gather(*(self._stream(each, i, arrivals) for i, each in enumerate(requests)))

        return self._loop.run(all_streams())

    async def _stream(self, request: common.Request, index: int, arrivals: common.Arrivals) -> list[int]:
        token_ids: list[int] = []
        async for output in self._engine.generate({"prompt_token_ids": request.prompt}, sampling(request)):
            arrivals.add(index, len(output.outputs[0].token_ids) - len(token_ids))
            token_ids = list(output.outputs[0].token_ids)
        return token_ids

    def close(self) -> None:
        super().close()
        self._loop.close()


def sampling(request: common.Request) -> jpaged.SamplingParams:
    """Greedy, exactly `output_len` tokens, no text."""
    return jpaged.SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine. Skips the measurement and exits if this version cannot quantise."""
    options = {
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "kv_cache_memory_bytes": None if args.kv_gib is None else args.kv_gib * 2**30,
        "attention_implementation": args.attention_implementation,
        "mask_unknown_tokens": False,  # random weights choose ids that the tokenizer lacks
    }
    if args.quantization is not None:
        if "quantization" not in {field.name for field in dataclasses.fields(jpaged.EngineConfig)}:
            common.skip(f"jpaged {jpaged.__version__} has no engine option `quantization`")
        options["quantization"] = args.quantization
    return options


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["auto", "bfloat16", "float32", "float16"])
    parser.add_argument("--quantization", choices=["int8", "int4"], help="quantise the weights at load")
    parser.add_argument("--attention-implementation", help="name of an attention kernel (default: jpaged's choice)")
    args = common.parse(parser)
    common.main(args, Streams if args.name == "W1" or args.steps is not None else Batch)


if __name__ == "__main__":
    main()
