"""load_model: everything that makes up a model, checked and on the device.

1. Find the folder: a path, a hub id, the demo model; or the GGUF file (hub.py).
2. config.json -> family, DecoderSpec (jpaged.models.families); a GGUF file's keys are made into one (gguf_config.py).
3. Check every tensor by the files' headers, then put leaf after leaf on the device (source.py opens them,
   weights.py loads them); or the same with a folder that `jpaged convert` wrote (converted.py); or check live
   arrays and use them as they are (live.py).
4. generation_config.json and the tokenizer.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource, is_converted, read_json
from jpaged.loading.dtypes import checkpoint_dtype, resolve_dtype
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from jpaged.loading.hub import POOLING, find_model, find_tokenizer, is_gguf
from jpaged.loading.live import check_live, config_values
from jpaged.loading.source import open_source
from jpaged.loading.tokenizer import check_vocabulary, load_tokenizer
from jpaged.loading.weights import StoredWeights, check_depth, load_weights, plan_weights
from jpaged.models.families import family_of, spec_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, WeightLayout

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run."""

    spec: DecoderSpec
    params: dict[str, Any]             # on the device: the tree of `param_shapes(spec, dtype)`, or as `layout` says
    layout: WeightLayout               # how live arrays differ from that tree
    dtype: np.dtype                    # of all params
    config: dict[str, Any]             # config.json; {} where only a DecoderSpec was given
    generation_config: dict[str, Any]  # generation_config.json; without the file, what config.json says of generation
    tokenizer: Any | None              # transformers.PreTrainedTokenizerBase
    source: str                        # where it came from, for people

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ids = self.generation_config.get("eos_token_id")
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def load_model(
    config: EngineConfig,
    params: Any = None,
    model_config: Any = None,
    layout: WeightLayout | None = None,
    check: Callable[[DecoderSpec, np.dtype], None] | None = None,
) -> LoadedModel:
    """Load the model that `config.model` names, or take live arrays.

    params:       arrays to use as they are, without a copy: the tree of `param_shapes`; q, k, v and gate, up may lie
                  apart, and matrices may be [in, out]. None: read the checkpoint.
    model_config: of live arrays: a DecoderSpec, or a Hugging Face config (or its dictionary).
                  None: `config.json` of `config.model`.
    layout:       how live arrays are stored. None: as their names and shapes say.
    check:        called with the spec and the dtype before any weight is on the device; raises if the model must not
                  be loaded.
    Raises ModelLoadError that names the file, the tensor and the remedy, before device memory is taken.
    """
    if params is None:
        return _from_checkpoint(config, check)
    return _from_live(config, params, model_config, layout)


def _from_checkpoint(config: EngineConfig, check: Callable[[DecoderSpec, np.dtype], None] | None) -> LoadedModel:
    path = find_model(config.model, config.revision)
    started = time.perf_counter()
    with open_weights(config, path) as (values, weights):
        generation_config = _generation_config(path, values, weights.spec.vocab_size)
        dtype = resolve_dtype(config.dtype, weights.dtype)
        if weights.spec.pools and weights.spec.num_labels is None:
            _check_pooling(path)
        if check is not None:
            check(weights.spec, dtype)
        tokenizer = _tokenizer(config, path, weights.spec.vocab_size)
        params = weights.load(dtype)
    seconds, size = time.perf_counter() - started, weights.num_bytes / 1e6
    logger.info("loaded %.1f MB of weights from %s as %s in %.1f s", size, path, dtype.name, seconds)
    return LoadedModel(
        spec=weights.spec,
        params=params,
        layout=WeightLayout(),
        dtype=dtype,
        config=values,
        generation_config=generation_config,
        tokenizer=tokenizer,
        source=str(path),
    )


@contextlib.contextmanager
def open_weights(config: EngineConfig, path: Path) -> Iterator[tuple[dict[str, Any], StoredWeights]]:
    """config.json, or what it would be, and the weights, checked: of a folder or of a GGUF file."""
    if is_converted(path):
        from jpaged.loading.converted import open_converted  # Orbax takes half a second, and only this needs it

        values = read_json(path / "config.json", required=True)
        spec = for_runner(spec_of(values), config.runner)
        _log_remote_code(config, values, path)
        yield values, open_converted(path, spec, CheckpointConfig(values))
        return
    with open_source(path) as (values, checkpoint):
        _log_remote_code(config, values, path)
        yield values, _stored(values, checkpoint, config.runner)


