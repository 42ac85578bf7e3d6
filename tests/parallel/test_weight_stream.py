"""Leaves that node 0 sends: another node makes the same parts of them, from no more bytes than it needs."""

import concurrent.futures
import multiprocessing

import jax
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.runtime.parallel import process_group
from jpaged.runtime.parallel.process_group import Channel, ProcessGroup
from jpaged.runtime.parallel.weight_stream import LeafSender, received_leaves
from tests.golden.checkpoints import BY_NAME, write_checkpoint


@pytest.fixture
def groups():
    """Node 0 and node 1."""
    ends = multiprocessing.Pipe()
    return [ProcessGroup(rank, 2, [Channel(end)]) for rank, end in enumerate(ends)]


def leaves_of(params):
    """(layer, name, leaf) of a tree."""
    for index, layer in enumerate(params["layers"]):
        yield from ((index, name, leaf) for name, leaf in layer.items())
    yield from ((None, name, leaf) for name, leaf in params.items() if name != "layers")


def shards_on(leaf, devices):
    """The parts of a leaf's arrays on devices, in one order."""
    return [
        np.asarray(shard.data)
        for array in jax.tree.leaves(leaf)
        for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id)
        if shard.device in devices
    ]


def exchange(groups, placer, whole):
    """Send a tree. Returns the leaves of both nodes in the order of sending, and the devices of node 1."""
    mesh = list(placer.mesh.devices.flat)
    devices = mesh[len(mesh) // 2 :]
    sender = LeafSender(placer, groups[0], [devices])
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        made = threads.submit(
            lambda: [(leaf.layer, leaf.name, leaf.make()) for leaf in received_leaves(groups[1], placer, {})]
        )
        sent = [(layer, name, sender.of_layer(layer)(name, leaf)) for layer, name, leaf in leaves_of(whole)]
        groups[0].send("end_of_weights")
        return sent, made.result(60), devices


@pytest.mark.parametrize(
    ("variant", "count", "options"),
    [
        ("llama", 4, {}),
        pytest.param("qwen2", 8, {}, marks=pytest.mark.slow),  # repeated KV heads
        pytest.param("mixtral", 2, {"enable_expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("llama", 2, {"deterministic": True}, marks=pytest.mark.slow),
        pytest.param("llama", 2, {"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param("llama", 2, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_another_node_makes_the_same_parts(variant, count, options, groups, tmp_path):
    write_checkpoint(BY_NAME[variant], 0, tmp_path)
    options = {"model": str(tmp_path), "dtype": "float32"} | options
    whole = load_model(EngineConfig(**options | {"deterministic": False, "quantization": None})).params
    placer = load_model(EngineConfig(**options, tensor_parallel_size=count)).placer
    sent, made, devices = exchange(groups, placer, whole)
    assert [leaf[:2] for leaf in made] == [leaf[:2] for leaf in sent]
    for (_, name, one), (_, _, other) in zip(sent, made, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        pairs = list(zip(shards_on(one, devices), shards_on(other, devices), strict=True))
        assert len(pairs) == len(devices) * len(jax.tree.leaves(one))
        for mine, theirs in pairs:
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert mine.tobytes() == theirs.tobytes(), name


def test_a_node_gets_the_bytes_of_its_part_in_slabs(groups, tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "SLAB_BYTES", 1000)
    write_checkpoint(BY_NAME["llama"], 0, tmp_path)
    options = {"model": str(tmp_path), "dtype": "float32"}
    whole = load_model(EngineConfig(**options)).params
    placer = load_model(EngineConfig(**options, tensor_parallel_size=2)).placer
    sizes, receive = [], Channel.receive_bytes

    def counted(self, size):
        sizes.append(size)
        return receive(self, size)

    monkeypatch.setattr(Channel, "receive_bytes", counted)
    sent, made, devices = exchange(groups, placer, whole)
    for (_, name, one), (_, _, other), size in zip(sent, made, sizes, strict=True):
        [mine], [theirs] = shards_on(one, devices), shards_on(other, devices)
        assert mine.tobytes() == theirs.tobytes(), name
        assert size == mine.nbytes, name


def test_calls_come_between_leaves_and_node_0_may_end_the_update(groups):
    calls = []
    leaves = received_leaves(groups[1], None, {"check_weights": lambda *values: calls.append(values)})
    groups[0].send("check_weights", 7, "path")
    groups[0].send("abandon_weights")
    with pytest.raises(ModelLoadError, match="node 0 has ended the update"):
        next(leaves)
    assert calls == [(7, "path")]
