"""Cost of structured output: throughput of 32 requests with and without a medium JSON schema.

    python benchmarks/structured.py [--rounds 5]
    python benchmarks/structured.py --model demo

Without --model it uses the shape of Qwen2-0.5B with random weights in bfloat16 (float32 on JAX 0.10), and a tokenizer
of 151,643 tokens trained on the installed Python sources. Runs with and without the schema have the same 32 prompts,
and generate 64 tokens per request. Without jump-forward, both runs sample every token. Runs take turns. The cost is the
median over rounds, each of two runs in a row.
"""

import argparse
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jpaged import LLM, SamplingParams
from jpaged.cli.results import machine
from jpaged.models.spec import DecoderSpec, Rope, param_shapes
from jpaged.params.sampling import StructuredOutputsParams

REQUESTS, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 32, 64, 64, 151_936
TRAINED_ON = 60_000_000  # characters
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 200},  # long enough for all answers to run to max_tokens
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}},
            "required": ["street", "city"],
        },
        "role": {"enum": ["admin", "editor", "reader"]},
    },
    "required": ["name", "age", "email", "role"],
    "additionalProperties": False,
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top_p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
}


def sources() -> Iterator[str]:
    """Yield Python files, the same in every run of one installation."""
    left = TRAINED_ON
    for root in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(root)).rglob("*.py")):
            text = path.read_text(errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def write_tokenizer(folder: str) -> None:
    """Write a byte-level BPE with as many tokens as Qwen2's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=151_643, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sources(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def engine(model: str | None, tokenizer: str, *, jump_forward: bool) -> LLM:
    """Make an engine that runs all requests at the same time."""
    options: dict[str, Any] = {
        "max_model_len": 256, "max_num_seqs": REQUESTS, "row_buckets": (REQUESTS,), "max_num_batched_tokens": 512,
        "token_buckets": (64, 128, 256, 512), "jump_forward": jump_forward, "enable_prefix_caching": False,
    }  # fmt: skip
    if model is not None:
        return LLM(model, **options)
    spec = DecoderSpec(
        vocab_size=VOCAB, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2,
        head_dim=64, max_position=4096, rope=Rope(), tie_embeddings=True, qkv_bias=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    dtype = "float32" if jax.__version__.startswith("0.10.") else "bfloat16"
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * 0.05, leaf.dtype),
        param_shapes(spec, dtype),
    )
    return LLM(spec, params=params, tokenizer=tokenizer, **options)


def seconds_a_token(llm: LLM, params: SamplingParams) -> float:
    """Return seconds per generated token of one run of all requests."""
    rng = np.random.default_rng(1)
    prompts = [{"prompt_token_ids": rng.integers(300, 4000, PROMPT_TOKENS).tolist()} for _ in range(REQUESTS)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken = time.perf_counter() - start
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [NEW_TOKENS] * REQUESTS, [output.outputs[0].stop_reason for output in outputs]
    return taken / sum(lengths)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model with a tokenizer; default: random weights")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: %(default)s)")
    parser.add_argument("--jump-forward", choices=("on", "off", "both"), default="both", help="(default: %(default)s)")
    args = parser.parse_args()
    print(f"{machine()}\n{args.model or 'Qwen2-0.5B shape'}, {REQUESTS} requests of {NEW_TOKENS} tokens")
    print(f"{'':28}{'jump-forward':14}{'tokens/s without':>18}{'with':>10}{'costs':>8}")
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            write_tokenizer(folder)
        for jumps in ("off", "on") if args.jump_forward == "both" else (args.jump_forward,):
            with engine(args.model, folder, jump_forward=jumps == "on") as llm:
                llm.wait_until_ready()
                for name, fields in PARAMS.items():
                    plain = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **fields)
                    asked = StructuredOutputsParams(json=SCHEMA)
                    structured = SamplingParams(max_tokens=NEW_TOKENS, structured_outputs=asked, **fields)
                    runs = [
                        (seconds_a_token(llm, plain), seconds_a_token(llm, structured))
                        for _ in range(args.rounds + 1)
                    ][1:]  # the first round also reads the tokenizer and compiles the schema
                    without, with_it = (1 / statistics.median(times) for times in zip(*runs, strict=True))
                    cost = 1 - statistics.median(one / other for one, other in runs)
                    print(f"{name:28}{jumps:14}{without:18.1f}{with_it:10.1f}{cost:8.1%}", flush=True)


if __name__ == "__main__":
    main()
