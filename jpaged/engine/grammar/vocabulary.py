"""Converts a model's tokenizer for llguidance."""

import json
from collections.abc import Sequence, Set
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from jpaged.errors import RequestError


def special_tokens(tokenizer: Any, vocab_size: int) -> dict[str, int]:
    """Return the ids of special tokens, by name. Tokens beyond the model's logits are left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = backend.get_added_tokens_decoder() if backend is not None else {}
    return {
        token.content: token_id for token_id, token in added.items() if token.special and token_id < vocab_size
    }


def grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Convert a fast tokenizer of transformers. 150,000 tokens take 2 to 5 s, so an engine does it once, in a worker.

    An added token that is not special, such as Qwen3's <tool_call>, is text: where a grammar allows its text, it allows
    the token too. A special token is never text. A grammar allows it only by its name or its id, `<[4098]>`.

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
    eos = list(eos_token_ids) or None
    # No slices: they speed up masks, which this tokenizer does not compute. Saves 20% of the time.
    read = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos, slices=[])
    plain = {token["id"] for token in definition["added_tokens"] if not token["special"]}
    plain -= {*eos_token_ids, read.eos_token}
    return LLTokenizer(TokenizerWrapper(_Tokens(read, plain)), n_vocab=vocab_size, eos_token=eos)


class _Tokens:
    """The tokens of a tokenizer that llguidance has read, in the form of llguidance's TokenizerWrapper.

    llguidance itself treats every added token of the form <...> as special, even if it is not marked as special. For
    forced text it then writes tokens that it does not accept: `Tokenizer.encode` finds added tokens in any text.
    """

    def __init__(self, read: LLTokenizer, plain: Set[int]):
        """plain: ids of added tokens that are text."""
        self._read = read
        ids = range(read.vocab_size)
        self._special = frozenset(i for i in ids if i not in plain and read.is_special_token(i))
        self.eos_token_id = read.eos_token
        self.bos_token_id = None
        self.tokens = [read.decode_bytes([i]) for i in ids]
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise a text as the tokenizer does, but without special tokens."""
        tokens: list[int] = []
        for token_id in self._read.tokenize_bytes(text):
            name = self.tokens[token_id].decode() if token_id in self._special else ""
            if len(name) > 1:
                tokens += [*self(name[:1].encode()), *self(name[1:].encode())]  # a part of the name is not the token
            else:
                tokens.append(token_id)
        # A normaliser, or a token that strips blanks around it, may have changed the text.
        return tokens if self._read.decode_bytes(tokens) == text else self._read.greedy_tokenize(text.decode())
