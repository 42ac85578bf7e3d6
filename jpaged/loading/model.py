"""load_model: checks a model and puts it on the device.

1. Find the folder or the GGUF file: from a path, a hub id, or the name of the demo model (hub.py).
2. Read config.json, find the family and build the DecoderSpec (jpaged.models.families). The keys of a GGUF file are
   converted to the values of a config.json first (gguf_config.py).
3. Load the weights. There are three sources:
   - A checkpoint: source.py opens it, weights.py checks the headers, then puts one leaf after another on the device.
   - A folder that `jpaged convert` wrote: converted_folder.py does the same.
   - Live arrays: live.py checks them. live_devices.py uses or moves them.
4. Read generation_config.json and the tokenizer.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource, is_converted, read_json
from jpaged.loading.dtypes import checkpoint_dtype, resolve_dtype
from jpaged.loading.dummy import dummy_weights
from jpaged.loading.gguf_checkpoint import GgufCheckpoint
from jpaged.loading.hub import CONFIG, find_config, find_model, find_tokenizer, is_gguf
from jpaged.loading.kv_scales import read_kv_scales
from jpaged.loading.live import check_live, config_values, without_head_axes
from jpaged.loading.live_devices import devices_of_arrays, live_placer, place_tree
from jpaged.loading.sentence_transformers import NO_FILES, SentenceFiles
from jpaged.loading.source import open_source
from jpaged.loading.tokenizer import check_vocabulary, load_tokenizer
from jpaged.loading.trees import is_engine_tree, read_tree, refuse_layout
from jpaged.loading.weights import (
    StoredWeights,
    check_depth,
    load_weights,
    plan_weights,
    planned_leaves,
    planned_shapes,
)
from jpaged.models.families import family_of, spec_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.wrappers import text_config
from jpaged.models.fused_layer import refuse_fused
from jpaged.models.kv_scales import KVScales
from jpaged.models.padding import pad_kv_scales
from jpaged.models.quantization import SCHEMES, LeafPlacer, Quantizer
from jpaged.models.sharding import shards_of, split_spec
from jpaged.models.spec import DecoderSpec, WeightLayout
from jpaged.models.stages import placer_for

logger = logging.getLogger(__name__)

_NO_SPLIT_GATES = (
    "live arrays of a model with attention gates must be the engine's own tree (jpaged.models.spec.param_shapes), with "
    "the fused leaf qkv: other trees are not read yet"
)
_NO_SPLIT_ADAPTERS = (
    "enable_lora=True with live arrays of a model whose layers have unlike keys and values needs the engine's own tree "
    "(jpaged.models.spec.param_shapes), with qkv and gate_up fused, stored [out, in]"
)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A loaded model: everything that an engine needs."""

    spec: DecoderSpec
    # on the device: the tree of `param_shapes(spec, dtype)`, in `layout`. A matrix may be a QuantizedWeight
    params: dict[str, Any]
    layout: WeightLayout               # differences between live arrays and that tree
    dtype: np.dtype                    # dtype of params
    config: dict[str, Any]             # config.json; {} for live arrays with a DecoderSpec
    generation_config: dict[str, Any]  # generation_config.json; its special tokens default to those in config.json
    tokenizer: Any | None              # transformers.PreTrainedTokenizerBase
    source: str                        # path of the model, or "live arrays"; for logs
    kv_scales: KVScales | None = None  # static scales of keys and values in the checkpoint
    stored_dtype: np.dtype | None = None  # of the checkpoint; None: that of params
    stored_spec: DecoderSpec | None = None  # before `split_spec`; None: as `spec`
    placer: LeafPlacer | None = None  # has placed `params`, and places new weights
    stored_kv_scales: KVScales | None = None  # before `pad_kv_scales`
    sentences: SentenceFiles = NO_FILES  # files of Sentence Transformers in the folder

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end a text."""
        ids = self.generation_config.get("eos_token_id")
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def load_model(
    config: EngineConfig,
    params: Any = None,
    model_config: Any = None,
    layout: WeightLayout | None = None,
    check: Callable[[DecoderSpec, dict[str, Any]], None] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> LoadedModel:
    """Load the model that `config.model` names, or use live arrays.

    params:       live arrays: the tree of `param_shapes`. q, k, v and gate, up may be separate leaves, and matrices may
                  be [in, out]. Arrays that are placed like the engine's are used without a copy. None: load the
                  checkpoint.
    model_config: DecoderSpec, Hugging Face config or its dictionary, for live arrays. None: config.json of
                  `config.model`.
    layout:       layout of the live arrays. None: detected from their names and shapes.
    devices:      of the engine. None: those of live arrays (`live_devices`), and JAX's first ones for a checkpoint.
    check:        called with the spec and the tree of weights, as ShapeDtypeStructs, before any weight is on the
                  device. It raises an error if the model must not be loaded.
    Raises ModelLoadError with the file, the tensor and the remedy, before device memory is allocated.
    """
    if params is None:
        return _from_checkpoint(config, check, devices)
    return _from_live(config, params, model_config, layout, devices)


def _from_checkpoint(
    config: EngineConfig, check: Callable[[DecoderSpec, dict[str, Any]], None] | None,
    devices: Sequence[jax.Device] | None,
) -> LoadedModel:  # fmt: skip
    path = find_weights(config)
    with open_weights(config, path) as (values, weights):
        generation_config = _generation_config(path, values, weights.spec.vocab_size)
        dtype = resolve_dtype(config.dtype, weights.dtype, weights.spec)
        sentences = NO_FILES if is_gguf(path) or not weights.spec.pools else SentenceFiles.read(path)
        check_quantization(config, weights.format)
        shards = shards_of(config)
        check_deterministic(config, weights.format, dtype, jax.default_backend(), weights.spec)
        spec = sentences.applied(split_spec(weights.spec, shards), path)
        quantizer = placer_for(quantizer_of(config, jax.default_backend()), config, weights.spec, chosen=devices)
        if check is not None:
            check(spec, weights.shapes(dtype, quantizer))
        started = time.perf_counter()  # after the check, which may compile kernels
        tokenizer = _tokenizer(config, path, weights.spec.vocab_size)
        params = weights.load(dtype, quantizer)
    if config.load_format == "dummy":
        logger.warning("load_format='dummy': the weights are random, and answers have no meaning")
    seconds, size = time.perf_counter() - started, weights.num_bytes / 1e6
    how = weights.format or config.quantization
    stored_as = f"{dtype.name}, quantised ({how})," if how else dtype.name
    logger.info("loaded %.1f MB of weights from %s as %s in %.1f s", size, path, stored_as, seconds)
    return LoadedModel(
        spec=spec,
        params=params,
        layout=WeightLayout(),
        dtype=dtype,
        config=values,
        generation_config=generation_config,
        tokenizer=tokenizer,
        source=str(path),
        kv_scales=pad_kv_scales(weights.kv_scales, weights.spec, shards),
        stored_dtype=weights.dtype,
        stored_spec=weights.spec,
        placer=quantizer,
        stored_kv_scales=weights.kv_scales,
        sentences=sentences,
    )


def checkpoint_fingerprint(config: EngineConfig) -> str:
    """Return 16 hex digits of SHA-256, of a checkpoint's config.json and of its files' names and sizes.

    Raises ModelLoadError if there is no such model.
    """
    path = find_weights(config)
    whole, folder = hashlib.sha256(), path if path.is_dir() else path.parent
    files = sorted(folder.rglob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        whole.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
    with contextlib.suppress(OSError):
        whole.update((folder / CONFIG).read_bytes())
    return whole.hexdigest()[:16]


def quantizer_of(config: EngineConfig, platform: str) -> Quantizer:
    """The quantizer that the options name, for a platform: cpu, gpu or tpu."""
    return Quantizer(SCHEMES.get(config.quantization or ""), platform, config.quantized_activations)


def check_deterministic(
    config: EngineConfig, found: str | None, dtype: np.dtype, platform: str, spec: DecoderSpec
) -> None:
    """Raise ModelLoadError for `deterministic` with an unsupported model. found: format of its quantised weights.

    On a CPU, the kernels for NVIDIA run interpreted, if the options name them: slowly, and with the same programs.
    """
    if not config.deterministic:
        return
    how = config.quantization or found
    if how is not None:
        raise ModelLoadError(f"deterministic=True needs weights that are not quantised, but these are ({how})")
    interpreted = platform == "cpu" and config.attention_implementation == "triton_fixed"
    if dtype.name == "bfloat16" and (platform == "gpu" or interpreted):
        if (reason := refuse_fused(spec)) is not None:
            raise ModelLoadError(f"deterministic=True cannot serve this model in bfloat16, because it has {reason}")
    elif dtype != np.float32 or platform != "cpu":
        raise ModelLoadError(
            f"deterministic=True needs float32 on CPU or bfloat16 on GPU, but the model is {dtype.name} on {platform}: "
            "add dtype='float32' on a CPU, dtype='bfloat16' on a GPU, or leave it out"
        )


def check_quantization(config: EngineConfig, found: str | None) -> None:
    """Raise ModelLoadError for a `quantization` that the checkpoint contradicts. found: its format; None: dense."""
    wanted = config.quantization
    if wanted is None or wanted == found or (found is None and wanted in SCHEMES):
        return
    if found is None:
        raise ModelLoadError(
            f"quantization={wanted!r}: the checkpoint is not quantised: leave it out, or round the weights at load "
            f"with one of {', '.join(SCHEMES)}"
        )
    raise ModelLoadError(
        f"quantization={wanted!r}: the checkpoint is quantised already, as {found}: leave it out, or use a checkpoint "
        "that is not quantised"
    )


def find_weights(config: EngineConfig) -> Path:
    """Return the folder or the GGUF file of the model. With dummy weights, only its config is fetched."""
    if config.load_format != "dummy":
        path = find_model(config.model, config.revision, config.download_dir)
        if config.load_format != "auto" and is_gguf(path) != (config.load_format == "gguf"):
            found = "a GGUF file" if is_gguf(path) else "a folder of safetensors files"
            raise ModelLoadError(f"load_format={config.load_format!r}, but {path} is {found}: leave load_format out")
        return path
    path = find_config(config.model, config.revision, config.download_dir)
    return path.parent if path.name == CONFIG else path


def _overridden(values: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """Return the values of config.json, replaced by `hf_overrides`. Of a wrapper: the text model's."""
    return text_config(values | dict(config.hf_overrides or {}))


