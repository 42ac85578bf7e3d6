"""Compiled programs of a model that is split over devices which need not be there: collectives, copies, bytes.

    python benchmarks/parallel_programs.py --target h200 --tensor-parallel-size 8 [--layers 4] [--output FILE]

Compiles the decode and sampling programs of Llama 3.1 70B's shape, from shapes alone. Needs the target's compiler,
jax[cuda13] or jax[tpu], and no device. Counts the collectives of each program and their bytes, copies of 1 MiB
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
from jpaged.loading.described import describe
from jpaged.models.sharding import shards_of, whole_bytes
from jpaged.runtime import memory
from jpaged.runtime.blueprint import Blueprint, ServedModel
from jpaged.runtime.output_programs import SampleShape
from jpaged.runtime.placement import Placement
from jpaged.runtime.program_text import Program, array_bytes
from jpaged.runtime.step import ForwardShape
from jpaged.runtime.targets import TARGETS

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
            # the start of an asynchronous one shows its operand as well
            half = operation.is_transfer and operation.shape.startswith("(")
            anywhere = re.sub(r"\{[^{}]*\}", "", operation.shape)  # without layouts, which say what is not in HBM
            found.setdefault(kind, []).append(sum(array_bytes(anywhere)) // (2 if half else 1))
    return found


def large_copies(text: str) -> list[tuple[str, int]]:
    """Copies of LARGE bytes and more: name and bytes."""
    return [(op.name, op.num_bytes) for op in Program(text).operations() if op.kind == "copy" and op.num_bytes >= LARGE]


def measure(target_name: str, size: int, layers: int) -> dict[str, Any]:
    """The figures of the decode program and of the samplers."""
    target = TARGETS[target_name]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "config.json")
        path.write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": layers}))
        config = EngineConfig(model=str(path), tensor_parallel_size=size, max_model_len=4096)
        shards = shards_of(config)
        placement = Placement.for_target(target, shards)
        described = describe(config, target.platform, [placement.mesh])
    blueprint = Blueprint.draw(ServedModel(described.spec, described.params), config, placement)
    build = blueprint.with_blocks(BLOCKS)
    weights = memory.tree_bytes(described.params)
    result: dict[str, Any] = {
        "target": target.device_kind, "devices": size, "layers": layers, "weights_of_a_device": weights,
        "of_these_on_every_device": whole_bytes(described.params), "attention": blueprint.implementation,
        "programs": {},
    }  # fmt: skip
    for shape in blueprint.program_shapes:
        decode = isinstance(shape, ForwardShape) and shape.is_decode and shape.rows == ROWS
        sampler = isinstance(shape, SampleShape) and shape.rows == ROWS and shape.variant is not SamplerVariant.FULL
        if not (decode or sampler):
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
    parser.add_argument("--tensor-parallel-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file; a run is added to it")
    args = parser.parse_args()
    result = measure(args.target, args.tensor_parallel_size, args.layers)
    print(json.dumps(result, indent=1))
    if args.output:
        runs = json.loads(args.output.read_text()) if args.output.exists() else []
        args.output.write_text(json.dumps([*runs, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
