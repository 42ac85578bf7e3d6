"""Tiny random encoders, and Transformers' recorded vectors and scores of `prompts`.

An embedder has the mean of its hidden states and the first token's, both scaled to length 1. A classifier has the
scores of each prompt alone, and as a pair of texts, if the model has token types: the second half has type 1. A
reranker has the probability of YES.
"""

import json
from typing import Any

from tests.golden.checkpoints import BY_NAME, GOLDEN, Variant

SEED = 0
ANSWERS = GOLDEN / "encoders.json"


def _encoder(name: str, architecture: str, model_type: str, **changes: Any) -> Variant:
    config = {
        "architectures": [architecture], "model_type": model_type, "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0,
        "torch_dtype": "float32",
    }  # fmt: skip
    return Variant(name, {key: value for key, value in (config | changes).items() if value is not ...})


def _roberta(name: str, architecture: str, model_type: str, **changes: Any) -> Variant:
    defaults = {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 258, "layer_norm_eps": 1e-5}
    return _encoder(name, architecture, model_type, **(defaults | changes))


def _modernbert(name: str, architecture: str, **changes: Any) -> Variant:
    defaults = {
        "num_hidden_layers": 4, "local_attention": 20, "global_attn_every_n_layers": 3, "norm_eps": 1e-5,
        "layer_norm_eps": ..., "type_vocab_size": ..., "hidden_act": ..., "hidden_activation": "gelu",
        "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _encoder(name, architecture, "modernbert", **(defaults | changes))


def _labels(*names: str) -> dict[str, Any]:
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


BERT = _encoder("bert", "BertModel", "bert")
EMBEDDERS = (
    BERT,
    _encoder("bert-tanh-gelu", "BertModel", "bert", hidden_act="gelu_new", layer_norm_eps=1e-5),
    _roberta("roberta", "RobertaModel", "roberta"),
    _roberta("xlm-roberta", "XLMRobertaModel", "xlm-roberta"),
    _modernbert("modernbert", "ModernBertModel"),
    _modernbert(
        "modernbert-biases", "ModernBertModel", attention_bias=True, mlp_bias=True, norm_bias=True,
        global_attn_every_n_layers=2, global_rope_theta=80000.0, local_rope_theta=500.0,
    ),
)  # fmt: skip
RERANKER = _encoder("bert-reranker", "BertForSequenceClassification", "bert", **_labels("LABEL_0"))
CLASSIFIERS = (
    RERANKER,
    _encoder("bert-classifier", "BertForSequenceClassification", "bert", **_labels("bad", "fair", "good")),
    _roberta("roberta-classifier", "RobertaForSequenceClassification", "roberta", **_labels("bad", "fair", "good")),
    _roberta("xlm-roberta-reranker", "XLMRobertaForSequenceClassification", "xlm-roberta", **_labels("LABEL_0")),
    _modernbert("modernbert-classifier", "ModernBertForSequenceClassification", **_labels("bad", "good")),
    _modernbert(
        "modernbert-mean-reranker", "ModernBertForSequenceClassification", classifier_pooling="mean",
        classifier_bias=True, norm_bias=True, classifier_activation="silu", **_labels("LABEL_0"),
    ),
)  # fmt: skip


NO, YES = 7, 11  # ids of the two tokens by which a RERANKER answers
# Causal language models that score as Qwen3-Reranker: by the probability of YES among the two tokens
RERANKERS = (
    BY_NAME["qwen3"], Variant("qwen3-untied", BY_NAME["qwen3"].config | {"tie_word_embeddings": False}),
)  # fmt: skip


def token_types(count: int) -> list[int]:
    """Types of a prompt of `count` tokens as a pair of texts."""
    return [0] * (count - count // 2) + [1] * (count // 2)


def recorded(variant: Variant, kind: str) -> list[list[float]]:
    """Transformers' numbers for each prompt. kind: mean or cls of an embedder, scores or pairs of a classifier.

    `scores` of a reranker are probabilities.
    """
    return json.loads(ANSWERS.read_text())["models"][variant.name][kind]


def sha256_of(variant: Variant) -> str:
    """SHA-256 of the checkpoint that the answers were recorded with."""
    return json.loads(ANSWERS.read_text())["models"][variant.name]["sha256"]
