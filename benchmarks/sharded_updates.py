"""Memory and time of weight updates with the arrays of a trainer's mesh, on 8 host devices.

    python benchmarks/sharded_updates.py [--layers 8] [--updates 5] [--output FILE]

An engine of a small Llama with tensor_parallel_size=8 gets new weights from a trainer that splits them
- as the engine does, so that the update is by reference;
- along the other axis of every matrix, on the same devices, so that each leaf is moved;
- over 4 of the devices, so that each leaf is moved to other devices.
Prints a row for each:
- live: most bytes of all arrays on all devices after a leaf of the update, more than before it, in largest leaves;
- temporary: most bytes that the program that moves a leaf needs besides its input and output, in largest leaves;
- ms: the median of the updates.
A largest leaf is that of the engine, on all devices together.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from jpaged import LLM, SamplingParams  # noqa: E402
from jpaged.models import resharding  # noqa: E402
from jpaged.models.spec import DecoderSpec, Rope, param_shapes  # noqa: E402
from tests.support.live_trees import IN, OUT, RULES, buffers, live_bytes, on_mesh, update_and_count  # noqa: E402

OTHER = {name: IN if rule == OUT else OUT for name, rule in RULES.items()}
OTHER |= {"qkv": PartitionSpec(None, None, "model"), "gate_up": PartitionSpec(None, None, "model")}


def spec_of(layers: int) -> DecoderSpec:
    """A Llama of 29 million weights with 8 layers."""
    return DecoderSpec(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=layers, num_heads=16, num_kv_heads=8,
        head_dim=32, max_position=256, rope=Rope(), tie_embeddings=True,
    )  # fmt: skip


def random_params(spec: DecoderSpec, seed: int) -> dict[str, Any]:
    """The tree on the host."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape, np.float32) * np.float32(0.02), param_shapes(spec, np.float32)
    )


def temporary_bytes(leaf: jax.Array, slot: Any) -> int:
    """Bytes of all devices that the program for a leaf needs besides input and output. 0: there is no program."""
    if resharding.is_placed(leaf, slot.sharding) or not resharding.has_devices_of(leaf, slot.sharding):
        return 0
    auto = resharding.on_auto_mesh(leaf)
    program = resharding.exchanged.lower(auto, auto.sharding, slot.sharding).compile()
    analysis = program.memory_analysis()
    assert analysis is not None, "XLA for CPU has it"
    return analysis.temp_size_in_bytes * DEVICES


@dataclasses.dataclass(frozen=True)
class Row:
    trainer: str
    leaves: int
    by_reference: int
    megabytes: float
    live: float       # in largest leaves
    temporary: float  # likewise
    milliseconds: float


def measure(llm: LLM, name: str, trees: list[dict[str, Any]], updates: int, largest: int) -> Row:
    """Update with the trees in turn."""
    update, counted = update_and_count(llm, trees[1])
    runner: Any = llm.engine.runner
    slots = runner.weight_slots[0]
    pairs = zip(jax.tree.leaves(trees[0]), jax.tree.leaves(slots, is_leaf=lambda x: hasattr(x, "fits")), strict=True)
    temporary = max(temporary_bytes(leaf, slot) for leaf, slot in pairs)
    seconds = []
    for index in range(updates):
        began = time.perf_counter()
        llm.update_weights(trees[index % 2])
        seconds.append(time.perf_counter() - began)
    return Row(
        name, update.num_leaves, update.num_by_reference, round(update.copied_bytes / 1e6, 1),
        round(max(counted)[0] / largest, 3), round(temporary / largest, 3), round(statistics.median(seconds) * 1e3, 1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    spec = spec_of(args.layers)
    every, half = (jax.make_mesh((count,), ("model",), devices=jax.devices()[:count]) for count in (DEVICES, 4))
    hosts = [random_params(spec, seed) for seed in range(2)]
    first = on_mesh(hosts[0], every, RULES)
    options: Any = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,)}
    rows = []
    with LLM(spec, params=first, **options, kv_cache_memory_bytes=2**22, tensor_parallel_size=DEVICES) as llm:
        runner: Any = llm.engine.runner
        arrays = jax.tree.leaves(runner.params)
        assert [buffers(leaf) for leaf in arrays] == [buffers(leaf) for leaf in jax.tree.leaves(first)]
        largest = max(leaf.addressable_shards[0].data.nbytes * DEVICES for leaf in arrays)
        total = sum(leaf.nbytes for leaf in arrays)
        del arrays, first
        sizes = [f"{size / 1e6:.1f} MB" for size in (total, largest, live_bytes())]
        print("{} of weights, the largest leaf {}, all arrays {}".format(*sizes))
        trainers = ("as the engine", every, RULES), ("other axes", every, OTHER), ("4 devices", half, RULES)
        for name, mesh, rules in trainers:
            trees = [on_mesh(host, mesh, rules) for host in hosts]
            rows.append(measure(llm, name, trees, args.updates, largest))
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.stats().compiles_after_ready == 0
    for row in rows:
        print(json.dumps(dataclasses.asdict(row)))
    if args.output is not None:
        args.output.write_text("\n".join(json.dumps(dataclasses.asdict(row)) for row in rows) + "\n")


if __name__ == "__main__":
    main()
