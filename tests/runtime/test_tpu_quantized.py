"""Steps of a quantised model, compiled for a TPU v5e without the device: kernels, copies and bytes."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import planning
from jpaged.models.families import spec_of
from jpaged.models.quantization import SCHEMES, Quantizer
from jpaged.models.spec import param_shapes
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.memory.weight_bytes import tree_bytes
from jpaged.runtime.placement import Placement
from jpaged.runtime.step.batch import ForwardShape
from pallas_kernels import QuantizedWeight
from tests.support.deviceless import V5E, compile_for_v5e, marks
from tests.support.published_configs import LLAMA, QWEN_MOE

pytestmark = [pytest.mark.codegen, *marks(V5E)]

CONFIG = LLAMA | {"num_hidden_layers": 2, "vocab_size": 4096}
SPEC = spec_of(CONFIG)
LAYER = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096  # weights
# Bits of a weight of a layer. int4: groups of 64 with float32 scales and zero points. w4a16: bfloat16 scales.
BITS = {"int4": 4 + (32 + 8) / 64, "int8": 8, "w8a8": 8, "w4a16": 4 + 16 / 128}


def params_of(option):
    """`--quantization` int4, int8 and w8a8; w4a16 as `jpaged quantize` writes it: groups of 128 without zero points."""
    shapes = param_shapes(SPEC, "bfloat16")
    if option != "w4a16":
        return Quantizer(SCHEMES[option], "tpu").shapes(shapes)

    def packed(name, leaf):
        if len(leaf.shape) == 1:
            return leaf
        scales = jax.ShapeDtypeStruct((*leaf.shape[:-1], leaf.shape[-1] // 128), leaf.dtype)
        codes = jax.ShapeDtypeStruct(leaf.shape, np.uint8)
        plain = QuantizedWeight(codes, scales, None, None, None, None, None, "int4", leaf.shape, leaf.dtype, "float")
        return Quantizer(platform="tpu").packed_shape(name, plain)

    layers = tuple({name: packed(name, leaf) for name, leaf in layer.items()} for layer in shapes["layers"])
    return shapes | {"layers": layers}


@pytest.mark.parametrize("option", ["w4a16", "int8", "w8a8"])
def test_a_decode_step_reads_the_codes(option):
    """Four kernels a layer, no dequantised or copied matrix, and memory for less than the smallest matrix."""
    config = planning.engine_config("test", {"max_num_seqs": 16, "max_num_batched_tokens": 256})
    model = ServedModel(SPEC, params_of(option))
    build = Blueprint.draw(model, config, Placement.for_target(V5E)).fit(free_bytes=2**30)
    shapes = [s for s in build.blueprint.program_shapes if isinstance(s, ForwardShape) and s.is_decode]
    with V5E.tracing():
        program = build.compile(max(shapes, key=lambda shape: shape.tokens))
    text, used = program.as_text(), program.memory_analysis()
    assert len(re.findall(r"%quantized_dot_tpu\S* = .*tpu_custom_call", text)) == 4 * SPEC.num_layers
    smallest = SPEC.hidden_size**2
    print(f"{option}: temporaries {used.temp_size_in_bytes:,}, arguments {used.argument_size_in_bytes:,}")
    assert used.temp_size_in_bytes < 2 * smallest
    made = re.findall(r"= (?:u32|s8|bf16|f32)\[([\d,]+)\]\S* (?:copy|fusion|transpose|convert|convolution)\(", text)
    assert max(math.prod(map(int, shape.split(","))) for shape in made) < smallest // 8


@pytest.mark.parametrize("option", ["int4", "int8"])
def test_experts_are_multiplied_in_their_codes(option):
    """Qwen3 30B A3B: two kernels a layer read them. No array has the size of an expert's matrices, or of all experts'.

    The largest arrays are the tokens' hidden states by expert: 144 blocks of 16 rows.
    """
    spec = spec_of(QWEN_MOE | {"num_hidden_layers": 1, "vocab_size": 4096})
    config = planning.engine_config("test", {"max_num_seqs": 16, "max_num_batched_tokens": 256})
    params = Quantizer(SCHEMES[option], "tpu").shapes(param_shapes(spec, "bfloat16"))
    experts = params["layers"][0]
    assert {experts[name].layout for name in ("expert_gate_up", "expert_down")} == {
        "lanes" if option == "int4" else "rows"
    }
    build = Blueprint.draw(ServedModel(spec, params), config, Placement.for_target(V5E)).fit(free_bytes=2**30)
    shapes = [s for s in build.blueprint.program_shapes if isinstance(s, ForwardShape) and s.is_decode]
    with V5E.tracing():
        program = build.compile(max(shapes, key=lambda shape: shape.tokens))
    text, used = program.as_text(), program.memory_analysis()
    assert len(re.findall(r"%quantized_grouped_dot_tpu\S* = .*tpu_custom_call", text)) == 2
    matrix, rows = spec.hidden_size * spec.experts.intermediate_size, 144 * 16
    print(f"{option}: temporaries {used.temp_size_in_bytes:,}")
    assert used.temp_size_in_bytes < 4 * rows * spec.hidden_size
    made = re.findall(r"= (?:u32|s8|bf16|f32)\[([\d,]+)\]\S* (?:copy|fusion|transpose|convert|convolution)\(", text)
    sizes = {math.prod(map(int, shape.split(","))) for shape in made}
    assert max(sizes) <= rows * spec.hidden_size
    assert not sizes & {matrix, 2 * matrix}


@pytest.mark.parametrize("option", BITS)
def test_the_plan_knows_the_bytes_of_weights_on_the_device(option, tmp_path):
    params = params_of(option)
    program = compile_for_v5e(lambda params: jnp.zeros(()), (params,), keep_unused=True)
    on_device = program.memory_analysis().argument_size_in_bytes
    layers = sum(tree_bytes(layer) for layer in params["layers"])
    assert layers == pytest.approx(SPEC.num_layers * LAYER * BITS[option] / 8, rel=0.005)
    assert tree_bytes(params) == pytest.approx(on_device, rel=0.001)
    if option in SCHEMES:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        # so little memory that nothing is compiled
        plan = planning.plan(str(tmp_path), {"quantization": option}, target="v5e", device_memory=2**28)
        assert plan.weight_bytes == tree_bytes(params)
