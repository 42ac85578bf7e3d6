"""Tile sizes: the kernels read tuning.json, and an entry applies to one card and shape only."""

import json

import jax
import numpy as np
import pytest

from pallas_kernels import KVPages
from pallas_kernels.paged_attention import tiling
from pallas_kernels.paged_attention.tiling import Tiling


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
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"device_kind": "another card"})])
    assert Tiling.choose(*call()) == Tiling.by_rule(128, 4)


@pytest.mark.parametrize(("keys", "size"), [(16, 512), (16384, 512), (16385, 1024), (131072, 4096)])
def test_splits_are_few_and_long(keys, size):
    assert Tiling.by_rule(128, 2).split_keys(keys) == size
