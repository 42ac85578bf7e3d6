"""Recorded answers of Transformers' beam search (`tools/record_beams.py`), with tiny models and with tables.

A table of log-probabilities replaces the model in tests of the search alone. Its bits are the same on every machine, so
sums and scores can be compared bit for bit.
"""

import dataclasses
import functools
import json
from typing import Any, Literal

import numpy as np

from tests.golden.checkpoints import BY_NAME, GOLDEN, prompts, random_bits

ANSWERS = GOLDEN / "beams.json"
TABLE_VOCAB = 48
TABLE_PROMPT = (3, 5)
TABLE_ENDS = (7, 11, 13)  # likelier than other tokens, so that hypotheses end often


@dataclasses.dataclass(frozen=True)
class BeamParams:
    width: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_new_tokens: int
    end_token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BeamAnswer:
    """One returned sequence."""

    token_ids: list[int]          # generated tokens, with the end token if there is one
    score: float                  # sequences_scores
    cumulative_logprob: float     # sum of its tokens' log-probabilities
    beam_indices: list[int]       # per token, the beam that it continued; recorded with tables only


@dataclasses.dataclass(frozen=True)
class BeamCase:
    """A search with the tiny model of a variant from `checkpoints`, with the seed of the variant's answers."""

    variant: str
    prompt: list[int]
    params: BeamParams
    answers: list[BeamAnswer]     # best first

    def __str__(self) -> str:
        p = self.params
        return f"{self.variant}-{len(self.prompt)}-w{p.width}-{p.length_penalty}-{p.early_stopping}"


@dataclasses.dataclass(frozen=True)
class TableCase:
    """A search with `table(seed)`, from TABLE_PROMPT."""

    seed: int
    params: BeamParams
    answers: list[BeamAnswer]


def cases() -> list[BeamCase]:
    return [
        BeamCase(
            case["variant"], beam_prompt(case["variant"], case["prompt_len"]), BeamParams(*case["params"]),
            [BeamAnswer(*answer, beam_indices=[]) for answer in case["answers"]],
        )
        for case in _recorded()["models"]
    ]  # fmt: skip


def table_cases() -> list[TableCase]:
    return [
        TableCase(case["seed"], BeamParams(*case["params"]), [BeamAnswer(*answer) for answer in case["answers"]])
        for case in _recorded()["tables"]
    ]


def beam_prompt(variant: str, length: int) -> list[int]:
    """The variant's prompt with `length` tokens."""
    return prompts(BY_NAME[variant].config["vocab_size"], (length,))[0]


def table(seed: int) -> np.ndarray:
    """float32[TABLE_VOCAB, TABLE_VOCAB, TABLE_VOCAB]: (token before the last, last token, next token), in (-8, 0].

    The probabilities do not sum to one, which beam search does not need. The values are squares, so that every sum is
    rounded, from the first addition on.
    """
    bits = random_bits(seed, TABLE_VOCAB**3) >> np.uint64(40)
    uniform = (bits.astype(np.float32) * np.float32(2.0**-24)).reshape((TABLE_VOCAB,) * 3)
    values = np.float32(-8) * uniform * uniform
    values[..., TABLE_ENDS] *= np.float32(0.25)
    return values


@functools.cache
def _recorded() -> dict[str, Any]:
    return json.loads(ANSWERS.read_text())
