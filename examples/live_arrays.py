"""Generate from JAX code, with arrays that are already on the device. Run `python examples/live_arrays.py`.

The arrays are random here. A trainer passes its own, in the tree of `jpaged.models.spec.param_shapes`.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jpaged
from jpaged.models.spec import DecoderSpec, Rope, param_shapes


def main() -> None:
    """Print tokens that a random model generates."""
    spec = DecoderSpec(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=256,
        rope=Rope(),
        tie_embeddings=True,
    )
    shapes, tree = jax.tree.flatten(param_shapes(spec, jnp.float32))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [0.3 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, shapes, strict=True)]
    params = jax.tree.unflatten(tree, leaves)
    greedy = jpaged.SamplingParams(temperature=0, max_tokens=16)
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32}  # small sizes need fewer programs
    for output in jpaged.generate((spec, params), [[1, 2, 3], [4, 5, 6, 7]], greedy, **sizes):
        print(output.prompt_token_ids, "->", output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
