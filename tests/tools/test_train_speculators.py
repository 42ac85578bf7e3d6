"""Training of speculators: passes of a head, the distillation loss, the measurement of acceptance, and the folders."""

import dataclasses
import json
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.models import decoder, draft_head
from jpaged.models.draft_head import HeadKind, HeadSpec
from jpaged.models.spec import DecoderSpec, Params, Rope, param_shapes
from tests.support.device_arrays import device_array
from tests.support.random_decoder import random_params
from tests.support.tool_scripts import ROOT, load_tool

VOCAB, LENGTH = 40, 9
LAYER = DecoderSpec(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position=64, rope=Rope(theta=100.0),
)  # fmt: skip
EAGLE = HeadSpec(HeadKind.EAGLE3, LAYER, 16, aux_layers=(0, 1, 2), draft_vocab_size=11)


@pytest.fixture(scope="module")
def tools() -> types.SimpleNamespace:
    """The scripts of tools/, which import each other by name."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        names = ("speculator_passes", "train_speculators", "speculator_folder", "train_demo")
        return types.SimpleNamespace(**{name: load_tool(name) for name in names})
    finally:
        sys.path.remove(str(ROOT / "tools"))


def head_params(spec: HeadSpec) -> Params:
    rng = np.random.default_rng(0)

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == np.int32:
            return device_array(np.arange(*shape.shape), np.int32)
        return device_array(rng.standard_normal(shape.shape) * 0.4, shape.dtype)

    return jax.tree.map(leaf, draft_head.head_param_shapes(spec, jnp.float32))


@pytest.mark.parametrize("kind", list(HeadKind))
def test_a_pass_over_all_rows_is_what_a_served_head_computes(tools: types.SimpleNamespace, kind: HeadKind) -> None:
    """At index p, pass j equals the last row of a sequence: p + 1 rows of the target's states, then j drafts."""
    spec = EAGLE if kind is HeadKind.EAGLE3 else HeadSpec(HeadKind.MTP, LAYER, 16, own_head=False)
    params = head_params(spec)
    target = types.SimpleNamespace(spec=LAYER, params=random_params(LAYER))
    rng = np.random.default_rng(1)
    ids = rng.integers(VOCAB, size=(2, LENGTH)).astype(np.int32)
    states = tuple(rng.standard_normal((2, LENGTH, 16)).astype(np.float32) for _ in spec.aux_layers or (0,))
    p = 4

    @jax.jit
    def served(params: Params, of_target: Params, ids: jax.Array, states: tuple) -> list[jax.Array]:
        outputs, rows = [], list(draft_head.target_state(spec, params, LAYER, of_target, states)[: p + 1])
        for j in range(3):
            embedded = draft_head.embed_for_head(spec, params, LAYER, of_target, ids[1 : p + 2 + j])
            x = draft_head.head_input(spec, params, embedded, jnp.stack(rows))
            positions, shape = jnp.arange(len(rows)), jnp.zeros((1, len(rows)), jnp.int32)
            hidden, _ = draft_head.head_layer(spec, params, x, positions, None, shape, decoder.dense_causal_attend)
            outputs.append(hidden[-1])
            rows.append(draft_head.next_state(spec, params, of_target, hidden)[-1])
        return outputs

    @jax.jit
    def passes(params: Params, of_target: Params, ids: jax.Array, states: tuple) -> list[jax.Array]:
        model = types.SimpleNamespace(spec=LAYER, params=of_target)
        return tools.speculator_passes.head_passes(spec, params, model, ids, states, 3)

    found = passes(params, target.params, ids, states)
    expected = served(params, target.params, ids[1], tuple(state[1] for state in states))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours).reshape(2, LENGTH, -1)[1, p], theirs, rtol=1e-4, atol=1e-4)


def test_distillation_is_cross_entropy_with_its_gradient(tools: types.SimpleNamespace) -> None:
    tool, rows = tools.train_speculators, 2 * tools.train_demo.LOGITS_CHUNK
    rng = np.random.default_rng(0)
    x, matrix = (device_array(rng.standard_normal((n, 6)), jnp.float32) for n in (rows, VOCAB))
    wanted = device_array(rng.dirichlet(np.ones(VOCAB), rows) * rng.integers(0, 2, (rows, 1)), jnp.float32)

    def plain(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return -(wanted * jax.nn.log_softmax(x @ matrix.T)).sum()

    ours = jax.jit(jax.value_and_grad(lambda x, m: 2 * tool.distil(x, m, wanted), (0, 1)))(x, matrix)
    theirs = jax.jit(jax.value_and_grad(lambda x, m: 2 * plain(x, m), (0, 1)))(x, matrix)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), ours, theirs)


