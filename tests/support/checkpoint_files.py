"""Files of a checkpoint: its tensors, changes of its config, its split into shards."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.loading.checkpoint import Checkpoint
from tests.golden.checkpoints import write_safetensors


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with Checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.array(name)) for name in checkpoint.names}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def write_shards(folder: Path) -> list[str]:
    """Split model.safetensors into two shards with an index. Returns the names of the shards."""
    tensors = list(tensors_of(folder).items())
    half = len(tensors) // 2
    parts = {"model-00001-of-00002.safetensors": tensors[:half], "model-00002-of-00002.safetensors": tensors[half:]}
    for name, part in parts.items():
        write_safetensors(folder / name, dict(part))
    weight_map = {tensor: name for name, part in parts.items() for tensor, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return list(parts)
