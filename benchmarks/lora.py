"""Speed of batches with LoRA adapters on CPU, against the same batch without.

    python benchmarks/lora.py [--shape demo] [--adapters 256] [--rows 32] [--pairs 10] [--output-json FILE]

Two engines in one process answer the same 32 prompts in turn: one without `enable_lora`, one with all adapters in its
slots. Prints the median ratio of the times, and its interval, for

    idle   no adapter in the batch
    mixed  every row has an adapter of its own, of rank 8 or 16
    wide   the same with ranks from 8 to 64, in an engine with max_lora_rank=64; and the time that its bytes predict

The predicted time is the time without adapters, plus the time to read the batch's adapters in each step. Its bandwidth
is that of a sum over an array that fits into no cache. A ratio above 1 is faster than without adapters.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import LLM, LoRARequest, SamplingParams
from jpaged.cli.bench.speculation import median_interval
from jpaged.cli.common.results import machine
from jpaged.models.spec import DecoderSpec, Rope, param_shapes

SHAPES = ("demo", "29m")
PROMPT_LENGTH, NUM_TOKENS = 16, 64


def llama_29m() -> tuple[DecoderSpec, dict[str, Any]]:
    """A Llama of 29M parameters with random weights."""
    spec = DecoderSpec(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=8, num_heads=8, num_kv_heads=4,
        head_dim=64, max_position=2048, rope=Rope(), tie_embeddings=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.standard_normal(shape.shape, np.float32) * 0.05 + ("norm" in str(path[-1]))
        return jnp.asarray(values, shape.dtype)

    return spec, jax.tree_util.tree_map_with_path(leaf, param_shapes(spec, jnp.float32))


def engine(shape: str, rows: int, **options: Any) -> LLM:
    options |= {"max_num_seqs": rows, "max_model_len": 256, "max_num_batched_tokens": 512}
    if shape == "demo":
        return LLM("demo", **options)
    spec, params = llama_29m()
    return LLM(spec, params=params, **options)


def arrays(llm: LLM, rank: int, seed: int) -> dict[str, np.ndarray]:
    """An adapter for all matrices of all layers, by PEFT's names. Its numbers are small, so that answers stay alike."""
    spec, rng, found = llm.spec, np.random.default_rng(seed), {}
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inter = spec.hidden_size, spec.intermediate_size
    sizes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden), "mlp.down_proj": (hidden, inter),
    }  # fmt: skip
    for layer in range(spec.num_layers):
        for name, (outputs, inputs) in sizes.items():
            path = f"model.layers.{layer}.{name}"
            found[f"{path}.lora_A.weight"] = rng.standard_normal((rank, inputs), np.float32) * 0.01
            found[f"{path}.lora_B.weight"] = rng.standard_normal((outputs, rank), np.float32) * 0.01
    return found


def adapter_bytes(llm: LLM, rank: int, itemsize: int) -> int:
    """Bytes of an adapter of `arrays`."""
    return sum(array.size for array in arrays(llm, rank, 0).values()) * itemsize


def seconds(llm: LLM, prompts: list[list[int]], loras: Sequence[LoRARequest | None]) -> float:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=list(loras) if any(loras) else None)
    return time.perf_counter() - start


def bandwidth() -> float:
    """Bytes per second of a sum over 512 MiB, with all cores."""
    array = jnp.ones(2**27, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return array.nbytes / statistics.median(times)


def measure(args: argparse.Namespace, kind: str, ranks: Sequence[int], max_rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    vocab = 4096
    with (
        engine(args.shape, args.rows) as plain,
        engine(
            args.shape, args.rows, enable_lora=True, max_loras=args.adapters, max_lora_rank=max_rank,
            lora_dtype="bfloat16",
        ) as adapted,
    ):  # fmt: skip
        plain.wait_until_ready()
        adapted.wait_until_ready()
        requests: list[LoRARequest] = []
        for number in range(args.adapters if kind != "idle" else 0):
            name = f"adapter-{number}"
            adapted.add_lora(name, arrays(adapted, ranks[number % len(ranks)], number), lora_alpha=16)
            requests.append(LoRARequest(name, number + 1))
        for first in range(0, len(requests), args.rows):  # into the slots
            batch = requests[first : first + args.rows]
            seconds(adapted, [[1, 2, 3]] * len(batch), batch)
        ratios, times, num_bytes = [], [], 0
        for pair in range(args.pairs + 1):
            prompts = rng.integers(1, vocab, (args.rows, PROMPT_LENGTH)).tolist()
            chosen: list[LoRARequest | None] = [None] * args.rows
            if requests:
                numbers = rng.choice(len(requests), args.rows, replace=False)
                chosen = [requests[number] for number in numbers]
                num_bytes = sum(adapter_bytes(adapted, ranks[number % len(ranks)], 2) for number in numbers)
            both = [(plain, [None] * args.rows), (adapted, chosen)]
            found = {llm: seconds(llm, prompts, loras) for llm, loras in (both if pair % 2 else both[::-1])}
            if pair:  # the first warms up
                ratios.append(found[plain] / found[adapted])
                times.append((found[plain], found[adapted], num_bytes))
        compiled = adapted.stats().compiles_after_ready
    low, high = (sorted(ratios)[index] for index in median_interval(len(ratios)))
    result: dict[str, Any] = {
        "kind": kind, "ratio": statistics.median(ratios), "low": low, "high": high, "compiles_after_ready": compiled,
        "seconds_without": statistics.median(t[0] for t in times), "seconds": statistics.median(t[1] for t in times),
    }  # fmt: skip
    if requests:
        speed = bandwidth()
        predicted = [without + NUM_TOKENS * size / speed for without, _, size in times]
        result["bytes_per_step"] = statistics.median(t[2] for t in times)
        result["bandwidth"] = speed
        result["of_predicted"] = statistics.median(
            taken / expected for (_, taken, _), expected in zip(times, predicted, strict=True)
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--adapters", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", default=["idle", "mixed", "wide"])
    parser.add_argument("--output-json")
    args = parser.parse_args()
    kinds = {"idle": ((8, 16), 16), "mixed": ((8, 16), 16), "wide": ((8, 16, 32, 64), 64)}
    results = []
    for kind in args.kinds:
        found = measure(args, kind, *kinds[kind])
        results.append(found)
        more = ""
        if "of_predicted" in found:
            more = f", {found['bytes_per_step'] / 1e6:.0f} MB of adapters a step, {found['of_predicted']:.2f} of the "
            more += f"time that {found['bandwidth'] / 1e9:.1f} GB/s predict"
        interval = f"{found['low']:.3f} to {found['high']:.3f}"
        print(f"{args.shape} {kind:6} {found['ratio']:.3f} ({interval}){more}", flush=True)
    if args.output_json:
        with open(args.output_json, "w") as file:
            values = {"shape": args.shape, "rows": args.rows, "adapters": args.adapters, "pairs": args.pairs}
            json.dump(values | {"machine": machine(), "results": results}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
