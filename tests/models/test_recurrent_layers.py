"""Recurrent layers: on CPU a token's bits do not depend on how the tokens of its row are divided into calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.linear import LayerContext
from jpaged.models.recurrent import StateRows, mix_by_state
from jpaged.models.recurrent_spec import GatedDelta, GateNorm, KimiDelta, Mamba2
from jpaged.models.spec import DecoderSpec, WeightLayout, param_shapes

pytestmark = pytest.mark.codegen

DELTA = GatedDelta((True,), k_heads=16, v_heads=32, head_dim=128, conv_width=4)  # Qwen3-Next's
KIMI = KimiDelta((True,), k_heads=32, v_heads=32, head_dim=128, conv_width=4)  # Kimi Linear's
MAMBA = Mamba2((True,), heads=16, head_dim=48, groups=4, state_dim=64, conv_width=4)
BEFORE = dataclasses.replace(MAMBA, gate_norm=GateNorm.BEFORE, in_bias=True, in_scale=1.25, part_scales=(0.5,) * 5)
TOKENS, HIDDEN = 256, 64


@pytest.mark.parametrize(
    ("recurrence", "dtype"),
    [
        pytest.param(DELTA, "bfloat16", id="gated delta"),
        pytest.param(DELTA, "float32", id="gated delta, float32", marks=pytest.mark.slow),
        pytest.param(KIMI, "bfloat16", id="kimi delta", marks=pytest.mark.slow),
        pytest.param(KIMI, "float32", id="kimi delta, float32", marks=pytest.mark.slow),
        pytest.param(MAMBA, "float32", id="mamba", marks=pytest.mark.slow),
        pytest.param(MAMBA, "bfloat16", id="mamba, bfloat16", marks=pytest.mark.slow),
        pytest.param(BEFORE, "float32", id="mamba, norm before the gate", marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_the_calls(recurrence, dtype, request):
    spec = DecoderSpec(64, HIDDEN, 64, 1, 4, 2, 16, 256, recurrence=recurrence)
    rng = np.random.default_rng(0)
    leaves = {}
    for name, leaf in param_shapes(spec, dtype)["layers"][0].items():
        deviation = leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 0.3
        leaves[name] = (rng.standard_normal(leaf.shape) * deviation).astype(leaf.dtype)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(jnp.dtype(dtype))

    @jax.jit
    def layer(x, state, position, starts, leaves):
        rows = StateRows(jnp.zeros(1, jnp.int32), position, starts, x.shape[0])
        context = LayerContext(spec, WeightLayout(), leaves, num_rows=starts[-1])
        return mix_by_state(recurrence, x, context, state, rows)

    def run(lengths):
        state = tuple(np.zeros((1, *array.shape), array.dtype) for array in recurrence.state_shapes(dtype))
        outs, start = [], 0
        for length in lengths:
            starts = np.array([0, length], np.int32)
            position = np.array([start], np.int32)
            out, state = layer(x[start : start + length], state, position, starts, leaves)
            outs.append(np.asarray(out).astype(np.float32))
            start += length
        return np.concatenate(outs), [np.asarray(array) for array in state]

    whole, state = run([TOKENS])
    parts, state_of_parts = run([32, 223, 1] if "slow" in request.keywords else [64] * 4)
    assert np.abs(whole).max() > 0
    assert (parts == whole).all()
    assert all((part == one).all() for part, one in zip(state_of_parts, state, strict=True))
