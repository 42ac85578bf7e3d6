"""MTP layers of every family, under the names of the releases, against float64 formulas."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.drafters import describe_drafter, load_drafter
from jpaged.loading.drafters.mtp import plan_new_layer
from jpaged.loading.model_description import describe
from jpaged.loading.updates.named_update import ArraySource
from jpaged.models import decoder, draft_head
from jpaged.models.families import family_of
from jpaged.speculation_config import SpeculationConfig
from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors
from tests.support.checkpoint_files import change_config
from tests.support.mtp_checkpoints import PUBLISHED, write_with_mtp
from tests.support.mtp_oracle import Oracle

TOKENS = 24  # more than an indexer chooses
PASSES, MTP = 2, SpeculationConfig(method="mtp")
# Each differs from DeepSeek's layer: attention in a hybrid model, norms with an offset; two blocks without rope; the
# model's own norm, a dense network
DEFAULT = ("Qwen3.5", "Nemotron 3", "Ernie 4.5")


@functools.partial(jax.jit, static_argnums=(0, 1))
def passes(spec, target_spec, params, target, ids, states):
    """Logits of each pass. Pass j reads the tokens at p + 1 + j, and the states that the pass before has left."""
    state, found = draft_head.target_state(spec, params, target_spec, target, (states,)), []
    for j in range(PASSES):
        embedded = draft_head.embed_for_head(spec, params, target_spec, target, ids[j : j + TOKENS])
        hidden, _ = draft_head.head_layer(
            spec, params, draft_head.head_input(spec, params, embedded, state), jnp.arange(TOKENS), None,
            jnp.zeros((1, TOKENS), jnp.int32), decoder.dense_causal_attend,
        )  # fmt: skip
        found.append(draft_head.head_logits(spec, params, hidden, target))
        state = draft_head.next_state(spec, params, target, hidden)
    return found


SOME = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in PUBLISHED]
def engine(folder):
    return EngineConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True)


def loaded(folder):
    model = load_model(engine(folder))
    return model, load_drafter(MTP, model, engine(folder))


def shapes_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("name", SOME)
def test_an_mtp_layer_computes_the_formulas(name, tmp_path):
    tensors = write_with_mtp(name, tmp_path)
    model, drafter = loaded(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    oracle, rng = Oracle(name, values, tensors), np.random.default_rng(5)
    ids = rng.integers(3, values["vocab_size"], TOKENS + PASSES - 1)
    states = rng.standard_normal((TOKENS, values["hidden_size"])).astype(np.float32)
    state = oracle.model_state(states)
    for j, logits in enumerate(passes(drafter.head_spec, model.spec, drafter.params, model.params, ids, states)):
        wanted, state = oracle.run(ids[j : j + TOKENS], state)
        np.testing.assert_allclose(logits, wanted, rtol=2e-4, atol=2e-4)
        assert np.abs(wanted).max() > 1


@pytest.mark.parametrize("name", SOME)
def test_the_layer_is_planned_from_a_config_alone(name, tmp_path):
    """Also Qwen3-Next's, which has no key for it. New weights of a running model have the same leaves."""
    tensors = write_with_mtp(name, tmp_path)
    model, drafter = loaded(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    described = describe_drafter(MTP, describe(engine(tmp_path), "cpu"), engine(tmp_path), "cpu")
    assert described.head_spec == drafter.head_spec
    assert shapes_of(described.params) == shapes_of(drafter.params)
    family = family_of(model.config)
    plan, _ = plan_new_layer(drafter.head_spec, family, model.config, ArraySource(tensors), model.spec.num_layers)
    assert shapes_of(plan.tree(np.float32)) == shapes_of(drafter.params)


def test_the_layer_of_a_text_model_inside_a_wrapper(tmp_path):
    tensors = write_with_mtp("Qwen3.5", tmp_path / "text")
    values, whole = json.loads((tmp_path / "text/config.json").read_text()), tmp_path / "whole"
    whole.mkdir()
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": values}
    (whole / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    write_safetensors(whole / "model.safetensors", renamed | {"model.visual.norm.weight": np.ones(8, np.float32)})
    (_, of_text), (_, of_whole) = loaded(tmp_path / "text"), loaded(whole)
    assert of_whole.head_spec == of_text.head_spec
    jax.tree.map(np.testing.assert_array_equal, of_whole.params, of_text.params)


@pytest.mark.parametrize("name", ["Qwen3.5", pytest.param("Nemotron 3", marks=pytest.mark.slow)])
def test_the_layer_has_a_copy_of_an_output_matrix_that_is_split_over_devices(name, tmp_path):
    """Of Qwen3.5 it is the embedding. Also as planned, and among new weights."""
    tensors = write_with_mtp(name, tmp_path)
    config = dataclasses.replace(engine(tmp_path), tensor_parallel_size=2)
    model = load_model(config)
    drafter = load_drafter(MTP, model, config)
    wanted = tensors.get("lm_head.weight", tensors.get("model.embed_tokens.weight"))
    for part in drafter.params["lm_head"].addressable_shards:
        np.testing.assert_array_equal(part.data, wanted)
    (tmp_path / "model.safetensors").unlink()
    described = describe_drafter(MTP, describe(config, "cpu"), config, "cpu")
    assert shapes_of(described.params) == shapes_of(drafter.params)
    source = ArraySource(tensors)
    plan, of_layer = plan_new_layer(
        drafter.head_spec, family_of(model.config), model.config, source, model.spec.num_layers
    )
    assert shapes_of(plan.tree(np.float32)) == shapes_of(drafter.params)
    np.testing.assert_array_equal(of_layer.array("lm_head.weight"), wanted)


@pytest.mark.parametrize(("name", "change", "message"), [
    ("Nemotron 3", {"mtp_hybrid_override_pattern": "*-"}, "mtp_hybrid_override_pattern='*-' is not supported by"),
    ("Nemotron 3", {"mtp_layers_block_type": ["moe"]}, "mtp_layers_block_type=['moe'] is not supported by jpaged"),
])  # fmt: skip
def test_refused_by_name(name, change, message, tmp_path):
    write_with_mtp(name, tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        loaded(tmp_path)


def test_a_release_without_its_mtp_layers_is_refused(tmp_path):
    """MiniMax M2's config names three of them, and its checkpoint has none."""
    write_checkpoint(BY_NAME["minimax-m2"], 0, tmp_path)
    change_config(tmp_path, use_mtp=True, num_mtp_modules=3)
    with pytest.raises(ModelLoadError, match=r"\(MiniMaxM2ForCausalLM\) has no MTP layer: no tensor is of layer 2"):
        loaded(tmp_path)
