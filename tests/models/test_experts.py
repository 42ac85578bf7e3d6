"""Experts against plain loops. The bits of a token's result do not depend on the number of tokens."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.models import experts as moe
from jpaged.models.linear import LayerContext, linear_per_head
from jpaged.models.spec import DecoderSpec, Experts, Params, Scoring, WeightLayout
from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors
from tests.support.checkpoint_files import tensors_of

pytestmark = pytest.mark.codegen

HIDDEN, INTER = 32, 16
COUNTS = (8, 32, 64, 512)  # tokens of programs


def layer(experts: Experts, seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    shapes = {
        "router": (experts.num, HIDDEN),
        "expert_gate_up": (experts.num, 2, INTER, HIDDEN),
        "expert_down": (experts.num, HIDDEN, INTER),
        "router_correction": (experts.num,),
    }
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def spec(experts: Experts) -> DecoderSpec:
    return DecoderSpec(32, HIDDEN, INTER, 1, 4, 4, 8, 64, experts=experts)


def context(experts: Experts, params: Params, real: jax.Array | None = None) -> LayerContext:
    return LayerContext(spec(experts), WeightLayout(), params, real=real)


def one_by_one(experts: Experts, matrices: dict, x: np.ndarray) -> np.ndarray:
    """Expected result in float64: a loop over tokens and their experts, with softmax routing."""
    m = {name: np.asarray(value, np.float64) for name, value in matrices.items()}
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = m["router"] @ row
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        chosen = np.argsort(-scores, kind="stable")[: experts.per_token]
        total = scores[chosen].sum() if experts.renormalise else 1.0
        for e in chosen:
            gate, up = m["expert_gate_up"][e] @ row
            out[t] += scores[e] / total * (m["expert_down"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize(
    ("num", "per_token", "tokens", "renormalise"),
    [
        (5, 5, 7, True), (64, 8, 33, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow) for case in (
                (4, 2, 1, False), (7, 3, 64, True), (1, 1, 9, False), (3, 1, 200, True),
                (4, 2, 1, True), (5, 5, 7, False), (7, 3, 64, False), (1, 1, 9, True), (64, 8, 33, True),
                (3, 1, 200, False),
            )
        ),
    ],
)  # fmt: skip
def test_against_a_loop(num: int, per_token: int, tokens: int, renormalise: bool) -> None:
    experts = Experts(num, per_token, INTER, (True,), renormalise=renormalise)
    matrices = layer(experts)
    x = np.random.default_rng(1).standard_normal((tokens, HIDDEN))
    feed = jax.jit(lambda m, x: moe.sparse_feed_forward(experts, x, context(experts, m)))
    got, choice = feed(matrices, jnp.asarray(x, jnp.float32))
    assert choice.shape == (tokens, per_token)
    assert 0 <= int(choice.min()) <= int(choice.max()) < num
    np.testing.assert_allclose(got, one_by_one(experts, matrices, x), rtol=1e-3, atol=1e-3)


_blocks = jax.jit(lambda *of: vars(moe.blocks_by_expert(*of)), static_argnums=(1, 2))


def blocks_by_expert(choice: Any, num_experts: int, rows: int) -> moe.ExpertBlocks:
    """In one program."""
    return moe.ExpertBlocks(**_blocks(choice, num_experts, rows))


def test_padding_goes_to_no_expert() -> None:
    """No block is computed for padding, and padding that is NaN changes no other token."""
    experts = Experts(4, 2, INTER, (True,))
    matrices = layer(experts)
    x = np.random.default_rng(1).standard_normal((16, HIDDEN)).astype(np.float32)
    real = np.arange(16) % 3 == 0
    want = one_by_one(experts, matrices, x[real].astype(np.float64))
    x[~real] = np.nan
    feed = jax.jit(lambda m, x, real: moe.sparse_feed_forward(experts, x, context(experts, m, real)))
    got, choice = feed(matrices, jnp.asarray(x), jnp.asarray(real))
    np.testing.assert_array_equal((np.asarray(choice) == 4).all(1), ~real)
    np.testing.assert_allclose(np.asarray(got)[real], want, rtol=1e-3, atol=1e-3)
    no_blocks = blocks_by_expert(jnp.full((16, 2), 4), 4, 8)
    assert int(no_blocks.num_blocks_used) == 0


@pytest.mark.slow
def test_all_tokens_use_one_expert() -> None:
    blocks = blocks_by_expert(jnp.full((40, 1), 2, jnp.int32), 4, 16)
    assert int(blocks.num_blocks_used) == 3
    np.testing.assert_array_equal(blocks.expert_of_block[:3], 2)
    assert np.unique(blocks.row_of_choice).size == 40
    np.testing.assert_array_equal(blocks.token_of_row.ravel()[blocks.row_of_choice[:, 0]], np.arange(40))


def test_used_rows_come_first_in_each_block() -> None:
    rng = np.random.default_rng(0)
    choice = rng.permuted(np.tile(np.arange(7), (50, 1)), axis=1)[:, :3]
    choice[::9] = 7  # padding
    blocks = blocks_by_expert(jnp.asarray(choice, jnp.int32), 7, 8)
    used = np.asarray(blocks.row_of_choice).ravel()
    used = used[used < blocks.token_of_row.size]
    expected = np.zeros(blocks.token_of_row.size, bool)
    expected[used] = True
    counts = np.asarray(blocks.rows_of_block)
    np.testing.assert_array_equal(np.arange(8) < counts[:, None], expected.reshape(-1, 8))
    assert counts.sum() == (choice < 7).sum()


@pytest.mark.slow
@pytest.mark.parametrize("scoring", list(Scoring))
@pytest.mark.parametrize("num", [7, 60, 128])
def test_bits_do_not_depend_on_the_number_of_tokens(num: int, scoring: Scoring) -> None:
    experts = Experts(num, 4, INTER, (True,), scoring=scoring, renormalise=True)
    matrices = layer(experts)
    x = jnp.asarray(3 * np.random.default_rng(2).standard_normal((max(COUNTS), HIDDEN)), jnp.float32)
    route = jax.jit(lambda m, x: moe.route(experts, x, context(experts, m)))
    feed = jax.jit(lambda m, x: moe.sparse_feed_forward(experts, x, context(experts, m)))
    for run in (route, feed):
        first = jax.tree.map(lambda a: np.asarray(a)[:8], run(matrices, x[:8]))
        for count in COUNTS[1:]:
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a: a[:8], run(matrices, x[:count])), first)


@pytest.mark.parametrize("transposed", [True, False])
def test_bits_of_latent_products_do_not_depend_on_the_number_of_tokens(transposed: bool) -> None:
    rng = np.random.default_rng(3)
    weight = jnp.asarray(rng.standard_normal((4, 16, 32)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((max(COUNTS), 4, weight.shape[1 if transposed else 2])), jnp.float32)
    model = LayerContext(spec(Experts(1, 1, INTER, (True,))), WeightLayout(), {"kv_b": weight})
    call = jax.jit(lambda x: linear_per_head("kv_b", x, model, part=slice(None), transposed=transposed))
    pattern = "thi,hio->tho" if transposed else "thi,hoi->tho"
    exact = np.einsum(pattern, np.asarray(x, np.float64), np.asarray(weight, np.float64))
    np.testing.assert_allclose(call(x), exact, rtol=1e-4, atol=1e-4)
    for count in COUNTS[1:]:
        np.testing.assert_array_equal(call(x[:count])[:8], call(x[:8]))


def test_router_correction_is_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    variant = BY_NAME["deepseek-v3"]
    write_checkpoint(variant, 0, tmp_path)
    wanted = tensors_of(tmp_path)["model.layers.1.mlp.gate.e_score_correction_bias"]
    model = load_model(EngineConfig(model=str(tmp_path), dtype="bfloat16"))
    correction = model.params["layers"][1]["router_correction"]
    assert correction.dtype == jnp.float32
    np.testing.assert_array_equal(correction, wanted)
    assert model.params["layers"][1]["router"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, n: t.pop(n + "_scales"), "gate_up_proj_blocks has no .*gate_up_proj_scales"),
        (lambda t, n: t.update({n + "_scales": t[n + "_scales"][:, :-1]}), "are not MXFP4"),
        (lambda t, n: t.update({n: np.zeros((8, 64, 128), np.float32)}), "has both .*gate_up_proj and .*proj_blocks"),
        (lambda t, n: t.update({n + "_scales": np.full_like(t[n + "_scales"], 255)}), "255, which means NaN"),
    ],
)
def test_malformed_mxfp4_is_refused(change, message: str, tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["gpt-oss-mxfp4"], 0, tmp_path)
    tensors = tensors_of(tmp_path)
    change(tensors, "model.layers.0.mlp.experts.gate_up_proj")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=str(tmp_path)))
