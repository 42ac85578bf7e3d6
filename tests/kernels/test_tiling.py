"""Tile sizes: the kernels read tuning.json, and an entry applies to one GPU and shape only."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVPages, platforms
from pallas_kernels.paged_attention import tiling, usable_implementations
from pallas_kernels.paged_attention.tiling import Tiling
from pallas_kernels.paged_attention.triton_decode import splits_of_rows
from pallas_kernels.paged_attention.triton_keys import Problem


def call(head_dim=128, q_heads=8):
    q = jax.ShapeDtypeStruct((1, q_heads, head_dim), np.dtype("float32"))
    return q, KVPages.shapes(1, 16, 2, head_dim, "bfloat16")


def test_the_shipped_file_holds_tilings():
    for shapes in json.loads(tiling.FILE.read_text()).values():
        for key, entry in shapes.items():
            assert key.startswith("q ")
            Tiling(**entry["tiling"])


def test_measured_shapes_use_their_tiling_and_others_the_rule(monkeypatch, tmp_path):
    measured = Tiling(32, 64, 32, min_split_keys=256, decode_warps=2)
    file = tmp_path / "tuning.json"
    entry = {"tiling": {"decode_keys": 32, "prefill_rows": 64, "prefill_keys": 32, "min_split_keys": 256,
                        "decode_warps": 2}}  # fmt: skip
    key = "q float32, pages bfloat16, head_dim 128, q_per_kv 4, block 16"
    file.write_text(json.dumps({jax.devices()[0].device_kind: {key: entry}, "another card": {}}))
    monkeypatch.setattr(tiling, "FILE", file)
    assert Tiling.choose(*call()) == measured
    assert Tiling.choose(*call(q_heads=16)) == Tiling.by_rule(128, 4) != measured
    another = type("Device", (), {"device_kind": "another card", "platform": "gpu"})
    monkeypatch.setattr(jax, "devices", lambda: [another])
    assert Tiling.choose(*call()) == Tiling.by_rule(128, 4)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU's prefill needs JAX 0.11")
def test_choice_of_the_prefill(monkeypatch, tmp_path):
    """Mosaic GPU's on Hopper, for calls that it takes, unless a measurement on the card found Triton's faster."""
    file = tmp_path / "tuning.json"
    kinds = {kind: dataclasses.asdict(Tiling.by_rule(128, 2)) | {"prefill_kernel": kernel}
             for kind, kernel in (("NVIDIA H200", "mosaic_gpu"), ("NVIDIA H20", "triton"))}  # fmt: skip
    key = "q bfloat16, pages bfloat16, head_dim 128, q_per_kv 4, block 16"
    file.write_text(json.dumps({kind: {key: {"tiling": fields}} for kind, fields in kinds.items()}))
    monkeypatch.setattr(tiling, "FILE", file)
    tables = jax.ShapeDtypeStruct((1, 8), np.dtype("int32"))

    def names(kind, *, pages="bfloat16", head_dim=128, most=64, capability="9.0"):
        card = types.SimpleNamespace(device_kind=kind, platform="gpu", compute_capability=capability)
        q = jax.ShapeDtypeStruct((64, 8, head_dim), jnp.dtype("bfloat16"))
        return usable_implementations(card, q, KVPages.shapes(1, 16, 2, head_dim, pages), tables, most)

    triton = ("triton", "triton_small", "xla")
    mosaic = ("mosaic_prefill", *triton)
    assert names("NVIDIA H200") == names("NVIDIA H100") == mosaic
    assert [names("NVIDIA H100", head_dim=n) for n in (64, 256, 80)] == [mosaic, mosaic, triton]
    assert names("NVIDIA H20") == names("NVIDIA H100", pages="int8") == names("NVIDIA H100", most=1) == triton
    assert names("NVIDIA A100-SXM4-80GB", capability="8.0") == names("NVIDIA B200", capability="10.0") == triton


@pytest.mark.parametrize(("keys", "sizes"), [(16, []), (16384, []), (16385, [1024]), (131072, [1024, 2048, 4096])])
def test_splits_grow_with_the_row(keys, sizes):
    """At most 32 splits with 8 KV heads."""
    assert Tiling.by_rule(128, 2).longer_splits(keys, 8) == sizes


@pytest.mark.parametrize(
    ("kind", "small"),
    [("NVIDIA L4", True), ("NVIDIA L40S", True), ("NVIDIA A10", True), ("NVIDIA GeForce RTX 4090", True),
     ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA H200", False), ("NVIDIA H100 80GB HBM3", False)],
)  # fmt: skip
def test_cards_with_little_shared_memory_are_known(kind, small):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=58, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert platforms.has_small_blocks() == small
        assert platforms.num_multiprocessors() == 58
        assert Tiling.choose(*call()).prefill_stages == 2  # float32
        assert (Tiling.by_rule(128, 2, small_blocks=small).prefill_stages == 2) == small
        assert platforms.is_a100() == ("A100" in kind)


def test_splits_of_rows_follow_their_lengths():
    """One row of 4,096 keys has 64 tasks with 8 KV heads, however long other requests may be."""
    problem = Problem(
        scale=1.0, kv_heads=8, q_per_kv=4, head_dim=128, key_dim=128, v_dim=128, latent=False, block_size=16,
        table_keys=131_072, window=None, softcap=None,
        has_sinks=False, has_slopes=False, scales="none", tiling=Tiling.by_rule(128, 2), interpret=True,
    )  # fmt: skip

    def splits(problem):
        lens = np.array([0, 1, 512, 513, 4096, 16384, 16385, 131_072, 5000], np.int32)
        # the first row is empty, the last one has two tokens
        starts = np.array([0, 0, 1, 2, 3, 4, 5, 6, 7, 9], np.int32)
        return jax.jit(functools.partial(splits_of_rows, problem))(lens, starts).tolist()

    assert splits(problem) == [0, 1, 1, 2, 4096 // 512, 32, 17, 32, 0]
    # a window of 600 keys, in splits that begin at multiples of their size
    assert splits(dataclasses.replace(problem, window=600)) == [0, 1, 1, 2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("kv_heads", "keys", "window", "splits"),
    [(8, 131072, None, 32), (8, 4096, None, 8), (8, 131072, 1, 1), (8, 131072, 512, 2), (8, 131072, 514, 3),
     (2, 131072, None, 128), (1, 2**20, None, 128), (64, 131072, None, 8)],
)  # fmt: skip
def test_most_splits_of_a_row(kv_heads, keys, window, splits):
    assert Tiling.by_rule(128, 2).splits(keys, window, kv_heads) == splits


@pytest.mark.parametrize(("q_per_kv", "splits"), [(8, 128), (64, 32), (128, 16)])
def test_rows_of_many_wide_heads_have_few_splits(q_per_kv, splits):
    """At most 1 GiB of their results for 256 rows, with one KV head of 512 columns."""
    assert Tiling.by_rule(576, 2, q_per_kv=q_per_kv).splits(131_072, None, 1) == splits
    assert 256 * q_per_kv * 512 * 4 * splits <= 2**30
