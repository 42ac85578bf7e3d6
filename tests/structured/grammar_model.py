"""A tokenizer with its grammar compiler, and random answers under a grammar."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jpaged
from jpaged.engine.grammar import GrammarCompiler, GrammarMatcher
from jpaged.params.structured_outputs import StructuredOutputsParams
from tests.structured import sampling

DEMO = Path(jpaged.__file__).parent / "demo_model"
SECONDS = 60.0


@dataclasses.dataclass
class Model:
    """A tokenizer and a compiler for it, like those of an engine."""

    compiler: GrammarCompiler
    vocab_size: int  # padded: larger than the tokenizer's
    eos_token_ids: tuple[int, ...]
    decode: Callable[[list[int]], str]
    token_bytes: list[bytes]
    drops_leading_blank: bool = False  # as SentencePiece's decoding does at the beginning of a text

    def matcher(self, **fields: Any) -> GrammarMatcher:
        """Return a new matcher for fields of StructuredOutputsParams."""
        return self.compiler.submit(StructuredOutputsParams(**fields)).result(SECONDS).matcher()

    def write(self, matcher: GrammarMatcher, seed: int, strength: float = 5.0, **options: Any) -> sampling.Answer:
        """Write a random answer that prefers tokens which end texts, arrays and objects."""
        bias = sampling.logits_of(self.token_bytes, self.eos_token_ids, strength)

        def logits(position: int) -> np.ndarray:
            return bias + np.random.default_rng((seed, position)).gumbel(size=self.vocab_size)

        return sampling.write(matcher, self.vocab_size, self.eos_token_ids, logits, **options)


def model(tokenizer: Any, num_tokens: int, eos: tuple[int, ...], decode: Callable[[list[int]], str]) -> Model:
    """Return a model with 37 more logits than its tokenizer has tokens."""
    compiler = GrammarCompiler(tokenizer, num_tokens + 37, eos)
    texts = [decode([token_id]).encode() for token_id in range(num_tokens)] + [b"padding"] * 37
    return Model(compiler, num_tokens + 37, eos, decode, texts)
