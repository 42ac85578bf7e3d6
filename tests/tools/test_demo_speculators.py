"""The demo model's draft model and EAGLE-3 head: their folders, and weights that match the records."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.models import decoder, draft_head
from jpaged.models.draft_head import HeadKind, HeadSpec
from jpaged.models.spec import DecoderSpec, Params, Rope
from tests.support.tool_scripts import DEMO_MODEL as FOLDER
from tests.support.tool_scripts import ROOT

DRAFT, EAGLE3 = ROOT / "jpaged" / "demo_draft", ROOT / "jpaged" / "demo_eagle3"


def test_folders_are_small_and_complete() -> None:
    files = {"README.md", "config.json", "model.safetensors", "training.json"}
    assert {file.name for file in DRAFT.iterdir()} == files
    assert {file.name for file in EAGLE3.iterdir()} == files
    assert sum(file.stat().st_size for folder in (DRAFT, EAGLE3) for file in folder.iterdir()) <= 3_000_000


@pytest.fixture(scope="module")
def target() -> tuple[DecoderSpec, Params, np.ndarray]:
    """The demo model, and the first tokens of its held-out text."""
    loaded = load_model(EngineConfig(model="demo", dtype="float32"))
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer((FOLDER / "held_out.txt").read_text("utf-8"), add_special_tokens=False)["input_ids"]
    return loaded.spec, loaded.params, np.array(ids)


def check(folder: pathlib.Path) -> dict:
    return json.loads((folder / "training.json").read_text("utf-8"))["check_text"]


@functools.partial(jax.jit, static_argnums=(0, 3))
def hidden_states(spec: DecoderSpec, params: Params, ids: np.ndarray, capture: tuple[int, ...]) -> tuple:
    """The layers' inputs in `capture`, and the output of the last layer."""
    shape = jnp.zeros((1, len(ids)), jnp.int32)
    last, _, _, *captured = decoder.decode(
        spec, params, ids, jnp.arange(len(ids)), [None] * spec.num_layers, shape,
        decoder.dense_causal_attend, capture=capture,
    )  # fmt: skip
    return *captured, last


@functools.partial(jax.jit, static_argnums=0)
def likeliest(spec: DecoderSpec, params: Params, hidden: jax.Array) -> jax.Array:
    return decoder.lm_head(spec, params, hidden).argmax(-1)


def test_the_draft_model_agrees_with_the_demo_model_as_recorded(target: tuple) -> None:
    spec, params, ids = target
    record = check(DRAFT)
    ids = ids[: record["tokens"]]
    draft = load_model(EngineConfig(model=str(DRAFT), dtype="float32", skip_tokenizer_init=True))
    assert draft.spec.vocab_size == spec.vocab_size
    assert draft.spec.max_position == spec.max_position
    models = ((draft.spec, draft.params), (spec, params))
    ours, theirs = (np.asarray(likeliest(*model, hidden_states(*model, ids, ())[0])) for model in models)
    assert abs((ours == theirs)[1:].mean() - record["agreement"][0]) < 0.01
    assert record["agreement"][0] > 0.4


def head_of(folder: pathlib.Path) -> tuple[HeadSpec, Params]:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    layer = DecoderSpec(
        config["vocab_size"], config["hidden_size"], config["intermediate_size"], 1, config["num_attention_heads"],
        config["num_key_value_heads"], config["head_dim"], config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"], rope=Rope(theta=config["rope_theta"]),
    )  # fmt: skip
    spec = HeadSpec(
        HeadKind.EAGLE3, layer, config["target_hidden_size"], tuple(config["eagle_aux_hidden_state_layer_ids"]),
        config["draft_vocab_size"], norm_before_residual=config["norm_before_residual"],
    )  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    assert all(a.dtype == ml_dtypes.bfloat16 for name, a in tensors.items() if name not in ("d2t", "t2d"))
    t = {name: a.astype(np.int32 if a.dtype == np.int64 else np.float32) for name, a in tensors.items()}
    kv, width = layer.num_kv_heads, 2 * layer.hidden_size
    parts = [t[f"midlayer.self_attn.{name}_proj.weight"].reshape(kv, -1, layer.head_dim, width) for name in "qkv"]
    matrices = {
        "qkv": np.concatenate(parts, axis=1), "o": t["midlayer.self_attn.o_proj.weight"],
        "gate_up": np.stack([t["midlayer.mlp.gate_proj.weight"], t["midlayer.mlp.up_proj.weight"]]),
        "down": t["midlayer.mlp.down_proj.weight"],
    }  # fmt: skip
    params = {
        "layers": (matrices,), "attn_norm": t["midlayer.input_layernorm.weight"][None],
        "mlp_norm": t["midlayer.post_attention_layernorm.weight"][None],
        "hidden_norm": t["midlayer.hidden_norm.weight"], "fc": t["fc.weight"],
        "final_norm": t["norm.weight"], "lm_head": t["lm_head.weight"], "d2t": t["d2t"],
    }  # fmt: skip
    shapes = draft_head.head_param_shapes(spec, jnp.float32)
    assert jax.tree.map(lambda a: a.shape, params) == jax.tree.map(lambda a: a.shape, shapes)
    return spec, jax.device_put(params)


@functools.partial(jax.jit, static_argnums=(0, 2))
def drafts_of_head(
    head: HeadSpec, weights: Params, spec: DecoderSpec, params: Params, ids: jax.Array, states: tuple
) -> jax.Array:
    """The draft after each token but the first."""
    state = draft_head.target_state(head, weights, spec, params, states)[:-1]
    embedded = draft_head.embed_for_head(head, weights, spec, params, ids[1:])
    x, shape = draft_head.head_input(head, weights, embedded, state), jnp.zeros((1, len(ids) - 1), jnp.int32)
    hidden, _ = draft_head.head_layer(
        head, weights, x, jnp.arange(len(ids) - 1), None, shape, decoder.dense_causal_attend
    )
    best = draft_head.head_logits(head, weights, hidden, params).argmax(-1)
    return draft_head.to_target_ids(weights, best)


def test_the_head_agrees_with_the_demo_model_as_recorded(target: tuple) -> None:
    spec, params, ids = target
    record = check(EAGLE3)
    ids = ids[: record["tokens"]]
    head, weights = head_of(EAGLE3)
    *states, last = hidden_states(spec, params, ids, head.capture)
    drafts = np.asarray(drafts_of_head(head, weights, spec, params, ids, tuple(states)))
    assert abs((drafts == np.asarray(likeliest(spec, params, last))[1:]).mean() - record["agreement"][0]) < 0.01
    assert record["agreement"][0] > 0.4
