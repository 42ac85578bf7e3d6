"""EAGLE-3 heads and MTP layers against plain float64 formulas, one row at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models import decoder, draft_head
from jpaged.models.draft_head import HeadKind, HeadSpec
from jpaged.models.spec import DecoderSpec, Experts, Latent, Params, Rope, param_shapes
from tests.support.device_arrays import device_array

HIDDEN, TARGET, VOCAB, LENGTH = 16, 24, 40, 6
HEADS, KV_HEADS, DIM, INTER = 4, 2, 8, 20
LAYER = DecoderSpec(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTER, num_layers=1, num_heads=HEADS,
    num_kv_heads=KV_HEADS, head_dim=DIM, max_position=64, rope=Rope(theta=100.0),
)  # fmt: skip
TARGET_SPEC = dataclasses.replace(LAYER, hidden_size=TARGET, num_layers=4)
EAGLE = HeadSpec(HeadKind.EAGLE3, LAYER, TARGET, aux_layers=(0, 2, 4), draft_vocab_size=11, own_embed=True)
MTP = HeadSpec(HeadKind.MTP, LAYER, HIDDEN, own_head=False)


def random_tree(shapes: Params, seed: int) -> Params:
    rng = np.random.default_rng(seed)

    def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key == "d2t":
            return device_array(np.sort(rng.choice(VOCAB, shape.shape, replace=False)) - np.arange(*shape.shape), int)
        values = rng.standard_normal(shape.shape) * 0.3 + (1 if "norm" in path[-1].key else 0)
        return device_array(values, shape.dtype)

    return jax.tree.map_with_path(leaf, shapes)


def in_float64(tree: Params) -> Params:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + LAYER.norm_eps) * weight


def rotated(x: np.ndarray, position: int) -> np.ndarray:
    """Rotate pairs (i, i + half), as complex numbers."""
    half = len(x) // 2
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 100.0 ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])


def llama_layer(w: Params, residual: np.ndarray, normed: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One Llama layer after its first norm. Row t attends to the rows up to t."""
    matrices, per_kv = w["layers"][0], HEADS // KV_HEADS
    out = np.zeros((len(residual), HEADS, DIM))
    for t in range(len(residual)):
        for head in range(HEADS):
            q_matrix, k_matrix, v_matrix = matrices["qkv"][head // per_kv][[head % per_kv, per_kv, per_kv + 1]]
            q = rotated(q_matrix @ normed[t], positions[t])
            keys = np.array([rotated(k_matrix @ normed[s], positions[s]) for s in range(t + 1)])
            scores = np.exp(keys @ q / np.sqrt(DIM))
            out[t, head] = scores / scores.sum() @ np.array([v_matrix @ normed[s] for s in range(t + 1)])
    x = residual + out.reshape(len(residual), -1) @ matrices["o"].T
    y = rms(x, w["mlp_norm"][0])
    gate, up = y @ matrices["gate_up"][0].T, y @ matrices["gate_up"][1].T
    return x + (gate / (1 + np.exp(-gate)) * up) @ matrices["down"].T


def expected_eagle(spec: HeadSpec, w: Params, embeddings: np.ndarray, states: np.ndarray) -> tuple:
    """Returns the layer's output and the logits. states: [3, tokens, target]."""
    joined = np.concatenate(list(states), -1)
    if spec.norm_before_fc:
        joined = rms(joined, w["input_norm"])
    if spec.fc_norm:
        parts = np.split(joined, len(states), axis=-1)
        joined = np.concatenate([rms(part, gain) for part, gain in zip(parts, w["fc_norm"], strict=True)], -1)
    state = joined @ w["fc"].T
    normed = rms(state, w["hidden_norm"])
    both = np.concatenate([rms(embeddings, w["attn_norm"][0]), normed], -1)
    hidden = llama_layer(w, normed if spec.norm_before_residual else state, both, np.arange(len(state)))
    return hidden, rms(hidden, w["final_norm"]) @ w["lm_head"].T


@functools.partial(jax.jit, static_argnums=(0, 2))
def run(
    spec: HeadSpec, params: Params, target_spec: DecoderSpec, target: Params, ids: jax.Array, states: tuple
) -> tuple:
    """Returns the layer's output and the logits."""
    state = draft_head.target_state(spec, params, target_spec, target, states)
    x = draft_head.head_input(
        spec, params, draft_head.embed_for_head(spec, params, target_spec, target, ids), state
    )
    shape = jnp.zeros((1, LENGTH), jnp.int32)
    hidden, _ = draft_head.head_layer(
        spec, params, x, jnp.arange(LENGTH), None, shape, decoder.dense_causal_attend
    )
    return hidden, draft_head.head_logits(spec, params, hidden, target)


@pytest.mark.parametrize(
    "options", [{}, {"norm_before_residual": True}, {"norm_before_fc": True, "fc_norm": True, "norm_output": True}]
)
def test_eagle3_against_formulas(options: dict) -> None:
    spec = dataclasses.replace(EAGLE, **options)
    params = random_tree(draft_head.head_param_shapes(spec, jnp.float32), 0)
    rng = np.random.default_rng(1)
    ids, states = rng.integers(VOCAB, size=LENGTH), rng.standard_normal((3, LENGTH, TARGET))
    on_device = device_array(ids, int), tuple(device_array(state, jnp.float32) for state in states)
    hidden, logits = run(spec, params, TARGET_SPEC, {}, *on_device)
    w = in_float64(params)
    want_hidden, want_logits = expected_eagle(spec, w, w["embed"][ids], states)
    np.testing.assert_allclose(hidden, want_hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits, want_logits, rtol=1e-4, atol=1e-4)
    state = jax.jit(draft_head.next_state, static_argnums=0)(spec, params, {}, hidden)
    want = rms(want_hidden, w["final_norm"]) if spec.norm_output else want_hidden
    np.testing.assert_allclose(state, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_mtp_against_formulas(own: bool) -> None:
    """The layer reads the target's state after its final norm. Embedding and output matrix are shared, or its own."""
    spec = dataclasses.replace(MTP, own_embed=own, own_head=own)
    target_spec = dataclasses.replace(LAYER, num_layers=3, embed_scale=3.0)
    params = random_tree(draft_head.head_param_shapes(spec, jnp.float32), 0)
    target = random_tree(param_shapes(target_spec, jnp.float32), 1)
    rng = np.random.default_rng(2)
    ids, states = rng.integers(VOCAB, size=LENGTH), rng.standard_normal((LENGTH, HIDDEN))
    on_device = device_array(ids, int), (device_array(states, jnp.float32),)
    hidden, logits = run(spec, params, target_spec, target, *on_device)
    w, t = in_float64(params), in_float64(target)
    embeddings = w["embed"][ids] if own else 3.0 * t["embed"][ids]
    state = rms(rms(states, t["final_norm"]), w["hidden_norm"])
    x = np.concatenate([rms(embeddings, w["embedding_norm"]), state], -1) @ w["fc"].T
    want = llama_layer(w, x, rms(x, w["attn_norm"][0]), np.arange(LENGTH))
    np.testing.assert_allclose(hidden, want, rtol=1e-4, atol=1e-4)
    matrix = (w if own else t)["lm_head"]
    np.testing.assert_allclose(logits, rms(want, w["final_norm"]) @ matrix.T, rtol=1e-4, atol=1e-4)


def test_an_mtp_layer_with_latent_attention_and_experts_is_a_layer_of_the_target() -> None:
    """With `fc` and the norms set to pass the state through, the head is the target's own layer."""
    latent = Latent(q_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4)
    layer = dataclasses.replace(
        LAYER, num_kv_heads=1, head_dim=12, latent=latent, experts=Experts(4, 2, 6, (True,), shared_size=6),
        final_norm=False,
    )  # fmt: skip
    spec = dataclasses.replace(MTP, layer=layer, own_head=True)
    params = random_tree(draft_head.head_param_shapes(spec, jnp.float32), 0)
    params["fc"] = device_array(np.concatenate([np.zeros((HIDDEN, HIDDEN)), np.eye(HIDDEN)], 1), jnp.float32)
    params["hidden_norm"] = device_array(np.ones(HIDDEN), jnp.float32)
    states = np.random.default_rng(1).standard_normal((LENGTH, HIDDEN))
    states = device_array(states / np.sqrt((states**2).mean(-1, keepdims=True)), jnp.float32)
    ids = device_array(np.zeros(LENGTH), jnp.int32)
    got, _ = run(spec, params, layer, {"embed": device_array(np.ones((VOCAB, HIDDEN)), jnp.float32)}, ids, (states,))
    want, *_ = jax.jit(
        lambda params, ids, states: decoder.decode(
            layer, params, ids, jnp.arange(LENGTH), [None], jnp.zeros((1, LENGTH), jnp.int32),
            decoder.dense_causal_attend, hidden=states,
        )
    )(params, ids, states)  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_draft_ids_become_target_ids() -> None:
    ids = jnp.arange(11)
    params = random_tree(draft_head.head_param_shapes(EAGLE, jnp.float32), 0)
    np.testing.assert_array_equal(draft_head.to_target_ids(params, ids), ids + params["d2t"])
    assert len(set(np.asarray(draft_head.to_target_ids(params, ids)).tolist())) == 11
    np.testing.assert_array_equal(draft_head.to_target_ids({}, ids), ids)


def test_captured_states_are_the_inputs_of_layers() -> None:
    """Index 0 is the embedding, i the output of layer i - 1. Two pipeline stages capture each index once."""
    spec = dataclasses.replace(LAYER, num_layers=3)
    params = random_tree(param_shapes(spec, jnp.float32), 0)
    ids, positions = jnp.arange(LENGTH), jnp.arange(LENGTH)

    def decode(params: Params, **options: object) -> tuple:
        pages, hidden = [None] * len(params["layers"]), options.pop("hidden", None)

        def call(params: Params, hidden: jax.Array | None) -> tuple:
            shape = jnp.zeros((1, LENGTH), jnp.int32)
            return decoder.decode(
                spec, params, ids, positions, pages, shape, decoder.dense_causal_attend, hidden=hidden, **options
            )

        return jax.jit(call)(params, hidden)

    def first(count: int) -> Params:
        return params | {"layers": params["layers"][:count]}

    last, _, _, *captured = decode(params, capture=(0, 1, 2, 3))
    assert len(captured) == 4
    np.testing.assert_array_equal(captured[0], decoder.embed_tokens(spec, params, ids, positions))
    for i in (1, 2):
        np.testing.assert_array_equal(captured[i], decode(first(i))[0])
    np.testing.assert_array_equal(captured[3], last)

    middle, _, _, *of_first = decode(first(2), capture=(0, 2, 3))
    rest = {name: params[name][2:] for name in ("attn_norm", "mlp_norm")}
    second = params | rest | {"layers": params["layers"][2:]}
    _, _, _, *of_second = decode(second, capture=(0, 2, 3), hidden=middle, first_layer=2)
    assert len(of_first) == 1
    np.testing.assert_array_equal(of_second[0], middle)
    np.testing.assert_allclose(of_second[1], last, rtol=1e-6)
