"""A small decoder with random weights, and its greedy continuations computed without pages."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.models import decoder
from jpaged.models.spec import DecoderSpec, Rope, param_shapes

SPEC = DecoderSpec(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=2048, rope=Rope(), tie_embeddings=True,
)  # fmt: skip
BLOCK = 16
CONFIG = EngineConfig(
    model="test", max_num_seqs=8, max_num_batched_tokens=64, row_buckets=(8,), token_buckets=(64,), block_size=BLOCK
)


def random_params(spec=SPEC, seed=0):
    """Random weights. Norm gains are about 2, so that greedy output does not collapse to one token."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        values = rng.standard_normal(shape.shape) * 0.15
        return jnp.asarray(values + (2 if "norm" in str(path[-1]) else 0), shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, param_shapes(spec, jnp.float32))


def dense_continuation(spec, params):
    """Greedy continuation that recomputes the whole sequence for every token, without pages."""

    @jax.jit
    def logits(ids):
        shape = jnp.zeros((1, len(ids)), jnp.int32)
        hidden, *_ = decoder.decode(
            spec, params, ids, jnp.arange(len(ids)), [None] * spec.num_layers, shape, decoder.dense_causal_attend
        )
        return decoder.lm_head(spec, params, hidden)

    def greedy(prompt, count):
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(np.argmax(logits(jnp.asarray(ids + [0] * (128 - len(ids)), jnp.int32))[len(ids) - 1])))
        return ids[len(prompt) :]

    return greedy
