"""A model without its weights: what `jpaged plan` needs to know of it.

Where the weights are in the folder their headers are read and checked, as a load would: they say whether embeddings
are tied and in which dtype most of them are. Where there is only a config.json, that is believed.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.loading.checkpoint import is_converted, read_json
from jpaged.loading.dtypes import BY_NAME, resolve_dtype
from jpaged.loading.hub import CONFIG, find_config
from jpaged.loading.model import for_runner, open_weights
from jpaged.loading.tokenizer import has_tokenizer, load_tokenizer, valid_token_mask
from jpaged.models.families import spec_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec


@dataclasses.dataclass(frozen=True)
class DescribedModel:
    """A model's shape."""

    name: str        # for people
    spec: DecoderSpec
    dtype: np.dtype  # that the weights would be held in
    masked: bool     # whether some ids may not be sampled


def describe(config: EngineConfig, platform: str | None) -> DescribedModel:
    """The model that `config.model` names. platform: of the device it is for; None: JAX's own.

    Raises ModelLoadError where the engine would, but for what only the weights' bytes can tell.
    """
    path = find_config(config.model, config.revision)
    alone = path.name == CONFIG
    folder = path.parent if alone else path
    if alone or not _has_weights(folder):
        values = read_json(folder / CONFIG, required=True)
        spec = for_runner(spec_of(values), config.runner)
        named = CheckpointConfig(values).get("dtype", "torch_dtype")
        stored = BY_NAME.get(named) if isinstance(named, str) else None
    else:
        with open_weights(config, folder) as (values, weights):
            spec, stored = weights.spec, weights.dtype
    architecture = (values.get("architectures") or [values.get("model_type")])[0]
    dtype = resolve_dtype(config.dtype, stored, platform or jax.default_backend())
    return DescribedModel(f"{config.model} ({architecture})", spec, dtype, _masked(config, spec, folder))


def _has_weights(folder: Path) -> bool:
    return folder.is_file() or is_converted(folder) or any(folder.glob("*.safetensors"))


def _masked(config: EngineConfig, spec: DecoderSpec, folder: Path) -> bool:
    """Whether the sampler gets a mask of ids. Without a tokenizer to ask: as if it did, which takes more memory."""
    if spec.pools or not config.mask_unknown_tokens:
        return False
    if config.tokenizer is not None:
        folder = Path(config.tokenizer).expanduser()
        if not folder.exists():
            return True
    if not has_tokenizer(folder):
        return True
    return valid_token_mask(load_tokenizer(folder), spec.vocab_size) is not None
