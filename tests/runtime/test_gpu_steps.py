"""Forward programs, compiled for an H200 without the device: the commands of a step, and the kernels of a layer."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import planning
from jpaged.models.sharding import shards_of
from jpaged.models.spec import DecoderSpec, QKNorm, Rope, param_shapes
from jpaged.runtime.adapter_pool import AdapterOptions
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.step.batch import ForwardShape
from tests.support.deviceless import H200, marks

pytestmark = [pytest.mark.codegen, *marks(H200)]

# Layers of Qwen3 0.6B's shape, and a small vocabulary.
SPEC = DecoderSpec(
    vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_layers=3, num_heads=16, num_kv_heads=8, head_dim=128,
    max_position=8192, rope=Rope(), qk_norm=QKNorm.HEAD,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Command:
    """A thunk of XLA: a line of its list. Those in CUDA graphs and in branches are indented."""

    depth: int  # columns
    kind: str   # "kCustomKernel", "kCopy" and so on
    name: str   # of a kernel
    launch: tuple[int, ...] = ()  # threads of a block, and its bytes of shared memory


def commands_of(is_decode, folder, **options):
    """The commands of the largest program of a kind."""
    config = planning.engine_config("test", {"max_num_seqs": 64, "max_num_batched_tokens": 256} | options)
    shards = shards_of(config)
    placement = dataclasses.replace(Placement.for_target(H200, shards), dump_to=str(folder))
    adapters = AdapterOptions.of(SPEC, config, np.dtype(jnp.bfloat16))
    model = ServedModel(SPEC, param_shapes(SPEC, "bfloat16"), adapters=adapters)
    build = Blueprint.draw(model, config, placement).fit(free_bytes=2**30)
    forwards = [shape for shape in build.blueprint.program_shapes if isinstance(shape, ForwardShape)]
    with H200.tracing():
        build.compile(max((s for s in forwards if s.is_decode == is_decode), key=lambda shape: shape.tokens))
    (file,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    lines = re.findall(r"^( *)\d+: (\w+) +\[[^]]*\] *(\S*)(.*)", file.read_text(), re.MULTILINE)
    launch = re.compile(r"threads: \[(\d+),.*shared_memory: (\d+)")
    return [
        Command(len(indent), kind, name, tuple(int(n) for numbers in launch.findall(rest) for n in numbers))
        for indent, kind, name, rest in lines
    ]


def layer_of(commands):
    """The commands from the second layer's write to the third one's. What all layers share is before it."""
    _, second, third = (index for index, command in enumerate(commands) if command.name == "write_qkv")
    return commands[second:third]


@pytest.mark.parametrize(("fused", "kernels"), [(None, 9), (False, 12)])
def test_a_decode_step_is_one_command_and_nine_kernels_a_layer(fused, kernels, tmp_path):
    """A layer of 30 MiB is fused by default. Nothing is copied."""
    graph, *commands = commands_of(True, tmp_path, fused_layers=fused)
    assert (graph.depth, graph.kind) == (0, "kCommandBuffer")
    assert all(command.depth == 4 for command in commands)  # in the graph, and in no branch
    layer = layer_of(commands)
    assert {command.kind for command in layer} == {"kCustomKernel"}
    assert len(layer) <= kernels
    print([command.name for command in layer])


@pytest.mark.parametrize("is_decode", [True, False])
def test_adapters_add_eight_kernels_a_layer(is_decode, tmp_path):
    """Two for each of qkv, o, gate_up and down. No pool of adapters is copied or sliced, and nothing is sorted."""
    graph, *commands = commands_of(is_decode, tmp_path, enable_lora=True, max_loras=64, max_lora_rank=16)
    assert (graph.depth, graph.kind) == (0, "kCommandBuffer")
    layer = layer_of(commands)
    names = [command.name for command in layer]
    print(names)
    assert len([name for name in names if name.startswith("lora_")]) == 8
    of_prompts = () if is_decode else ("kConditional", "kCustomCall")
    assert {command.kind for command in layer} == {"kCustomKernel", *of_prompts}
    if is_decode:
        assert len(layer) <= 12 + 8


def test_programs_of_all_sizes_have_the_same_kernels_with_deterministic(tmp_path):
    """Decodes of 8 and 256 rows, and a chunk of 256 tokens. No operation of XLA is in a layer, and nothing is copied.

    A kernel has the same threads and shared memory, which follow from its tile, in all programs. `tree_dot` and
    `partial_dots` are one kernel: the first adds the parts of a tile that the second stores.
    """
    launches = {}
    for is_decode, rows in ((True, 8), (True, 256), (False, 64)):
        folder = tmp_path / f"{is_decode} {rows}"
        graph, *commands = commands_of(is_decode, folder, max_num_seqs=rows, deterministic=True)
        layer = layer_of(commands)
        assert {command.kind for command in layer} <= {"kCustomKernel", "kConditional"}
        names = [re.sub(r"__\d+$", "", command.name) for command in layer if command.kind == "kCustomKernel"]
        print(is_decode, rows, names)
        assert set(names) <= {
            "write_qkv", "paged_chunks_fixed", "paged_decode_fixed", "paged_merge_fixed", "partial_dots", "add_norm",
            "gated_dot", "dot",
        }  # fmt: skip
        for name, command in zip(names, (c for c in layer if c.kind == "kCustomKernel"), strict=True):
            launches.setdefault(name, set()).add(command.launch)
        if is_decode:
            assert graph.kind == "kCommandBuffer"
            assert len(layer) == 9
    assert all(len(found) == 1 for found in launches.values()), launches


def test_a_mixed_step_without_decodes_launches_no_decode_kernel(tmp_path):
    """The decode kernels of a layer are alone in a branch, inside the one CUDA graph. Nothing is copied for it."""
    graph, *commands = commands_of(False, tmp_path)
    assert (graph.depth, graph.kind) == (0, "kCommandBuffer")
    assert all(command.depth > 0 for command in commands)
    branch = [command.name for command in commands if command.depth > 4]
    assert branch == ["paged_decode", "paged_decode_merge"] * SPEC.num_layers
    layer = layer_of(commands)
    # the prefill through Mosaic GPU is a custom call, which the graph captures too
    assert [command.kind for command in layer].count("kCustomCall") == 1
    assert {command.kind for command in layer} == {"kCustomKernel", "kConditional", "kCustomCall"}