@contextlib.contextmanager
def open_weights(config: EngineConfig, path: Path) -> Iterator[tuple[dict[str, Any], StoredWeights]]:
    """Open a folder or a GGUF file. Yields the values of config.json and the weights, checked but not loaded."""
    if config.load_format == "dummy":
        values = _overridden(_config_of(path), config)
        _log_remote_code(config, values, path)
        yield values, dummy_weights(for_runner(spec_of(values), config.runner), CheckpointConfig(values))
        return
    if is_converted(path):
        from jpaged.loading.converted_folder import open_converted  # imports Orbax, which takes 0.5 s

        values = _overridden(read_json(path / "config.json", required=True), config)
        spec = for_runner(spec_of(values), config.runner)
        _log_remote_code(config, values, path)
        yield values, open_converted(path, spec, CheckpointConfig(values))
        return
    with open_source(path, config.hf_overrides or {}) as (values, checkpoint):
        _log_remote_code(config, values, path)
        yield values, _stored(values, checkpoint, config.runner)


def _stored(values: dict[str, Any], checkpoint: TensorSource, runner: str) -> StoredWeights:
    """Check the tensors of an open checkpoint against the config."""
    reader = CheckpointConfig(values)
    try:
        family = family_of(values)
        check_depth(reader, len(list(checkpoint.names)))
        spec = for_runner(family.spec(reader), runner)
    except ModelLoadError as error:
        if not is_gguf(checkpoint.folder):
            raise
        raise ModelLoadError(
            f"{checkpoint.folder}: its metadata, converted to a config.json, is refused: {error}"
        ) from None
    if (tokens := values.get("classifier_from_token")) is not None:
        family = family.scored_by_tokens(spec, *_token_ids(tokens, checkpoint.folder))
    plan = plan_weights(family, spec, family.constants(reader), checkpoint)
    load = functools.partial(load_weights, plan, checkpoint)
    shapes, scales = functools.partial(planned_shapes, plan), read_kv_scales(checkpoint, plan.spec)
    dtype = checkpoint_dtype(reader, checkpoint)
    leaves = functools.partial(planned_leaves, plan, checkpoint)
    stored = StoredWeights(plan.spec, dtype, checkpoint.num_bytes, load, shapes, leaves, kv_scales=scales)
    if not any(leaf.packed for leaf in plan.leaves):
        return stored
    method = (values.get("quantization_config") or {}).get("quant_method", "modelopt")
    return dataclasses.replace(stored, format="gguf" if is_gguf(checkpoint.folder) else method)


