"""Random weights instead of a checkpoint's, for `load_format="dummy"`: to measure a model without its files."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.loading.dtypes import BY_NAME
from jpaged.loading.weights import StoredWeights
from jpaged.models.families.config import CheckpointConfig
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
    return StoredWeights(spec, dtype, size, functools.partial(_draw, spec), shapes)


def _draw(spec: DecoderSpec, dtype: np.dtype, quantizer: LeafPlacer) -> Params:
    """Draw the tree of `param_shapes`. quantizer: called with each leaf's name and array."""
    shapes, tree = jax.tree.flatten_with_path(param_shapes(spec, dtype))
    leaves = []
    for number, (path, shape) in enumerate(shapes):
        leaf = _uniform(np.uint32(number), shape.shape, shape.dtype)
        layer = path[1].idx if path[0].key == "layers" else None
        leaves.append(quantizer.of_layer(layer)(path[-1].key, leaf))
    return quantizer.finish(jax.tree.unflatten(tree, leaves))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(seed: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape, jnp.float32, -RANGE, RANGE).astype(dtype)
