"""Recorded float64 outputs of Transformers' logits processors for random logits (`tools/record_sampling.py`)."""

import dataclasses
import json
from typing import Any

import numpy as np

from tests.golden.checkpoints import GOLDEN, random_bits

ANSWERS = GOLDEN / "sampling.json"
VOCAB = 50


@dataclasses.dataclass(frozen=True)
class SamplingCase:
    """One row. `params` has vLLM's names."""

    seed: int
    ties: bool                 # logits are integers, so that many are equal
    params: dict[str, Any]
    prompt_ids: list[int]
    output_ids: list[int]
    stop_ids: list[int]
    bad_word_ids: list[list[int]]
    scores: list[float | None]  # [VOCAB] after all processors; None is -inf

    def __str__(self) -> str:
        values = {name: "" if isinstance(value, (list, dict)) else value for name, value in self.params.items()}
        names = "-".join(f"{name}{value}" for name, value in values.items()) or "bad_words"
        return f"{self.seed}-{names}" + "-ties" * self.ties

    @property
    def logits(self) -> np.ndarray:
        """float64[VOCAB], the input of the processors."""
        return logits(self.seed, self.ties)


def logits(seed: int, ties: bool = False) -> np.ndarray:
    """float64[VOCAB], from -5 to 5, with few large numbers. The bits are the same on every machine."""
    unit = (random_bits(seed, VOCAB) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
    values = 5 * unit * unit * unit
    return np.round(values) if ties else values


def cases() -> list[SamplingCase]:
    recorded = json.loads(ANSWERS.read_text())["cases"]
    for case in recorded:
        if "logit_bias" in case["params"]:  # JSON keys are strings
            case["params"]["logit_bias"] = {int(token): bias for token, bias in case["params"]["logit_bias"].items()}
    return [SamplingCase(**case) for case in recorded]
