"""Pads the leaves of a model to the sizes of `sharding.split_spec`: heads of zeros or repeated heads, and zeros.

Leaves are numpy arrays from a checkpoint, or jax arrays that are on devices already.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jpaged.models.kv_scales import KVScales
from jpaged.models.sharding import AXES, HeadPadding, Shards, head_padding, latent_heads, split_axis
from jpaged.models.spec import DecoderSpec

_OF_QUERIES, _OF_KEYS = ("q", "o", "sinks"), ("k", "v", "k_norm")
_FUSED = ("qkv", "qkv_bias")


def pad_leaf(
    name: str, leaf: Shaped[Any, "..."], spec: DecoderSpec, shards: Shards
) -> Shaped[Any, "..."]:
    """The leaf `name` in the shape of `split_spec`, without a copy if nothing changes. spec: before `split_spec`."""
    wanted = padded_shape(name, leaf.shape, spec, shards)
    if wanted == leaf.shape:
        return leaf
    if spec.latent is None and name in (*_FUSED, *_OF_QUERIES, *_OF_KEYS):
        return _with_heads(name, leaf, spec, head_padding(spec, shards)).reshape(wanted)
    if isinstance(leaf, jax.Array):
        return jnp.pad(leaf, [(0, size - old) for size, old in zip(wanted, leaf.shape, strict=True)])
    padded = np.zeros(wanted, leaf.dtype)
    padded[tuple(slice(size) for size in leaf.shape)] = leaf
    return padded


def padded_shape(name: str, shape: tuple[int, ...], spec: DecoderSpec, shards: Shards) -> tuple[int, ...]:
    """Shape of the leaf `name` after `pad_leaf`. shape: before. spec: before `split_spec`."""
    axis = split_axis(name, len(shape), shards, spec)
    if axis is None:
        return shape
    if spec.latent is None and name in (*_FUSED, *_OF_QUERIES, *_OF_KEYS):
        heads = head_padding(spec, shards)
        if name in _FUSED:
            return (heads.kv_heads, heads.fused(spec), *shape[2:])
        before, after = spec.num_kv_heads, heads.kv_heads
        if name in _OF_QUERIES:
            before, after = spec.num_heads, heads.kv_heads * heads.q_per_kv
        return (*shape[:axis], after * (shape[axis] // before), *shape[axis + 1 :])
    kind = AXES.get(name, ("heads",))[axis - len(shape)]
    divisor = shards.units(kind)
    if spec.latent is not None and kind == "heads":
        divisor = latent_heads(spec.latent, shards)
    width = spec.latent.v_dim if spec.latent is not None and name == "o" else 1  # elements per head
    size = -(-shape[axis] // (divisor * width)) * divisor * width
    return (*shape[:axis], size, *shape[axis + 1 :])


def _with_heads(name: str, leaf: Shaped[Any, "..."], spec: DecoderSpec, heads: HeadPadding) -> Shaped[Any, "..."]:
    """The heads of `HeadPadding`, on one axis of the result."""
    if name in _FUSED:
        view, axis = leaf.reshape(-1, *leaf.shape[2:]), 0
    else:
        number = spec.num_heads if name in _OF_QUERIES else spec.num_kv_heads
        axis = 1 if name == "o" else 0  # of o, the last axis is heads, or heads and head_dim
        width = leaf.shape[axis] // number
        view = leaf.reshape(*leaf.shape[:axis], number, width, *leaf.shape[axis + 1 :])
    return _taken(view, _sources(name, spec, heads), axis)


def _sources(name: str, spec: DecoderSpec, heads: HeadPadding) -> list[int | None]:
    """For each head after the padding: the index of the same head before. None: a head of zeros."""
    group, sources = spec.q_per_kv, list[int | None]()
    for head in range(heads.kv_heads):
        kv_head, repeat = divmod(head, heads.repeats)
        exists = kv_head < spec.num_kv_heads
        queries = [repeat * heads.q_per_kv + i for i in range(heads.q_per_kv)]
        if name in _OF_KEYS:
            sources.append(kv_head if exists else None)
        elif name in _OF_QUERIES:
            sources += [kv_head * group + i if exists and i < group else None for i in queries]
        else:  # a KV head's gates if there are any, its queries, then its key and its value
            first = kv_head * spec.qkv_heads
            for _ in range(1 + spec.attention_gate):
                sources += [first + i if exists and i < group else None for i in queries]
                first += group
            sources += [first + i if exists else None for i in range(2)]
    return sources


def _taken(leaf: Shaped[Any, "..."], sources: Sequence[int | None], axis: int) -> Shaped[Any, "..."]:
    """Indices `sources` of an axis. None: zeros."""
    if isinstance(leaf, jax.Array):
        beyond = leaf.shape[axis]
        indices = np.array([beyond if source is None else source for source in sources], np.int32)
        return jnp.take(leaf, indices, axis, mode="fill", fill_value=0)
    taken = np.zeros((*leaf.shape[:axis], len(sources), *leaf.shape[axis + 1 :]), leaf.dtype)
    whole = (slice(None),) * axis
    for target, source in enumerate(sources):
        if source is not None:
            taken[(*whole, target)] = leaf[(*whole, source)]
    return taken


def pad_kv_scales(scales: KVScales | None, spec: DecoderSpec, shards: Shards) -> KVScales | None:
    """Scales of a checkpoint's KV heads with the shapes of `split_spec`. spec: before `split_spec`."""
    if scales is None or shards.divisor == 1 or spec.latent is not None:
        return scales
    heads = head_padding(spec, shards)

    def pad(array: np.ndarray) -> np.ndarray:
        repeated = np.repeat(array, heads.repeats, axis=1)
        return np.pad(repeated, ((0, 0), (0, heads.kv_heads - repeated.shape[1])), constant_values=1.0)

    return KVScales(pad(scales.keys), pad(scales.values))
