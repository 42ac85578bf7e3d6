"""The part of each array on a device: padding, splitting and joining, without an engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.errors import ModelLoadError
from jpaged.models.padding import pad_leaf
from jpaged.models.quantization import SCHEMES, Quantizer
from jpaged.models.shard_weights import ShardedQuantizer
from jpaged.models.sharding import (
    AXES,
    Shards,
    head_padding,
    local_shape,
    local_spec,
    make_mesh,
    split_axis,
    split_spec,
)
from jpaged.models.spec import DecoderSpec, Experts, LayerKV, QKNorm, Rope, param_shapes
from pallas_kernels import QuantizedWeight

SPEC = DecoderSpec(
    vocab_size=251, hidden_size=64, intermediate_size=90, num_layers=2, num_heads=14, num_kv_heads=2, head_dim=16,
    max_position=64, rope=Rope(), qkv_bias=True,
)  # fmt: skip
EXPERTS = Experts(num=6, per_token=2, intermediate_size=44, layers=(True, False), shared_size=30)


def dense_attention(x, qkv, o, spec):
    """Attention of one sequence in float64, from the leaves of a spec: an oracle for padded heads."""
    kv, group, dim = spec.num_kv_heads, spec.q_per_kv, spec.head_dim
    product = np.einsum("ti,kgdi->tkgd", x, qkv.astype(np.float64))
    q, k, v = product[:, :, :group], product[:, :, group], product[:, :, group + 1]
    scores = np.einsum("tkgd,skd->kgts", q, k) * spec.scale
    scores = np.where(np.tril(np.ones(scores.shape[-2:])), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("kgts,skd->tkgd", weights, v).reshape(len(x), kv * group * dim)
    return out @ o.astype(np.float64).T


@given(
    kv_heads=st.integers(1, 9), q_per_kv=st.integers(1, 7), count=st.sampled_from([2, 3, 4, 8]),
    parts=st.sampled_from([1, 8]),
)  # fmt: skip
def test_padded_heads_give_the_same_attention(kv_heads, q_per_kv, count, parts):
    shards = Shards(count, parts if parts % count == 0 else 1)
    spec = dataclasses.replace(SPEC, num_heads=kv_heads * q_per_kv, num_kv_heads=kv_heads, head_dim=4)
    split = split_spec(spec, shards)
    assert split.num_kv_heads % shards.divisor == 0
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 8))
    qkv = rng.standard_normal((kv_heads, q_per_kv + 2, 4, 8)).astype(np.float32)
    o = rng.standard_normal((8, spec.num_heads * 4)).astype(np.float32)
    padded = dense_attention(x, pad_leaf("qkv", qkv, spec, shards), pad_leaf("o", o, spec, shards), split)
    np.testing.assert_allclose(padded, dense_attention(x, qkv, o, spec), atol=1e-12)


def test_heads_are_repeated_where_that_is_cheaper_than_padding():
    few = head_padding(SPEC, Shards(8))  # 2 KV heads of 7 query heads: 8 KV heads of 2
    assert (few.repeats, few.kv_heads, few.q_per_kv) == (4, 8, 2)
    many = head_padding(dataclasses.replace(SPEC, num_heads=10, num_kv_heads=10), Shards(4))
    assert (many.repeats, many.kv_heads, many.q_per_kv) == (1, 12, 1)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_every_leaf_is_padded_to_the_shape_of_the_split_model(count, expert_parallel):
    shards = Shards(count, expert_parallel=expert_parallel)
    spec = dataclasses.replace(SPEC, experts=EXPERTS)
    split = split_spec(spec, shards)
    placer = ShardedQuantizer(Quantizer(), make_mesh(jax.devices()[:count], shards), shards, spec)
    shapes = placer.shapes(param_shapes(spec, np.float32))
    wanted = param_shapes(dataclasses.replace(split, vocab_size=252), np.float32)
    of_experts = {name for name in AXES if name.startswith("expert")}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name, other = path[-1].key, wanted
        for key in path:
            other = other[getattr(key, "key", getattr(key, "idx", None))]
        padded_experts = -(-EXPERTS.num // count) * count if expert_parallel and name in of_experts else other.shape[0]
        assert leaf.shape == (padded_experts, *other.shape[1:]), name
        axis = split_axis(name, len(leaf.shape), shards, spec)
        here = local_shape(leaf)
        assert [size * count if i == axis else size for i, size in enumerate(here)] == list(leaf.shape)
    assert local_spec(split, shards).num_kv_heads * count == split.num_kv_heads


def leaf_of(name, spec):
    shapes = param_shapes(spec, np.float32)
    shape = shapes["layers"][0].get(name, shapes.get(name)).shape
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


NAMES = ("qkv", "o", "gate_up", "down", "embed")
QUICK = {("int8", "embed"), (None, "qkv"), (None, "down")}


@pytest.mark.parametrize(("scheme", "name"), [
    pytest.param(scheme, name, marks=[pytest.mark.slow] * ((scheme, name) not in QUICK))
    for scheme in (None, "int8", "int4") for name in NAMES
])  # fmt: skip
def test_the_parts_of_all_devices_are_the_leaf(scheme, name):
    """Dense leaves bit for bit, quantised ones as each device's own part is rounded."""
    spec = dataclasses.replace(SPEC, num_heads=16, num_kv_heads=4, intermediate_size=256, vocab_size=256)
    shards, leaf = Shards(2), leaf_of(name, spec)
    quantizer = Quantizer(SCHEMES[scheme] if scheme else None)
    placed = ShardedQuantizer(quantizer, make_mesh(jax.devices()[:2], shards), shards, spec)(name, leaf)
    axis = split_axis(name, leaf.ndim, shards, spec)
    if scheme is None:
        assert np.array_equal(placed, leaf)
        assert placed.sharding.shard_shape(placed.shape)[axis] == leaf.shape[axis] // 2
        return
    assert isinstance(placed, QuantizedWeight)
    for device, part in enumerate(np.split(leaf, 2, axis)):
        own = jax.tree.map(lambda a, d=device: jnp.asarray(a.addressable_shards[d].data), placed)
        expected = quantizer(name, part)
        assert own.shape == part.shape
        assert np.array_equal(own.dequantize(), expected.dequantize())


