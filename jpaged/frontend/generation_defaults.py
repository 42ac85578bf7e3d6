"""Reads the default sampling parameters from a model's generation_config.json."""

import logging
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError, RequestError
from jpaged.params.sampling import SamplingParams

logger = logging.getLogger(__name__)

# Key of generation_config.json -> sampling parameter. vLLM reads the same keys, and also ignores do_sample.
KEYS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(
    generation_config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Make the default sampling parameters, for requests without their own.

    generation_config: content of generation_config.json. A key that is absent or null leaves vLLM's default.
    overrides:         `EngineConfig.override_generation_config`.
    Raises RequestError for an invalid override, and ModelLoadError for a value of the file that SamplingParams refuses.
    """
    replaced = {}
    for key, value in (overrides or {}).items():
        name = KEYS.get(key, key)
        if name not in KEYS.values():
            accepted = f"sets no sampling parameter: use {', '.join(KEYS)}"
            raise RequestError(f"override_generation_config.{key}", value, accepted)
        replaced[name] = value
    SamplingParams(**replaced)  # raises for an invalid override, before an error would name the file
    given = {name: generation_config[key] for key, name in KEYS.items() if generation_config.get(key) is not None}
    given |= replaced
    if given:
        logger.info("requests without sampling parameters use: %s", given)
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}; correct the file") from None
