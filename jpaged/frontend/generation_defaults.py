"""Reads the default sampling parameters from a model's generation_config.json."""

import logging
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError, RequestError
from jpaged.params.sampling import SamplingParams

logger = logging.getLogger(__name__)

# The keys that set a default, each with the name of the parameter. vLLM reads the same keys, and no do_sample either.
KEYS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Make the sampling parameters of requests that bring none.

    generation_config: content of generation_config.json. A key that is absent or null leaves vLLM's default.
    Raises ModelLoadError for a value that SamplingParams refuses.
    """
    given = {name: generation_config[key] for key, name in KEYS.items() if generation_config.get(key) is not None}
    if given:
        logger.info("requests without sampling parameters use generation_config.json's: %s", given)
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ModelLoadError(f"generation_config.json: {error}; correct the file") from error