def test_heads_that_cannot_be_padded_are_refused():
    spec = dataclasses.replace(SPEC, num_heads=6, num_kv_heads=6, qk_norm=QKNorm.PROJECTION)
    assert split_spec(spec, Shards(3)).num_heads == 6
    repeated = dataclasses.replace(spec, num_heads=8, num_kv_heads=2)
    assert split_spec(repeated, Shards(4)).num_kv_heads == 4
    gains = pad_leaf("k_norm", np.arange(32, dtype=np.float32), repeated, Shards(4)).reshape(4, 16)
    assert np.array_equal(gains[0], gains[1])
    assert not np.array_equal(gains[1], gains[2])
    with pytest.raises(ModelLoadError, match="leave deterministic out"):
        split_spec(spec, Shards(2, parts=8))
    with pytest.raises(ModelLoadError, match=r"6 KV heads, .* 4 equal parts, .* use tensor_parallel_size 1 or 2 or 3$"):
        split_spec(spec, Shards(4))


UNLIKE = dataclasses.replace(
    SPEC, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=16, qkv_bias=False, qk_norm=QKNorm.HEAD,
    layer_kv=(LayerKV(4, 16), LayerKV(1, 32, values_are_keys=True), LayerKV(1, 32, values_are_keys=True, source=1)),
    intermediate_sizes=(90, 90, 45),
)  # fmt: skip


def test_heads_of_unlike_layers_are_repeated_for_each_layer():
    """One KV head of 32 becomes 4, so the pages have the size of these layers."""
    shards = Shards(4)
    split = split_spec(UNLIKE, shards)
    assert [kv.heads for kv in split.layer_kv] == [4, 4, 4]
    assert (split.num_heads, split.num_kv_heads, split.head_dim, split.page_parts) == (8, 4, 32, (2, 1, 1))
    local = local_spec(split, shards)
    assert [kv.heads for kv in local.layer_kv] == [1, 1, 1]
    assert (local.num_heads, local.num_kv_heads, local.intermediate_sizes) == (2, 1, (23, 23, 12))
    mesh = make_mesh(jax.devices()[:4], shards)
    placer = ShardedQuantizer(Quantizer(), mesh, shards, UNLIKE)
    rng = np.random.default_rng(0)
    shapes = param_shapes(UNLIKE, np.float32)["layers"]
    for i, (layer, wanted) in enumerate(zip(shapes, param_shapes(split, np.float32)["layers"], strict=True)):
        for name, leaf in layer.items():
            host = rng.standard_normal(leaf.shape).astype(np.float32)
            placed = placer.of_layer(i)(name, host)
            assert placed.shape == wanted[name].shape, name
            if name == "k":
                np.testing.assert_array_equal(placed, np.tile(host, (4, 1)))
            elif name in ("q", "o"):  # 8 query heads are 2 for each repeated head, in the same order
                np.testing.assert_array_equal(placed, host)


@pytest.mark.parametrize(
    ("changes", "shards", "says"),
    [
        ({"num_heads": 6, "layer_kv": (LayerKV(3, 16), LayerKV(1, 16), LayerKV(1, 16))}, Shards(2), "equal parts: use"),
        ({"activation_sparsity": (0.5, 0.5, 0.0)}, Shards(8, 8), "other numbers of devices: leave deterministic out"),
        ({"activation_sparsity": (0.5, 0.5, 0.0)}, Shards(2), "a tensor_parallel_size that divides 45"),
    ],
)
def test_unlike_layers_that_cannot_be_split_are_refused(changes, shards, says):
    with pytest.raises(ModelLoadError, match=says):
        split_spec(dataclasses.replace(UNLIKE, **changes), shards)
