"""`TunixRollout` against tunix itself, where it is installed: `python -m pip install google-tunix` needs no torch.

tunix 0.1.7 gives Qwen 3 the rope base 1,000,000, whatever its config says.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.rl.tunix import TunixRollout
from tests.golden.checkpoints import BY_NAME
from tests.support.tunix_values import SIZES, Tokenizer

CONFIG = BY_NAME["qwen3"].config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.mark.slow
def test_tokens_and_log_probabilities_of_tunix() -> None:
    pytest.importorskip("tunix", reason="NOT CHECKED: tunix is not installed: python -m pip install google-tunix")
    from tunix.models.qwen3 import model as qwen3  # ty: ignore[import-not-found]
    from tunix.rl.rollout import base_rollout, vanilla_rollout  # ty: ignore[import-not-found]

    def make(seed: int) -> Any:
        sizes = qwen3.ModelConfig(
            num_layers=CONFIG["num_hidden_layers"], vocab_size=CONFIG["vocab_size"], embed_dim=CONFIG["hidden_size"],
            hidden_dim=CONFIG["intermediate_size"], num_heads=CONFIG["num_attention_heads"],
            head_dim=CONFIG["head_dim"], num_kv_heads=CONFIG["num_key_value_heads"], rope_theta=1_000_000,
            norm_eps=CONFIG["rms_norm_eps"], use_tied_embedding=True, dtype=jnp.float32, param_dtype=jnp.float32,
        )  # fmt: skip
        model = qwen3.Qwen3(sizes, rngs=nnx.Rngs(0))
        leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        pairs = zip(keys, leaves, strict=True)
        random = [0.2 * jax.random.normal(key, leaf.shape) + (leaf.ndim == 1) for key, leaf in pairs]
        nnx.update(model, jax.tree.unflatten(tree, random))
        embedding = model.embedder.input_embedding
        embedding[...] = embedding[...].at[0].set(0)  # padding is never the best token: tunix masks it
        return model

    config = base_rollout.RolloutConfig(
        max_tokens_to_generate=12, max_prompt_length=8, temperature=0.0, top_p=None, return_logprobs=True
    )
    cache = base_rollout.CacheConfig(64, CONFIG["num_hidden_layers"], CONFIG["num_key_value_heads"], CONFIG["head_dim"])
    model, tokenizer, prompts = make(0), Tokenizer(), ["hello", "worlds!"]
    ours = TunixRollout(model, tokenizer, None, config, config=CONFIG, **SIZES)
    theirs = vanilla_rollout.VanillaRollout(model, tokenizer, cache)
    assert isinstance(ours, base_rollout.BaseRollout)
    try:
        for seed in (1, 2):
            found, wanted = (worker.generate(prompts, config) for worker in (ours, theirs))
            assert isinstance(found, base_rollout.RolloutOutput)
            np.testing.assert_array_equal(found.left_padded_prompt_tokens, wanted.left_padded_prompt_tokens)
            for a, b in zip(found.tokens, wanted.tokens, strict=True):
                assert a.tolist() == np.asarray(b).tolist()
            completions = np.zeros((2, 12), np.int32)
            for row, tokens in zip(completions, found.tokens, strict=True):
                row[: len(tokens)] = tokens
            tokens = (jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(completions))
            scores = [np.asarray(worker.get_per_token_logps(*tokens)) for worker in (ours, theirs)]
            np.testing.assert_allclose(*(np.where(completions != 0, score, 0) for score in scores), atol=1e-4)
            new = nnx.state(make(seed), nnx.Param)
            ours.update_params(new, (nnx.Param,))
            theirs.update_params(new)
    finally:
        ours.close()
