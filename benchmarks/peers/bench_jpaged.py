"""Runs jpaged in a CPU benchmark that compares engines: continuous batching, paged KV, prefix cache.

    PYTHONPATH=FOLDER python benchmarks/peers/bench_jpaged.py --model DIR --workload W2 [--dtype float32]

FOLDER is the folder of the benchmark, with its bench_common.py. W1 is read as a stream, so that each token has a time.
W2 and W3 use `LLM.generate`, like a user's batch.
"""

import asyncio
import sys

import bench_common


def main() -> None:
    """Run one workload and print its JSON line."""
    parser = bench_common.parser(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--attention-implementation")
    args = parser.parse_args()

    import jax

    import jpaged

    options = {
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "attention_implementation": args.attention_implementation,
        "mask_unknown_tokens": False,  # random weights choose ids that the tokenizer does not have
    }

    def sampling(request: dict) -> jpaged.SamplingParams:
        return jpaged.SamplingParams(
            temperature=0, max_tokens=request["output_len"], ignore_eos=True, detokenize=False
        )

    def generate(llm: jpaged.LLM, requests: list[dict], stamps: bench_common.Stamps) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        outputs = llm.generate(prompts, [sampling(request) for request in requests], use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    async def stream(engine: jpaged.AsyncLLM, request: dict, index: int, stamps: bench_common.Stamps) -> list[int]:
        token_ids: list[int] = []
        async for output in engine.generate({"prompt_token_ids": request["prompt"]}, sampling(request)):
            stamps.token(index, len(output.outputs[0].token_ids) - len(token_ids))
            token_ids = output.outputs[0].token_ids
        return token_ids

    def generate_streaming(
        engine: jpaged.AsyncLLM, requests: list[dict], stamps: bench_common.Stamps
    ) -> list[list[int]]:
        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*(stream(engine, request, i, stamps) for i, request in enumerate(requests)))

        return asyncio.run(all_of_them())

    streaming = args.workload == "W1"
    front_door = jpaged.AsyncLLM if streaming else jpaged.LLM
    bench_common.run(
        args,
        f"jpaged/{args.dtype}",
        f"jpaged {jpaged.__version__}, jax {jax.__version__}, python {sys.version.split()[0]}",
        load=lambda: front_door(args.model, **options),
        generate=generate_streaming if streaming else generate,
        close=lambda engine: engine.close(),
        extra=lambda engine: {"dtype": args.dtype, "compiles_after_ready": engine.stats().compiles_after_ready},
    )


if __name__ == "__main__":
    main()
