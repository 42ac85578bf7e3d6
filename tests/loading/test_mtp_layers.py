"""MTP layers of every family, under the names of the releases, against float64 formulas."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.loading import load_model
from jpaged.loading.drafters import load_drafter
from jpaged.models import decoder, draft_head
from jpaged.speculation_config import SpeculationConfig
from tests.support.mtp_checkpoints import PUBLISHED, write_with_mtp
from tests.support.mtp_oracle import Oracle

TOKENS = 24  # more than an indexer chooses
PASSES = 2
# By what they have that DeepSeek's layer does not: attention in a hybrid model and norms with an offset; two blocks, no
# rope; the model's own norm, a dense network
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in PUBLISHED]
)
def test_an_mtp_layer_computes_the_formulas(name, tmp_path):
    tensors = write_with_mtp(name, tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    model = load_model(config)
    drafter = load_drafter(SpeculationConfig(method="mtp"), model, config)
    values = json.loads((tmp_path / "config.json").read_text())
    oracle, rng = Oracle(name, values, tensors), np.random.default_rng(5)
    ids = rng.integers(3, values["vocab_size"], TOKENS + PASSES - 1)
    states = rng.standard_normal((TOKENS, values["hidden_size"])).astype(np.float32)
    state = oracle.model_state(states)
    for j, logits in enumerate(passes(drafter.head_spec, model.spec, drafter.params, model.params, ids, states)):
        wanted, state = oracle.run(ids[j : j + TOKENS], state)
        np.testing.assert_allclose(logits, wanted, rtol=2e-4, atol=2e-4)
        assert np.abs(wanted).max() > 1
