"""Every family in bfloat16: its difference from float32 is about as large as Transformers'."""

import json
from pathlib import Path

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.loading import load_model
from tests.golden.checkpoints import GOLDEN, NUM_TOKENS, Variant, first_of_each_family, write_checkpoint
from tests.support.dense_model import answer_log_probabilities

RECORDED = json.loads((GOLDEN / "bfloat16.json").read_text())


def mean_difference(variant: Variant, folder: Path) -> float:
    """Mean absolute difference between our bfloat16 log-probabilities and Transformers' float32 ones."""
    golden = json.loads(variant.answers.read_text())
    write_checkpoint(variant, golden["seed"], folder)
    model = load_model(EngineConfig(model=str(folder), dtype="bfloat16"))
    differences = [
        np.abs(logprobs[np.arange(NUM_TOKENS), answer["tokens"]] - answer["logprobs"])
        for answer, logprobs in zip(golden["answers"], answer_log_probabilities(model, golden["answers"]), strict=True)
    ]
    return float(np.mean(differences))


# Norms that add one and soft caps, and experts with latent attention. The gate runs all families.
FIRST = ("gemma2", "deepseek-v3")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, id=v.name, marks=[pytest.mark.slow] * (v.name not in FIRST)) for v in first_of_each_family()],
)
def test_as_close_to_float32_as_transformers(variant: Variant, tmp_path: Path, record_property) -> None:
    """Implementations round differently, so up to 1.5 times Transformers' difference is allowed."""
    ours = mean_difference(variant, tmp_path)
    record_property("mean_difference", ours)
    assert ours < 1.5 * RECORDED[variant.name]
