"""From a model's name and options to an engine that runs: what `LLM` and `AsyncLLM` share."""

import dataclasses
import difflib
import logging
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.errors import ModelLoadError, RequestError
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.models.spec import DecoderSpec, WeightLayout

logger = logging.getLogger(__name__)

LIVE_ARRAYS = "live arrays"  # EngineConfig.model where no checkpoint is named
# What generation_config.json may say about sampling, and what it is called here. As in vLLM, do_sample is not read.
GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready, and what its front door tells of it."""

    engine: Engine
    config: EngineConfig
    spec: "DecoderSpec"
    tokenizer: Any | None                    # transformers.PreTrainedTokenizerBase
    default_sampling_params: SamplingParams  # for requests that bring none


def engine_config(model: Any, options: Mapping[str, Any]) -> EngineConfig:
    """Options by name as an EngineConfig. Raises RequestError for a name that is no option."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name, value in options.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
            raise RequestError(name, value, f"unknown engine option; {hint}")
    if isinstance(model, str) and not model:
        raise RequestError("model", model, "name a folder, a hub id or demo")
    options = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
    checks = _option_checks()
    for name, value in options.items():
        accepted = checks[name](value)
        if accepted is not None:
            raise RequestError(name, value, f"must be {accepted}")
    return EngineConfig(model=model if isinstance(model, str) else LIVE_ARRAYS, **options)


def _option_checks() -> dict[str, Callable[[Any], str | None]]:
    """A check a field of EngineConfig: what it must be instead, or None if it is right."""

    def integer(value: Any) -> bool:
        return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

    def buckets(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(integer(v) and v > 0 for v in value)

    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "str": ("a string", lambda value: isinstance(value, str)),
        "bool": ("True or False", lambda value: isinstance(value, bool)),
        "int": ("a whole number", integer),
        "float": ("a number", lambda value: integer(value) or isinstance(value, (float, np.floating))),
        "tuple[int, ...]": ("a sequence of whole numbers of at least 1", buckets),
    }

    def check_of(annotation: str) -> Callable[[Any], str | None]:
        kind = annotation.removesuffix(" | None")
        accepted, right = rules[kind]
        optional = kind != annotation
        return lambda value: None if right(value) or (optional and value is None) else accepted

    hints = typing.get_type_hints(EngineConfig)
    return {name: check_of(hint.__name__ if isinstance(hint, type) else str(hint)) for name, hint in hints.items()}


def build_engine(
    model: Any,
    params: Any,
    options: Mapping[str, Any],
    *,
    layout: "WeightLayout | None" = None,
    progress: bool,
) -> BuiltEngine:
    """Load a model, compile its programs, and put an engine on them.

    model:  folder, hub id or "demo"; with `params` also a Hugging Face config, its dict, or a DecoderSpec.
    params: live arrays to use as they are, or None to read the checkpoint.
    layout: how live arrays are stored; None: as their names and shapes say.
    Raises RequestError for an unknown option, ModelLoadError for everything that keeps the model from running.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    config = engine_config(model, options)
    if params is None and not isinstance(model, str):
        raise RequestError("model", model, "must be a folder, a hub id or demo; a config goes together with params")
    # Here and not at the top, so that importing jpaged imports no jax.
    import jax

    from jpaged.loading import load_model, valid_token_mask
    from jpaged.runtime.runner import ModelRunner

    refuse_tracing(*jax.tree.leaves(params))
    loaded = load_model(
        config,
        params,
        model_config=None if isinstance(model, str) else model,
        layout=layout,
        check=lambda spec, dtype: ModelRunner.check(spec, dtype, config),
    )
    defaults = generation_defaults(loaded.generation_config)
    mask = valid_token_mask(loaded.tokenizer, loaded.spec.vocab_size) if config.mask_unknown_tokens else None
    runner = ModelRunner.create(
        loaded.spec,
        loaded.params,
        config,
        layout=loaded.layout,
        tokenizer_ids=mask,
        progress=progress,
    )
    main_eos = getattr(loaded.tokenizer, "eos_token_id", None)
    engine = Engine(
        runner,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        eos_token_id=next(iter(loaded.eos_token_ids), None) if main_eos is None else main_eos,
        seed=config.seed,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return BuiltEngine(engine, config, loaded.spec, loaded.tokenizer, defaults)


def generation_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters for requests that bring none: the checkpoint's defaults over vLLM's."""
    values = {name: generation_config.get(key) for key, name in GENERATION_DEFAULTS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        logger.info("requests without sampling parameters use generation_config.json's: %s", given)
    penalty = generation_config.get("repetition_penalty")
    if penalty not in (None, 1):
        logger.warning("generation_config.json has repetition_penalty=%s: not supported yet, not applied", penalty)
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}; correct the file") from error


def refuse_tracing(*values: Any) -> None:
    """Raise RequestError when JAX is tracing: what follows would run once while compiling, and never again."""
    jax = sys.modules.get("jax")
    if jax is None:
        return
    # Inside jit, scan and the like even a constant becomes a tracer; outside of them this compiles nothing.
    if any(isinstance(value, jax.core.Tracer) for value in (*values, jax.device_put(np.int32(0)))):
        raise RequestError(
            "generate",
            "a call inside a function that JAX traces",
            "call it outside of jit, vmap, grad and scan, with concrete arrays",
        )
