"""Context parallelism: the devices share the tokens of a step that computes prompts.

1. Each device runs all layers on its part of the step's tokens (`own_part`).
2. In each layer the devices exchange the keys and values of their tokens (`all_keys_and_values`). So every device has
   the whole KV cache, and its tokens attend to all tokens before them.
3. After the last layer the devices exchange hidden states (`all_tokens`), because output programs may read any of them.

Per layer and token of Llama 3.1 8B, the exchange of keys and values sends 2 x 1,024 numbers. Tensor parallelism reduces
hidden states twice, 2 x 4,096 numbers, and an all-reduce sends each about twice.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jpaged.models.sharding import CONTEXT
from jpaged.runtime.step.batch import Batch, KVGroupRows


def own_part(batch: Batch, count: int) -> Batch:
    """This device's 1 / count of a batch's tokens, in order. `slots` still has all tokens."""
    size = batch.token_ids.shape[0] // count
    first = lax.axis_index(CONTEXT) * size

    def rows(of_all: KVGroupRows) -> KVGroupRows:
        starts = of_all.query_start_loc
        later = jnp.maximum(starts[1:] - (first + size), 0)  # tokens of each row that later devices compute
        begins = jnp.clip(starts - first, 0, size)
        context_lens = jnp.where(begins[1:] > begins[:-1], of_all.context_lens - later, 0)
        return of_all.replace(query_start_loc=begins, context_lens=context_lens)

    return batch.replace(
        kv_groups=tuple(map(rows, batch.kv_groups)), real=own_tokens(batch.real, count),
        token_ids=own_tokens(batch.token_ids, count), positions=own_tokens(batch.positions, count),
        rope_lens=own_tokens(batch.rope_lens, count),
        adapter_slots=None if batch.adapter_slots is None else own_tokens(batch.adapter_slots, count),
    )  # fmt: skip


def own_tokens(array: Shaped[Array, "tokens *rest"], count: int) -> Shaped[Array, "part *rest"]:  # noqa: F821 - a shape is no product
    """This device's part of an array of all tokens, of count equal parts."""
    size = array.shape[0] // count
    return lax.dynamic_slice_in_dim(array, lax.axis_index(CONTEXT) * size, size)


def all_tokens(part: Shaped[Array, "part *rest"]) -> Shaped[Array, "tokens *rest"]:  # noqa: F821
    """The parts of all devices, in order."""
    return lax.all_gather(part, CONTEXT, tiled=True)


def all_keys_and_values(
    k: Float[Array, "part kv_heads head_dim"], v: Float[Array, "part kv_heads head_dim"] | None
) -> tuple[Float[Array, "tokens kv_heads head_dim"], Float[Array, "tokens kv_heads head_dim"] | None]:
    """Keys and values of all devices' tokens, in one exchange. v: None with latent attention."""
    if v is None:
        return all_tokens(k), None
    k, v = jnp.split(all_tokens(jnp.concatenate([k, v], axis=-1)), 2, axis=-1)
    return k, v
