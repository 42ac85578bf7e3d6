"""Describes a model without loading its weights, for `jpaged plan`.

If the folder has weights, their headers are read and checked as in a load. They show tied embeddings and the main
dtype. If there is only a config.json, its values are used, and `config_tensors` gives the shapes of quantised matrices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.loading.checkpoint import is_converted
from jpaged.loading.config_tensors import DeclaredCheckpoint
from jpaged.loading.dtypes import BY_NAME, resolve_dtype
from jpaged.loading.hub import CONFIG, find_config
from jpaged.loading.model import check_deterministic, check_quantization, for_runner, open_weights, quantizer_of
from jpaged.loading.quantized.config import method_of
from jpaged.loading.source import read_config
from jpaged.loading.tokenizer import has_tokenizer, load_tokenizer, valid_token_mask
from jpaged.loading.weights import plan_weights, planned_shapes
from jpaged.models.families import family_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.wrappers import text_config
from jpaged.models.quantization import LeafPlacer
from jpaged.models.sharding import described_mesh, shards_of, split_spec
from jpaged.models.spec import DecoderSpec, param_shapes
from jpaged.models.stages import placer_for


@dataclasses.dataclass(frozen=True)
class DescribedModel:
    """Shape and dtype of a model."""

    name: str        # in printed tables
    spec: DecoderSpec
    dtype: np.dtype  # dtype of the loaded weights; of the activations, if the weights are quantised
    params: Any      # the tree of loaded weights, as ShapeDtypeStructs; with pipeline stages, a tuple of trees
    masked: bool     # some token ids may not be sampled
    stored_dtype: np.dtype | None = None  # of the checkpoint; None: unknown
    format: str | None = None  # quant_method of the checkpoint; None: it is not quantised


def describe(
    config: EngineConfig, platform: str | None, meshes: Sequence[Mesh | None] | None = None
) -> DescribedModel:
    """Describe the model that `config.model` names, split as the options say.

    platform: platform of the device that the model is for; None: JAX's default.
    meshes:   devices of each pipeline stage. None: unknown, so nothing can be compiled for them.
    Raises ModelLoadError in the same cases as the engine, except for errors in the weights' bytes.
    """
    path = find_config(config.model, config.revision, config.download_dir)
    alone = path.name == CONFIG
    folder = path.parent if alone else path
    if alone or not has_weights(folder):
        values = _values(config, folder)
        named = CheckpointConfig(values).get("dtype", "torch_dtype")
        stored = BY_NAME.get(named) if isinstance(named, str) else None
        spec, shapes = _declared(config, folder, values)
        form = method_of(values)
    else:
        with open_weights(config, folder) as (values, weights):
            spec, stored, shapes, form = weights.spec, weights.dtype, weights.shapes, weights.format
    check_quantization(config, form)
    platform = platform or jax.default_backend()
    architecture = (values.get("architectures") or [values.get("model_type")])[0]
    dtype = resolve_dtype(config.dtype, stored, spec, platform)
    shards = shards_of(config)
    check_deterministic(config, form, dtype, platform, spec)
    known = meshes or [None] * config.pipeline_parallel_size
    each = [mesh or described_mesh(shards) for mesh in known]
    placer = placer_for(quantizer_of(config, platform), config, spec, each)
    params = shapes(dtype, placer)
    split = split_spec(spec, shards)
    masked = _masked(config, spec, folder)
    return DescribedModel(f"{config.model} ({architecture})", split, dtype, params, masked, stored, form)


def _values(config: EngineConfig, folder: Path) -> dict[str, Any]:
    """The values of a config.json without weights. Of a wrapper: the text model's."""
    return text_config(read_config(folder, config.hf_overrides or {}))


def declared_weights(
    config: EngineConfig, folder: Path
) -> tuple[DecoderSpec, Callable[[np.dtype, LeafPlacer], dict[str, Any]], str | None]:
    """Return the spec, `StoredWeights.shapes` and `StoredWeights.format` of a config.json alone. Raises ModelLoadError.
    """
    values = _values(config, folder)
    check_quantization(config, method_of(values))
    return *_declared(config, folder, values), method_of(values)


def _declared(
    config: EngineConfig, folder: Path, values: dict[str, Any]
) -> tuple[DecoderSpec, Callable[[np.dtype, LeafPlacer], dict[str, Any]]]:
    """Return the spec and `StoredWeights.shapes` of a config.json alone. Raises ModelLoadError if unsupported."""
    reader, family = CheckpointConfig(values), family_of(values)
    spec = for_runner(family.spec(reader), config.runner)
    if method_of(values) is None:
        return spec, lambda dtype, quantizer: quantizer.finish(quantizer.shapes(param_shapes(spec, dtype)))
    checkpoint = DeclaredCheckpoint(folder, values, family, spec)
    plan = plan_weights(family, spec, family.constants(reader), checkpoint)
    return plan.spec, functools.partial(planned_shapes, plan)


def has_weights(folder: Path) -> bool:
    """Return True for a GGUF file, and for a folder with weights."""
    return folder.is_file() or is_converted(folder) or any(folder.glob("*.safetensors"))


def _masked(config: EngineConfig, spec: DecoderSpec, folder: Path) -> bool:
    """Return True if the sampler needs a mask of token ids. True without a tokenizer: a mask takes more memory."""
    if spec.pools or not config.mask_unknown_tokens or config.skip_tokenizer_init:
        return False
    if config.tokenizer is not None:
        folder = Path(config.tokenizer).expanduser()
        if not folder.exists():
            return True
    if not has_tokenizer(folder):
        return True
    return valid_token_mask(load_tokenizer(folder), spec.vocab_size) is not None
