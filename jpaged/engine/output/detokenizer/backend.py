"""Reads the vocabulary of a tokenizer of the `tokenizers` library, and classifies bytes of UTF-8."""

from typing import Any


def token_strings(backend: Any) -> dict[int, str]:
    """Return every token as its decoder receives it. An added token may be normalised there, as it is in prompts."""
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    return tokens | {token_id: backend.id_to_token(token_id) for token_id in backend.get_added_tokens_decoder()}


def special_ids(backend: Any) -> frozenset[int]:
    """Return the ids that `skip_special_tokens` leaves out. A normalised special token is not left out."""
    added = backend.get_added_tokens_decoder().items()
    return frozenset(
        token_id for token_id, token in added if token.special and not backend.decode([token_id])
    )


def is_continuation(byte: int) -> bool:
    """True for a continuation byte of UTF-8."""
    return byte & 0xC0 == 0x80
