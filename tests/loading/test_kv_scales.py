"""Scales of keys and values in a checkpoint: wrong ones are refused by name.

tests/end_to_end/test_kv_cache_dtype.py uses them.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading import load_model
from jpaged.loading.checkpoint import Checkpoint
from jpaged.loading.kv_scales import read_kv_scales
from jpaged.models.families import spec_of
from tests.golden.checkpoints import BY_NAME, write_checkpoint, write_safetensors

SPEC = spec_of(BY_NAME["llama"].config)
K = "model.layers.1.self_attn.k_scale"
SCALES = {f"model.layers.{i}.self_attn.{kind}_scale": np.float32([0.5]) for i in range(2) for kind in "kv"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({K: np.ones(1, np.int32)}, f"{K} is I32[1], but must be F16 or BF16 or F32"),
        ({K: np.ones(1, np.int8)}, f"{K} is I8[1], but must be"),
        ({K: np.float32([3e38])}, f"{K} is [3e+38]: must be finite and above 0, and at most 7.6e+35"),
        ({K: np.float32([-1])}, f"{K} is [-1]: must be finite and above 0"),
        ({K: np.float32([])}, f"{K} has 0 numbers"),
        ({K: np.ones((2, 1, 1), np.float32)}, None),
        (
            {"model.layers.1.self_attn.k_proj.k_scale": np.float32([0.25])},
            f"{K} and model.layers.1.self_attn.k_proj.k_scale are both the scale of k in layer 1: remove one",
        ),
    ],
)
def test_a_wrong_scale_is_refused_by_name(
    changes: dict[str, np.ndarray], message: str | None, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "model.safetensors", SCALES | changes)
    with Checkpoint(tmp_path) as checkpoint:
        if message is None:
            assert read_kv_scales(checkpoint, SPEC) is not None
            return
        with pytest.raises(ModelLoadError, match=re.escape(f"model.safetensors: {message}")):
            read_kv_scales(checkpoint, SPEC)


def test_a_scale_of_a_layer_that_the_model_has_not_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(BY_NAME["llama"], 0, tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        tensors = {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
    more = "model.layers.7.self_attn.k_scale"
    write_safetensors(tmp_path / "model.safetensors", tensors | SCALES | {more: np.float32([0.5])})
    with pytest.raises(ModelLoadError, match=rf"tensor {more} is more than config\.json calls for"):
        load_model(EngineConfig(model=str(tmp_path), dtype="float32"), check=pytest.fail)