def _token_ids(tokens: Any, folder: Path) -> list[int]:
    """Ids of the two tokens in `classifier_from_token`: no, then yes. Raises ModelLoadError."""
    name = "classifier_from_token"
    if not isinstance(tokens, list | tuple) or len(tokens) != 2:
        raise ModelLoadError(f"config.json: {name}={tokens!r} must be two tokens: that of no, then that of yes")
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ModelLoadError(f"config.json: {name}={tokens!r} needs a tokenizer, and {folder} has none")
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            raise ModelLoadError(f"config.json: {name}={tokens!r}: the tokenizer has no token {token!r}")
    return [vocabulary[token] for token in tokens]


def for_runner(spec: DecoderSpec, runner: str) -> DecoderSpec:
    """Return the spec for `EngineConfig.runner`. Raises ModelLoadError if the model does not support the runner."""
    if runner == "generate" and spec.pools:
        kind = "a sequence classifier" if spec.encoder is None else "an encoder"
        raise ModelLoadError(f"runner='generate': the model is {kind} and has no lm_head: leave runner out")
    return dataclasses.replace(spec, pools=True) if runner == "pooling" else spec


def _from_live(
    config: EngineConfig, params: Any, model_config: Any, layout: WeightLayout | None,
    devices: Sequence[jax.Device] | None,
) -> LoadedModel:  # fmt: skip
    if config.quantization is not None:
        raise ModelLoadError(
            f"quantization={config.quantization!r}: live arrays are used without a copy, so they are not quantised: "
            "leave it out, or load a checkpoint"
        )
    folder = find_weights(config) if model_config is None else None
    if folder is not None:
        model_config = _overridden(_config_of(folder), config)
    if isinstance(model_config, DecoderSpec):
        values, spec = {}, model_config
    else:
        values = config_values(model_config)
        if "layers" in values or not values:
            raise ModelLoadError("live arrays are passed as (config, params), in this order: the first is not a config")
        reader = CheckpointConfig(values)
        check_depth(reader, len(jax.tree.leaves(params)))
        spec = family_of(values).spec(reader)
    spec = for_runner(spec, config.runner)
    if not is_engine_tree(params):
        if spec.attention_gate:
            raise ModelLoadError(_NO_SPLIT_GATES)
        if spec.layer_kv and config.enable_lora:  # before `read_tree` copies anything
            raise ModelLoadError(_NO_SPLIT_ADAPTERS)
        refuse_layout(layout)
        tree = read_tree(spec, params)
        spec, params, layout = tree.spec, tree.params, tree.layout
        logger.info(
            "the weights have %s's names: %d of %d leaves are used without a copy, and %.1f MB are copied",
            tree.kind, tree.num_by_reference, len(tree.leaves), tree.copied_bytes / 1e6,
        )  # fmt: skip
    live = check_live(spec, params, layout)
    if spec.attention_gate and live.layout.split_qkv:
        raise ModelLoadError(_NO_SPLIT_GATES)
    if spec.layer_kv and config.enable_lora and live.layout != WeightLayout():
        raise ModelLoadError(_NO_SPLIT_ADAPTERS)
    if config.dtype not in ("auto", live.dtype.name):
        resolve_dtype(config.dtype, None, spec)
        raise ModelLoadError(
            f"dtype={config.dtype!r}, but the arrays are {live.dtype.name}: live arrays are not converted, "
            "convert them first or leave dtype at auto"
        )
    check_deterministic(config, None, live.dtype, jax.default_backend(), spec)
    if config.deterministic and live.layout != WeightLayout():
        raise ModelLoadError("deterministic=True needs live arrays with qkv and gate_up fused, stored [out, in]")
    if config.devices_per_engine > 1:
        live = without_head_axes(spec, live)
    placer = live_placer(config, spec, devices or devices_of_arrays(live.params, config), live.layout)
    return LoadedModel(
        spec=split_spec(spec, shards_of(config)),
        params=place_tree(placer, live.params),
        layout=live.layout,
        dtype=live.dtype,
        config=values,
        generation_config=_generation_config(folder, values, spec.vocab_size),
        tokenizer=_tokenizer(config, folder, spec.vocab_size),
        source="live arrays",
        stored_spec=spec,
        placer=placer,
    )


def _config_of(path: Path) -> dict[str, Any]:
    """Return the values of a folder's config.json, or the equivalent values of a GGUF file."""
    if is_gguf(path):
        with GgufCheckpoint(path) as checkpoint:
            return checkpoint.config
    return read_json(path / "config.json", required=True)


def _log_remote_code(config: EngineConfig, values: Mapping[str, Any], folder: Path) -> None:
    """Log that the checkpoint's code is not run, if the user or the config asks to run it."""
    if config.trust_remote_code or values.get("auto_map"):
        logger.info(
            "%s: jpaged has its own code for %s; the checkpoint's code is not needed and not run",
            folder, ", ".join(values.get("architectures") or [str(values.get("model_type"))]),
        )  # fmt: skip


def _tokenizer(config: EngineConfig, folder: Path | None, vocab_size: int) -> Any | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        folder = find_tokenizer(config.tokenizer, None, config.download_dir)
    if folder is None:
        return None
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, vocab_size, folder)
    return tokenizer


def _generation_config(folder: Path | None, values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Read generation_config.json. Missing ids of special tokens are filled in from config.json."""
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
