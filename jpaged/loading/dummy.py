"""Random weights instead of a checkpoint's, for `load_format="dummy"`: to measure a model without its files."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.loading.dtypes import BY_NAME
from jpaged.loading.weights import StoredWeights
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.new_leaves import NewLeaf
from jpaged.models.quantization import LeafPlacer
from jpaged.models.spec import DecoderSpec, Params, param_shapes

RANGE = 1e-3  # weights are uniform between -RANGE and RANGE, as in vLLM


def dummy_weights(spec: DecoderSpec, config: CheckpointConfig) -> StoredWeights:
    """Return weights that are drawn on the device at load time, one leaf at a time."""
    named = config.get("dtype", "torch_dtype")
    dtype = BY_NAME.get(named) if isinstance(named, str) else None
    leaves = jax.tree.leaves(param_shapes(spec, dtype or np.float32))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    shapes = lambda dtype, quantizer: quantizer.finish(quantizer.shapes(param_shapes(spec, dtype)))  # noqa: E731
    return StoredWeights(spec, dtype, size, functools.partial(_draw, spec), shapes, functools.partial(_leaves, spec))


def _draw(spec: DecoderSpec, dtype: np.dtype, quantizer: LeafPlacer) -> Params:
    """Draw the tree of `param_shapes`. quantizer: called with each leaf's name and array."""
    tree = jax.tree.structure(param_shapes(spec, dtype))
    return quantizer.finish(jax.tree.unflatten(tree, [leaf.make() for leaf in _leaves(spec, dtype, quantizer)]))


def _leaves(spec: DecoderSpec, dtype: np.dtype, quantizer: LeafPlacer) -> Iterator[NewLeaf]:
    """The leaves of `_draw`, in the order of `jax.tree.leaves`."""

    def leaf_of(number: int, layer: int | None, name: str, shape: jax.ShapeDtypeStruct) -> NewLeaf:
        def make() -> Any:
            return quantizer.of_layer(layer)(name, _uniform(np.uint32(number), shape.shape, shape.dtype))

        return NewLeaf(layer, name, make, owned=True)

    for number, (path, shape) in enumerate(jax.tree.flatten_with_path(param_shapes(spec, dtype))[0]):
        yield leaf_of(number, path[1].idx if path[0].key == "layers" else None, path[-1].key, shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(seed: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape, jnp.float32, -RANGE, RANGE).astype(dtype)
