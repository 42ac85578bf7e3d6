"""A model's tokenizer as llguidance needs it."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer

from jpaged.errors import RequestError


def grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """From a fast tokenizer of transformers. Takes 2 to 5 s for 150,000 tokens: once an engine, in a worker.

    vocab_size:    rows of the model's output, padding included: as many bits has a mask.
    eos_token_ids: allowed wherever the answer may end.

    Raises RequestError where the model has no tokenizer, or one without `tokenizers` behind it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            "structured_outputs", type(tokenizer).__name__, "needs a fast tokenizer, which this model does not have"
        )
    definition = json.loads(backend.to_str())
    definition["truncation"] = definition["padding"] = None
    # Tokens may be added beyond the embedding's rows (Gemma 3's <image_soft_token>): they cannot be sampled.
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["id"] < vocab_size]
    text = json.dumps(definition, ensure_ascii=False)
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