def _stored(values: dict[str, Any], checkpoint: TensorSource, runner: str) -> StoredWeights:
    """The tensors of an open checkpoint, checked against the config."""
    reader = CheckpointConfig(values)
    try:
        family = family_of(values)
        check_depth(reader, len(list(checkpoint.names)))
        spec = for_runner(family.spec(reader), runner)
    except ModelLoadError as error:
        if not is_gguf(checkpoint.folder):
            raise
        raise ModelLoadError(
            f"{checkpoint.folder}: its metadata, written as a config.json, is refused: {error}"
        ) from error
    plan = plan_weights(family, spec, family.constants(reader), checkpoint)
    load = functools.partial(load_weights, plan, checkpoint)
    return StoredWeights(plan.spec, checkpoint_dtype(reader, checkpoint), checkpoint.num_bytes, load)


def for_runner(spec: DecoderSpec, runner: str) -> DecoderSpec:
    """The spec for what `EngineConfig.runner` asks of the model. Raises ModelLoadError where it cannot do that."""
    if runner == "generate" and spec.pools:
        raise ModelLoadError(
            "runner='generate': the model is a sequence classifier, which has no output matrix: leave runner out"
        )
    return dataclasses.replace(spec, pools=True) if runner == "pooling" else spec


def _from_live(
    config: EngineConfig, params: Any, model_config: Any, layout: WeightLayout | None
) -> LoadedModel:
    folder = find_model(config.model, config.revision) if model_config is None else None
    if folder is not None:
        model_config = _config_of(folder)
    if isinstance(model_config, DecoderSpec):
        values, spec = {}, model_config
    else:
        values = config_values(model_config)
        if "layers" in values or not values:
            raise ModelLoadError("live arrays come as (config, params), in this order: this is no config")
        reader = CheckpointConfig(values)
        check_depth(reader, len(jax.tree.leaves(params)))
        spec = family_of(values).spec(reader)
    spec = for_runner(spec, config.runner)
    live = check_live(spec, params, layout)
    if config.dtype not in ("auto", live.dtype.name):
        resolve_dtype(config.dtype, None)
        raise ModelLoadError(
            f"dtype={config.dtype!r}, but the arrays are {live.dtype.name}: live arrays are used as they are, "
            "convert them first or leave dtype at auto"
        )
    return LoadedModel(
        spec=spec,
        params=live.params,
        layout=live.layout,
        dtype=live.dtype,
        config=values,
        generation_config=_generation_config(folder, values, spec.vocab_size),
        tokenizer=_tokenizer(config, folder, spec.vocab_size),
        source="live arrays",
    )


def _check_pooling(folder: Path) -> None:
    """Refuse a model that Sentence Transformers pools in another way than by its last token."""
    values = read_json(folder.joinpath(POOLING))
    begin = "pooling_mode_"
    modes = [values["pooling_mode"]] if "pooling_mode" in values else []
    modes += [name.removeprefix(begin) for name, value in values.items() if name.startswith(begin) and value is True]
    if modes not in ([], ["lasttoken"]):
        raise ModelLoadError(
            f"{folder / POOLING}: pooling by {', '.join(map(str, modes))} is not supported by jpaged (only lasttoken): "
            "use another checkpoint"
        )


def _config_of(path: Path) -> dict[str, Any]:
    """config.json of a folder, or what it would be for a GGUF file."""
    if is_gguf(path):
        with GgufCheckpoint(path) as checkpoint:
            return checkpoint.config
    return read_json(path / "config.json", required=True)


def _log_remote_code(config: EngineConfig, values: Mapping[str, Any], folder: Path) -> None:
    """A checkpoint of a known family needs no code of its own: say so where somebody might think that it was run."""
    if config.trust_remote_code or values.get("auto_map"):
        logger.info(
            "%s: jpaged has its own code for %s; no code of the checkpoint is needed and none is run",
            folder, ", ".join(values.get("architectures") or [str(values.get("model_type"))]),
        )  # fmt: skip


def _tokenizer(config: EngineConfig, folder: Path | None, vocab_size: int) -> Any | None:
    if config.tokenizer is not None:
        folder = find_tokenizer(config.tokenizer)
    if folder is None:
        return None
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, vocab_size, folder)
    return tokenizer


def _generation_config(folder: Path | None, values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Defaults of generation: the file's; what config.json has of the end and the beginning fills the gaps."""
    has_file = folder is not None and not is_gguf(folder)
    found = read_json(folder / "generation_config.json") if has_file else {}
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if found.get(key) is None and values.get(key) is not None:
            found[key] = values[key]
    ends = found.get("eos_token_id")
    each = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int and 0 <= end < vocab_size for end in each):
        raise ModelLoadError(
            f"{folder or 'config'}: eos_token_id={ends!r} must be a token id or a list of token ids, "
            f"from 0 to {vocab_size - 1}"
        )
    return found