def test_a_draft_shares_the_targets_random_number(tools: types.SimpleNamespace) -> None:
    """Equal logits: every draft is accepted. Else a draft is the token that the same number draws from its logits."""
    accepted = tools.speculator_passes.accepted
    rng = np.random.default_rng(0)
    target, draft = (jnp.asarray(2 * rng.standard_normal((500, VOCAB)), jnp.float32) for _ in range(2))
    u = rng.random(500)

    def sample(logits: jax.Array) -> np.ndarray:
        p = np.exp(np.asarray(logits, np.float64))
        order = np.argsort(-p, axis=1, kind="stable")
        sums = np.cumsum(np.take_along_axis(p, order, 1), axis=1)
        rank = (sums <= u[:, None] * sums[:, -1:]).sum(1)
        return np.take_along_axis(order, rank[:, None], 1)[:, 0]

    ids = jnp.asarray(sample(target))
    low, high = (np.asarray(a, np.float64) for a in tools.speculator_passes.cdf_interval(target, ids))
    shares = jnp.asarray((u - low) / (high - low), jnp.float32)
    hits = np.asarray(accepted(draft, target, ids, shares, 1.0))
    expected = sample(draft) == np.asarray(ids)
    assert 10 < expected.sum() < 400
    assert (hits != expected).sum() <= 2  # a number at the end of an interval, in float32
    assert np.asarray(accepted(target, target, ids, shares, 1.0)).mean() > 0.99
    greedy = accepted(draft, target, ids, shares, 0.0)
    np.testing.assert_array_equal(greedy, np.argmax(draft, -1) == np.asarray(ids))


def test_tokens_per_step_of_a_decode(tools: types.SimpleNamespace) -> None:
    lengths = tools.speculator_passes.mean_lengths
    hits = np.ones((1, 3, 41), bool)
    np.testing.assert_allclose(lengths(hits, np.array([0])), [2, 3, 4])
    np.testing.assert_allclose(lengths(~hits, np.array([0])), [1, 1, 1])
    hits[0, 0, ::2] = False  # at even indices no draft is accepted, and a step of one token follows one of k + 1
    np.testing.assert_allclose(lengths(hits, np.array([1]))[0], 2)
    np.testing.assert_allclose(lengths(hits, np.array([0]))[0], (1 + 2 * 19) / 20)


def test_folders_have_the_published_names(tools: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    record = {
        "recipe": {"steps": 1, "batch_tokens": 1, "seed": 0}, "parameters": 5, "cpu_seconds": 60.0,
        "acceptance": {"greedy": {"lengths": [1.5] * 6}},
    }  # fmt: skip
    params = head_params(EAGLE)
    size = tools.speculator_folder.write_eagle3(tmp_path / "eagle3", EAGLE, params, record)
    assert size == sum(file.stat().st_size for file in (tmp_path / "eagle3").iterdir())
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 11
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    tensors = load_file(tmp_path / "eagle3" / "model.safetensors")
    matrices = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert set(tensors) == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{name}.weight" for name in matrices),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 32)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), np.arange(11) + tensors["d2t"])

    model = tmp_path / "target"
    spec = dataclasses.replace(LAYER, tie_embeddings=True)
    tools.speculator_folder.write_draft(model, spec, random_params(spec), record)
    mtp = HeadSpec(HeadKind.MTP, spec, 16, own_head=False)
    tools.speculator_folder.write_mtp(tmp_path / "mtp", model, mtp, head_params(mtp))
    old, new = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "mtp"))
    added = set(new) - set(old)
    assert all(name.startswith("model.layers.1.") for name in added)
    assert {f"model.layers.1.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= added
    assert len(added) == 4 + 9
    assert json.loads((tmp_path / "mtp" / "config.json").read_text("utf-8"))["num_nextn_predict_layers"] == 1
    assert param_shapes(spec, jnp.float32)["embed"].shape == old["model.embed_tokens.weight"].shape
