"""Programs after the forward pass, compiled for a TPU v5e without the device: how often they read the logits."""

import jax.numpy as jnp
import pytest

from jpaged.engine.step_plan import SamplerVariant
from jpaged.kv_groups import group_layers
from jpaged.models.spec import DecoderSpec, Rope, WeightLayout, param_shapes
from jpaged.runtime.placement import Placement
from jpaged.runtime.prediction.program_text import Program
from jpaged.runtime.sampling.sampler import SamplerOptions
from jpaged.runtime.state import StateSizes, state_shapes
from jpaged.runtime.step.output_programs import SampleShape, compile_output
from tests.support.deviceless import V5E, marks

pytestmark = [pytest.mark.codegen, *marks(V5E)]

# The vocabulary of Qwen3, over a small model: the head's own work does not depend on the hidden size.
SPEC = DecoderSpec(
    vocab_size=151_936, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=64,
    max_position=1024, rope=Rope(),
)  # fmt: skip
ROWS = 256  # the logits do not fit into fast memory
# For maxima and NaN; with random rows also for the mass that top_p needs.
READS = {SamplerVariant.GREEDY: 1, SamplerVariant.RANDOM: 2}


@pytest.mark.parametrize(
    "variant", [SamplerVariant.GREEDY, pytest.param(SamplerVariant.RANDOM, marks=pytest.mark.slow)]  # the latter: 38 s
)
def test_logits_are_written_once_and_not_copied(variant):
    placement, dtype = Placement.for_target(V5E), jnp.dtype("bfloat16")
    sizes = StateSizes(64, 64, ROWS, SPEC.max_position // 64, 512, ROWS)
    state = state_shapes(SPEC, group_layers(SPEC.windows, SPEC.max_position), sizes, dtype=dtype, placement=placement)
    with V5E.tracing():
        program = compile_output(
            placement.shapes_of(param_shapes(SPEC, dtype)), None, state, SampleShape(ROWS, variant), spec=SPEC,
            layout=WeightLayout(), options=SamplerOptions(20, rows_per_search=64), placement=placement,
        )  # fmt: skip
    logits = ROWS * SPEC.vocab_size * 4
    traffic = list(Program(program.as_text()).traffic())
    assert sum(one.written // logits for one in traffic if one.written >= logits) == 1
    assert sum(one.read // logits for one in traffic if one.read >= logits) == READS[variant]
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * logits
