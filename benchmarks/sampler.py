"""Time of sampling within a decode step: a model of Qwen2-0.5B's shape with random weights, 64 rows.

    python benchmarks/sampler.py [--rows 64] [--layers 24] [--repeats 9]

Programs run in turn, so that a slow minute of the machine affects all of them. A step is the forward pass and the
logits. A sampler's time is that of its program minus that of a program that only computes logits.
"""

import argparse
import dataclasses
import functools
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.step_plan import RowExtras, RowInit, SamplerVariant, StepPlan, mask_words
from jpaged.models import decoder
from jpaged.models.spec import DecoderSpec, Rope, param_shapes
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import row_values
from jpaged.runtime.step.batch import ForwardShape, pack
from jpaged.runtime.step.forward import flat_weights, run_forward
from jpaged.runtime.step.output_programs import SampleShape, lm_head_params
from jpaged.runtime.step.row_extras import ExtrasUploader

NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
CASES = {
    "greedy": (SamplerVariant.GREEDY, {}),
    "temperature": (SamplerVariant.RANDOM, {"temperature": 0.8}),
    "temperature, top_k 50, top_p 0.9": (SamplerVariant.RANDOM, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    "top_p 0.9, flat": (SamplerVariant.RANDOM, {"temperature": 0.8, "top_p": 0.9}),
    "top_p 0.9, one row in 8 flat": (SamplerVariant.RANDOM, {"temperature": 0.8, "top_p": 0.9}),
    "log-probabilities of greedy": (SamplerVariant.FULL, {"logprobs": True}),
    "mask of greedy": (SamplerVariant.FULL, {}),
    "penalties, bias, mask of greedy": (SamplerVariant.FULL, PENALTIES),
    "everything": (
        SamplerVariant.FULL,
        PENALTIES | {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "logprobs": True},
    ),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    spec = DecoderSpec(
        vocab_size=args.vocab, hidden_size=896, intermediate_size=4864, num_layers=args.layers, num_heads=14,
        num_kv_heads=2, head_dim=64, max_position=4096, rope=Rope(), tie_embeddings=True, qkv_bias=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32) * 0.05, x.dtype), param_shapes(spec, "bfloat16")
    )
    device = jax.devices()[0]
    placement = Placement.single(device)
    config = EngineConfig(model="qwen2-0.5b", max_num_seqs=args.rows, max_model_len=1024, row_buckets=(args.rows,))
    build = Blueprint.draw(ServedModel(spec, params), config, placement).with_blocks(args.rows * 64)
    limits, state = build.limits, build.create_state()
    uploader = ExtrasUploader(state, limits.max_model_len, placement)

    shape = ForwardShape(True, args.rows, args.rows, limits.block_size)
    forward = build.compile(shape)
    logits_only = jax.jit(functools.partial(_logits, spec=spec), static_argnames=()).lower(
        lm_head_params(spec, params), state.hidden, jax.ShapeDtypeStruct((args.rows,), np.dtype(np.int32))
    ).compile()  # fmt: skip
    samplers = {variant: build.compile(SampleShape(args.rows, variant)) for variant in SamplerVariant}

    rows = np.arange(args.rows, dtype=np.int32)
    context = 256  # tokens before the decode, in each row
    tables = np.array([(row, 0, i, row * 64 + i) for row in rows for i in range(context // 16 + 1)], np.int32)
    plan = StepPlan(rows, np.ones_like(rows), args.rows, np.ones(args.rows, bool), rows[:0], tables[:0])
    packed = placement.put(pack(plan, np.zeros((0, 3), np.int32), shape))
    blocks_of = np.zeros(state.blocks.shape, np.int32)
    blocks_of[tables[:, 0], tables[:, 2]] = tables[:, 3]
    state = dataclasses.replace(state, blocks=placement.put(blocks_of))

    times: dict[str, list[float]] = {name: [] for name in ("forward pass", "logits", *CASES)}
    states = {}
    for name, (variant, fields) in CASES.items():
        extras = None
        mask = np.full(mask_words(args.vocab), 0xFFFFFFFF, np.uint32)
        if name == "mask of greedy":
            extras = RowExtras(mask=mask)
        if "bias" in name or name == "everything":
            extras = RowExtras(
                token_ids=rng.integers(0, args.vocab, context).astype(np.int32), prompt_len=context // 2,
                bias_ids=np.arange(20, dtype=np.int32), bias=np.ones(20, np.float32),
                mask=mask,
            )  # fmt: skip
        table = np.zeros(state.table.shape, np.int32)
        each = state
        for row in rows.tolist():
            fields_of_row: dict[str, Any] = NEUTRAL | fields
            if "one row in 8" in name and row % 8:
                fields_of_row |= {"top_k": 50}  # random weights make every distribution flat
            init = RowInit(row, context, 1, np.zeros((0, 3), np.int32), **fields_of_row, extras=extras)
            table[row] = row_values(init)
            if extras is not None:
                copied: Any = jax.tree.map(jnp.copy, each.sampling)
                each = uploader.start(dataclasses.replace(each, sampling=copied), init)
        copied = jax.tree.map(jnp.copy, each.sampling) if variant is SamplerVariant.FULL else None
        states[name] = variant, placement.put(table), copied
    weights, parts = flat_weights(params), lm_head_params(spec, params)
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        state, computed = run_forward(forward, weights, state, packed)
        jax.block_until_ready((state, computed))
        times["forward pass"].append(time.perf_counter() - start)
        start = time.perf_counter()
        jax.block_until_ready(logits_only(parts, state.hidden, rows))
        times["logits"].append(time.perf_counter() - start)
        for name, (variant, table, sampling) in states.items():
            start = time.perf_counter()
            inputs = (parts, None, table, sampling, state.hidden, state.output_rows)
            out = jax.block_until_ready(samplers[variant](*inputs))
            times[name].append(time.perf_counter() - start)
            states[name] = variant, *out[:2]  # table and sampling state were donated
    medians = {name: statistics.median(values[1:]) * 1e3 for name, values in times.items()}
    step = medians["forward pass"] + medians["logits"]
    print(f"{args.rows} rows, vocabulary {args.vocab:,}, {args.layers} layers, bfloat16; jax {jax.__version__}, "
          f"{device.device_kind}, {platform.processor() or platform.machine()}")  # fmt: skip
    print(f"{'':36}{'ms':>8}{'sampler ms':>12}{'of the step':>13}")
    for name, median in medians.items():
        more = "" if name in ("forward pass", "logits") else f"{median - medians['logits']:12.1f}"
        share = "" if not more else f"{(median - medians['logits']) / step:12.1%}"
        print(f"{name:36}{median:8.1f}{more}{share}")


def _logits(params: dict, hidden: jax.Array, index: jax.Array, *, spec: DecoderSpec) -> jax.Array:
    return decoder.lm_head(spec, params, jnp.take(hidden, index, axis=0, mode="clip"))


if __name__ == "__main__":
    main()
