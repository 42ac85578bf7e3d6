"""Compiled programs of a model that is split over devices which need not be there: collectives, copies, bytes.

    python benchmarks/parallel_programs.py --target h200 --tensor-parallel-size 8 [--pipeline-parallel-size 2]
        [--prefill-context-parallel-size 2] [--layers 4] [--output FILE]

Compiles programs of Llama 3.1 70B's shape, from shapes alone: a step of decodes, the largest one with prompts, and
those that sample; with stages, those of each stage. Needs the target's compiler, jax[cuda13] or jax[tpu], and no
device. Counts the collectives of each program and their bytes, copies of 1 MiB
and more, temporaries, and a device's bytes of weights. `--layers 80` is the whole model.
"""

import argparse
import json
import os
import pathlib
import re
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jpaged.collectives import COLLECTIVES
from jpaged.config import EngineConfig
from jpaged.engine.step_plan import SamplerVariant
from jpaged.loading.model_description import describe
from jpaged.models.sharding import shards_of, whole_bytes
from jpaged.models.stages import stages_of
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.memory import plan as memory
from jpaged.runtime.placement import Placement
from jpaged.runtime.prediction.program_text import Program, array_bytes
from jpaged.runtime.step.batch import ForwardShape
from jpaged.runtime.step.output_programs import SampleShape
from jpaged.runtime.targets import TARGETS, Target

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}  # fmt: skip
LARGE = 1 << 20  # bytes of a copy that counts
BLOCKS = 4096    # of the KV pool
ROWS = 64


def collectives(text: str) -> dict[str, list[int]]:
    """Bytes of the result of each collective of a program, by kind."""
    found: dict[str, list[int]] = {}
    for operation in Program(text).operations():
        if kind := operation.collective:
            # the start of an asynchronous one shows its operands first
            with_operands = operation.is_transfer and operation.shape.startswith("(")
            sizes = array_bytes(operation.shape, anywhere=True)
            found.setdefault(kind, []).append(sum(sizes[len(sizes) // 2 :] if with_operands else sizes))
    return found


def large_copies(text: str) -> list[tuple[str, int]]:
    """Copies of LARGE bytes and more: name and bytes."""
    return [(op.name, op.num_bytes) for op in Program(text).operations() if op.kind == "copy" and op.num_bytes >= LARGE]


def measure(target_name: str, sizes: dict[str, Any], layers: int) -> list[dict[str, Any]]:
    """The figures of each stage. sizes: options of the engine."""
    target = TARGETS[target_name]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "config.json")
        path.write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": layers}))
        config = EngineConfig(model=str(path), max_model_len=4096, **sizes)
        placement = Placement.for_target(target, shards_of(config))
        described = describe(config, target.platform, [placement.mesh] * config.pipeline_parallel_size)
    stages = stages_of(described.spec, config.pipeline_parallel_size)
    trees = described.params if isinstance(described.params, tuple) else (described.params,)
    return [
        {"target": target.device_kind, **sizes, "stage": stage.index, "layers": len(tree["layers"])}
        | _of_stage(Blueprint.draw(ServedModel(described.spec, tree, stage=stage), config, placement), target)
        for stage, tree in zip(stages, trees, strict=True)
    ]


def _of_stage(blueprint: Blueprint, target: Target) -> dict[str, Any]:
    build, params = blueprint.with_blocks(BLOCKS), blueprint.model.params
    result: dict[str, Any] = {
        "weights_of_a_device": memory.tree_bytes(params), "of_these_on_every_device": whole_bytes(params),
        "attention": blueprint.implementation, "programs": {},
    }  # fmt: skip
    most = max(shape.tokens for shape in blueprint.program_shapes if isinstance(shape, ForwardShape))
    for shape in blueprint.program_shapes:
        if isinstance(shape, ForwardShape):
            wanted = shape.rows == ROWS if shape.is_decode else shape.tokens == most
        else:
            wanted = isinstance(shape, SampleShape) and shape.rows == ROWS
            wanted = wanted and shape.variant is not SamplerVariant.FULL
        if not wanted:
            continue
        with target.tracing():
            program: Any = build.compile(shape)
        text = program.as_text()
        found = collectives(text)
        result["programs"][str(shape)] = {
            "collectives": {kind: {"count": len(sizes), "bytes": sum(sizes)} for kind, sizes in found.items()},
            "copies_of_a_mib": large_copies(text),
            "temporaries": program.memory_analysis().temp_size_in_bytes,
            "starts_early": len(re.findall(rf"({'|'.join(COLLECTIVES)})-start\(", text)),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200", choices=[name for name in TARGETS if name != "cpu"])
    for name, default in (("tensor", 8), ("pipeline", 1), ("prefill_context", 1)):
        flag = f"--{name.replace('_', '-')}-parallel-size"
        parser.add_argument(flag, dest=f"{name}_parallel_size", type=int, default=default)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file; the stages are added to it")
    args = parser.parse_args()
    sizes = {name: size for name, size in vars(args).items() if name.endswith("_parallel_size")}
    result = measure(args.target, sizes, args.layers)
    print(json.dumps(result, indent=1))
    if args.output:
        runs = json.loads(args.output.read_text()) if args.output.exists() else []
        args.output.write_text(json.dumps([*runs, *result], indent=1) + "\n")


if __name__ == "__main__":
    main()
