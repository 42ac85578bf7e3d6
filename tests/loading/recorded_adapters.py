"""The recorded adapters of tests/golden/lora, and tiny models with an adapter merged into their weights."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.adapters import read_adapter
from jpaged.loading.safetensors_file import SafetensorsFile
from jpaged.models.adapters import Adapter, AdapterMatrix, AdapterTarget, adapter_targets
from jpaged.models.families import family_of, spec_of
from jpaged.models.spec import DecoderSpec, WeightLayout
from tests.golden.adapters import BY_NAME, AdapterVariant, write_adapter
from tests.golden.checkpoints import BY_NAME as CHECKPOINTS
from tests.golden.checkpoints import write_checkpoint

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@dataclasses.dataclass
class Recorded:
    """A variant with its record."""

    variant: AdapterVariant
    values: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return CHECKPOINTS[self.variant.base].config

    @property
    def spec(self) -> DecoderSpec:
        return spec_of(self.config)

    def write(self, folder: Path) -> Path:
        write_adapter(folder, self.values["config"], self.values["tensors"], self.values["seed"])
        return folder

    def read(self, folder: Path, **options: Any) -> Adapter:
        options = {"max_rank": 8, "dtype": np.float32} | options
        return read_adapter(folder, family_of(self.config), self.spec, **options)


def recorded(name: str) -> Recorded:
    variant = BY_NAME[name]
    return Recorded(variant, json.loads(variant.record.read_text()))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(folder / TENSORS)
    return {name: np.array(file.array(name)) for name in file.entries}


def base_model(name: str, seed: int, folder: Path) -> LoadedModel:
    """A tiny checkpoint in float32, with separate embedding and lm_head: an adapter may change one of them."""
    write_checkpoint(CHECKPOINTS[name], seed, folder)
    model = load_model(EngineConfig(model=str(folder), dtype="float32"))
    params = {"lm_head": model.params["embed"]} | model.params
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, tie_embeddings=False), params=params)


def delta(target: AdapterTarget, matrix: AdapterMatrix, layer: int, expert: int = 0) -> np.ndarray:
    """float64[out, in]: what the adapter adds to a matrix; of the embedding [vocab, width]."""
    index = target.index(layer)
    a, b = matrix.a[index, expert].astype(np.float64), matrix.b[index, expert].astype(np.float64)
    ranks, scales = matrix.ranks[index, expert], matrix.scales[index, expert].astype(np.float64)
    if target.leaf == "embed":
        return scales[0] * (a[0, :, : ranks[0]] @ b[: ranks[0]])
    found, start = np.zeros((target.outputs, target.inputs)), 0
    while start < target.outputs:
        for part, width in target.pattern:
            rank, rows = int(ranks[part]), slice(start, start + width)
            found[rows] = scales[part] * (b[:rank, rows].T @ a[part, :rank])
            start += width
    return found


def merged(model: LoadedModel, adapter: Adapter, layout: WeightLayout = WeightLayout()) -> dict[str, Any]:
    """The parameter tree of `model` plus the adapter."""
    targets = {target.name: target for target in adapter_targets(model.spec, layout)}
    params = dict(model.params)
    layers = [dict(layer) for layer in params["layers"]]
    for name, matrix in adapter.matrices.items():
        target, leaf = targets[name], targets[name].leaf
        for layer in target.layers:
            tree = layers[layer] if leaf in layers[layer] else params
            weight = np.asarray(tree[leaf], np.float64)
            change = np.stack([delta(target, matrix, layer, expert) for expert in range(target.experts)])
            tree[leaf] = jnp.asarray(weight + change.reshape(weight.shape), jnp.float32)
    return params | {"layers": tuple(layers)}
