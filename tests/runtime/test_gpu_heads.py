"""Programs after the forward pass, compiled for an H200 without the device.

Each is one CUDA graph, and the sampler reads the logits no more often than necessary.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jpaged.engine.step_plan import SamplerVariant
from jpaged.kv_groups import group_layers
from jpaged.models.spec import DecoderSpec, Rope, WeightLayout, param_shapes
from jpaged.runtime.placement import Placement
from jpaged.runtime.prediction.program_text import Program
from jpaged.runtime.sampling.sampler import SamplerOptions
from jpaged.runtime.sampling.vocab_search import smallest_bound
from jpaged.runtime.state import StateSizes, state_shapes
from jpaged.runtime.step.output_programs import SampleShape, ScoreShape, compile_output
from tests.kernels.machine_code import compile_for
from tests.support.deviceless import H200, marks

pytestmark = [pytest.mark.codegen, *marks(H200)]

# The vocabulary of Llama 3.1, over a small model: the head's own work does not depend on the hidden size.
SPEC = DecoderSpec(
    vocab_size=128_256, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=64,
    max_position=1024, rope=Rope(),
)  # fmt: skip
ROWS = 256
SHAPES = [*(SampleShape(ROWS, variant) for variant in SamplerVariant), ScoreShape(ROWS)]


# Reads of all logits: one for maxima and NaN, one for the mass that top_p needs, one that draws. FULL also has masks,
# bias, penalties, log-probabilities, and two reads for top_n_sigma if a row has it. Here all are in one step.
MOST_READS = {SamplerVariant.GREEDY: 1, SamplerVariant.RANDOM: 3, SamplerVariant.FULL: 17}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_head_is_one_command_buffer(shape, tmp_path):
    """The host gives the card one command. It reads no condition, and starts no kernel by itself."""
    placement = dataclasses.replace(Placement.for_target(H200), dump_to=str(tmp_path))
    dtype = jnp.dtype("bfloat16")
    sizes = StateSizes(64, 16, ROWS, SPEC.max_position // 16, 512, ROWS)
    state = state_shapes(SPEC, group_layers(SPEC.windows, SPEC.max_position), sizes, dtype=dtype, placement=placement)
    with H200.tracing():
        program = compile_output(
            placement.shapes_of(param_shapes(SPEC, dtype)), None, state, shape, spec=SPEC, layout=WeightLayout(),
            options=SamplerOptions(20, rows_per_search=64), placement=placement,
        )  # fmt: skip
    # the commands that the host gives to the card, one a line; those inside a graph are indented
    (commands,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    assert re.findall(r"^\d+: (\w+)", commands.read_text(), re.MULTILINE) == ["kCommandBuffer"]
    if isinstance(shape, SampleShape):
        # bisection over all logits is in loops: only rows that neither top_k nor the likeliest 64 ids settle need it
        logits = ROWS * SPEC.vocab_size * 4
        traffic = Program(program.as_text()).traffic()
        assert 1 <= sum(one.read // logits for one in traffic if one.read >= logits) <= MOST_READS[shape.variant]


def test_a_search_reads_the_logits_eight_times():
    """Each of the 8 turns reads them and their weights once. Halving the range would take 31 turns."""
    logits = jax.ShapeDtypeStruct((64, SPEC.vocab_size), jnp.dtype("float32"))
    wanted = jax.ShapeDtypeStruct((64,), jnp.dtype("float32"))
    program = Program(compile_for(H200, smallest_bound, (logits, logits, wanted)).as_text())
    (loop,) = [operation for operation in program.operations() if operation.kind == "while"]
    assert loop.turns == 8
    read = sum(one.read for one in program.traffic(loop.called("body")))
    assert 2 <= read / (64 * SPEC.vocab_size * 4) < 2.2
