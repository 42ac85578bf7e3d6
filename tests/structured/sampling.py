"""Writes random answers with a matcher, as an engine does: mask, sample, accept; with and without jump-forward."""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jpaged.engine.grammar import GrammarMatcher
from jpaged.engine.step_plan import mask_words

WORDS = [
    "name", "value", "true", "false", "null", "the", "a", "of", "and", "to", "0", "1", "2024-05-06", "12:30", "[1,",
    "2]", '{"a":', "1}", "def", "self", "return",
]  # fmt: skip


class Wrapped:
    """The part of a transformers tokenizer that grammars need, around a tokenizer of `tokenizers`."""

    def __init__(self, backend: Tokenizer):
        self.backend_tokenizer = backend


def sentencepiece_like() -> Tokenizer:
    """Train a tokenizer like those of Llama 2 and Mistral: spaces are ▁, characters without a token are bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))], trainer)
    # The trainer makes all of them special tokens, but byte tokens are text.
    for piece in pieces[3:]:
        assert tokenizer.token_to_id(piece) is not None
    return _only_special(tokenizer, ("<unk>", "<s>", "</s>"))


def _only_special(tokenizer: Tokenizer, special: tuple[str, ...]) -> Tokenizer:
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(definition))


def byte_level() -> Tokenizer:
    """Train a tokenizer like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))], trainer)
    return tokenizer


@dataclasses.dataclass
class Answer:
    """A random answer."""

    token_ids: list[int]
    finished: bool
    forced: int  # number of tokens accepted without sampling


def bits(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Unpack a mask to bool[vocab_size]."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def logits_of(token_bytes: list[bytes], eos_token_ids: tuple[int, ...], strength: float) -> np.ndarray:
    """Return float[vocab]: tokens that end texts, arrays, objects and answers have `strength` higher logits."""
    bias = np.zeros(len(token_bytes))
    for token_id, text in enumerate(token_bytes):
        if text[:1] in (b'"', b"}", b"]", b")"):
            bias[token_id] = strength
        if text.strip(b" \n\t\r") == b"":
            bias[token_id] = -strength / 2
    bias[list(eos_token_ids)] = strength
    return bias


def write(
    matcher: GrammarMatcher,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    logits: Callable[[int], np.ndarray],
    *,
    jump: bool = True,
    max_tokens: int = 512,
) -> Answer:
    """Accept the most likely allowed token of `logits(position)`, float[vocab_size], until the answer ends.

    A token depends only on its position and mask, as in the engine. So jump-forward must not change the answer.
    """
    words = np.zeros(mask_words(vocab_size), np.int32)
    tokens: list[int] = []
    forced = 0
    while len(tokens) < max_tokens and not matcher.is_finished:
        if jump and (stretch := matcher.forced_tokens()):
            for token_id in stretch[: max_tokens - len(tokens)]:
                assert matcher.accept(token_id)
                tokens.append(token_id)
                forced += 1
            continue
        matcher.mask_into(words)
        allowed = bits(words, vocab_size)
        assert allowed[list(eos_token_ids)].all() == matcher.is_accepting
        token_id = int(np.where(allowed, logits(len(tokens)), -np.inf).argmax())
        assert matcher.accept(token_id)
        if token_id in eos_token_ids:
            return Answer(tokens, True, forced)
        tokens.append(token_id)
    return Answer(tokens, matcher.is_finished, forced)
