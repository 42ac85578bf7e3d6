"""What Transformers' logits processors make of random logits, as `tools/record_sampling.py` recorded it, in float64."""

import dataclasses
import json
from typing import Any

import numpy as np

from tests.golden.checkpoints import GOLDEN, random_bits

ANSWERS = GOLDEN / "sampling.json"
VOCAB = 50


@dataclasses.dataclass(frozen=True)
class SamplingCase:
    """One row. Field names of `params` are vLLM's."""

    seed: int
    ties: bool                 # logits are whole numbers, so that many are equal
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
        """float64[VOCAB]."""
        return logits(self.seed, self.ties)


def logits(seed: int, ties: bool = False) -> np.ndarray:
    """float64[VOCAB], from -5 to 5, few of them large: the same bits everywhere."""
    unit = (random_bits(seed, VOCAB) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
    values = 5 * unit * unit * unit
    return np.round(values) if ties else values


def cases() -> list[SamplingCase]:
    """All that are recorded."""
    recorded = json.loads(ANSWERS.read_text())["cases"]
    for case in recorded:
        if "logit_bias" in case["params"]:  # keys of JSON are text
            case["params"]["logit_bias"] = {int(token): bias for token, bias in case["params"]["logit_bias"].items()}
    return [SamplingCase(**case) for case in recorded]
