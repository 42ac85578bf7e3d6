"""Tiny random models for pooling, and their recorded embeddings and scores of `prompts`.

Every family with a sequence classifier in Transformers has one here. For a bare Qwen 3, which has no lm_head, all
numbers of an embedding are recorded. For causal models the first NUM_KEPT numbers are recorded. They depend on all
others, because embeddings are normalised.
"""

import json
from typing import Any

from tests.golden.checkpoints import BY_NAME, GOLDEN, Variant

SEED = 0
NUM_KEPT = 8  # recorded numbers of a causal model's embedding
ANSWERS = GOLDEN / "pooling.json"


def _classifier(base: str, architecture: str, **changes: Any) -> Variant:
    """The base model as a classifier with 3 labels."""
    labels = {"id2label": {"0": "bad", "1": "fair", "2": "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
    config = {k: v for k, v in (BY_NAME[base].config | labels | changes).items() if v is not ...}
    return Variant(f"{base}-classifier", config | {"architectures": [f"{architecture}ForSequenceClassification"]})


QWEN3_CLASSIFIER = _classifier("qwen3", "Qwen3")
CLASSIFIERS = (
    QWEN3_CLASSIFIER,
    _classifier("qwen3-bias-window", "Qwen3", id2label=..., label2id=...),  # 2 labels: Transformers' default
    _classifier("llama", "Llama", id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
    _classifier("mistral-window", "Mistral"),
    _classifier("qwen2", "Qwen2"),
    _classifier("gemma", "Gemma"),
    _classifier("gemma2", "Gemma2"),
    _classifier("gemma3", "Gemma3Text"),
    _classifier("phi3-longrope", "Phi3"),
    _classifier("smollm3", "SmolLM3"),
    _classifier("starcoder2", "Starcoder2"),
    _classifier("gpt2", "GPT2"),
    _classifier("opt-350m", "OPT"),
    _classifier("gpt-neox", "GPTNeoX"),
    _classifier("falcon-7b", "Falcon"),
    _classifier("bloom", "Bloom"),
    _classifier("mixtral", "Mixtral"),
    _classifier("qwen2-moe", "Qwen2Moe"),
    _classifier("qwen3-moe", "Qwen3Moe"),
    _classifier("gpt-oss", "GptOss"),
    _classifier("deepseek-v2", "DeepseekV2"),
    _classifier("deepseek-v3", "DeepseekV3"),
)
BARE_QWEN3 = Variant(
    "qwen3-bare", BY_NAME["qwen3"].config | {"architectures": ["Qwen3Model"], "tie_word_embeddings": False}
)
EMBEDDERS = (
    BARE_QWEN3,
    *(
        BY_NAME[name]
        for name in (
            "qwen3", "llama", "gemma2", "phi3-longrope", "olmo2", "granite", "gpt2", "opt-350m", "falcon-7b",
            "deepseek-v2",
        )
    ),
)  # fmt: skip


def recorded(variant: Variant) -> list[list[float]]:
    """Transformers' numbers for each prompt: scores, or the first numbers of the normalised embedding."""
    return json.loads(ANSWERS.read_text())["models"][variant.name]["values"]


def sha256_of(variant: Variant) -> str:
    """SHA-256 of the checkpoint that the answers were recorded with."""
    return json.loads(ANSWERS.read_text())["models"][variant.name]["sha256"]
