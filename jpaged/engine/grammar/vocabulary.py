"""Converts a model's tokenizer for llguidance."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer

from jpaged.errors import RequestError


def grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Convert a fast tokenizer of transformers. 150,000 tokens take 2 to 5 s, so an engine does it once, in a worker.

    vocab_size:    size of the model's logits, padding included. A mask has one bit for each.
    eos_token_ids: the mask allows them wherever the answer may end.

    Raises RequestError if the model has no tokenizer, or one that is not based on the `tokenizers` library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            "structured_outputs", type(tokenizer).__name__, "needs a fast tokenizer, and this model has none"
        )
    definition = json.loads(backend.to_str())
    definition["truncation"] = definition["padding"] = None
    # Added tokens may lie beyond the embedding's rows (Gemma 3's <image_soft_token>). They cannot be sampled.
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["id"] < vocab_size]
    text = json.dumps(definition, ensure_ascii=False)
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
