"""BERT, RoBERTa and XLM-RoBERTa: encoders with layer norms after the residual sums, and learned positions.

MiniLM and most embedding models of Sentence Transformers are BERT, bge-m3 and multilingual-e5 are XLM-RoBERTa.
RoBERTa's positions begin after the id of the padding token, and its classifier has the names of its own tensors.
"""

import dataclasses
import re

from jpaged.models.families.base import Family, Part, TensorRule, with_bias
from jpaged.models.families.config import CheckpointConfig, head_share
from jpaged.models.spec import Activation, DecoderSpec, Encoder, Norm, NormPosition, TextPooling


def _norm(name: str, leaf: str) -> tuple[TensorRule, TensorRule]:
    """Rules of a layer norm. Files from before 2019 have its old names, as bert-base-uncased's."""
    return (
        TensorRule(f"{name}.weight", leaf, aliases=(f"{name}.gamma",)),
        TensorRule(f"{name}.bias", f"{leaf}_bias", aliases=(f"{name}.beta",)),
    )


def _rules(prefix: str) -> tuple[TensorRule, ...]:
    layer = prefix + "encoder.layer.{layer}."
    return (
        TensorRule(prefix + "embeddings.word_embeddings.weight", "embed"),
        TensorRule(prefix + "embeddings.position_embeddings.weight", "pos_embed"),
        TensorRule(prefix + "embeddings.token_type_embeddings.weight", "type_embed"),
        *_norm(prefix + "embeddings.LayerNorm", "embed_norm"),
        *with_bias(layer + "attention.self.query", "qkv", (Part.Q,)),
        *with_bias(layer + "attention.self.key", "qkv", (Part.K,)),
        *with_bias(layer + "attention.self.value", "qkv", (Part.V,)),
        *with_bias(layer + "attention.output.dense", "o"),
        *_norm(layer + "attention.output.LayerNorm", "attn_norm"),
        *with_bias(layer + "intermediate.dense", "up"),
        *with_bias(layer + "output.dense", "down"),
        *_norm(layer + "output.LayerNorm", "mlp_norm"),
    )


BERT_RULES = (*_rules("bert."), *with_bias("bert.pooler.dense", "head"), *with_bias("classifier", "score"))
ROBERTA_RULES = (
    *_rules("roberta."), *with_bias("classifier.dense", "head"), *with_bias("classifier.out_proj", "score")
)  # fmt: skip


def _bert(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_common()
    config.refuse("is_decoder", False)
    config.refuse("position_embedding_type", "absolute")
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    encoder = Encoder(token_types=config.integer("type_vocab_size", default=2))
    if config.num_labels() is not None:
        encoder = dataclasses.replace(
            encoder, pooling=TextPooling.CLS, head=Activation.TANH, head_bias=True, score_bias=True
        )
    return DecoderSpec(
        vocab_size=config.integer("vocab_size", default=30522),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", default=3072),
        num_layers=config.integer("num_hidden_layers", default=12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_share(hidden, heads),
        max_position=config.integer("max_position_embeddings", default=512),
        norm=Norm.LAYER,
        norm_eps=config.number("layer_norm_eps", default=1e-12),
        norm_position=NormPosition.POST,
        embed_norm=True,
        final_norm=False,
        activation=config.activation("hidden_act", "gelu"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        up_bias=True,
        down_bias=True,
        pools=True,
        encoder=encoder,
    )


def _roberta(config: CheckpointConfig) -> DecoderSpec:
    base, offset = _bert(config), config.integer("pad_token_id", default=1, minimum=0) + 1
    return dataclasses.replace(base, position_offset=offset, max_position=base.max_position - offset)


# `pooler` is used by classifiers of BERT only. The others are the heads of language models.
_IGNORED = re.compile(r".*position_ids|(bert\.|roberta\.)?pooler\..*|cls\..*|lm_head\..*")

BERT = Family("bert", ("BertForMaskedLM", "BertModel"), _bert, BERT_RULES, "bert.", _IGNORED)
ROBERTA = Family("roberta", ("RobertaForMaskedLM", "RobertaModel"), _roberta, ROBERTA_RULES, "roberta.", _IGNORED)
XLM_ROBERTA = Family(
    "xlm-roberta", ("XLMRobertaForMaskedLM", "XLMRobertaModel"), _roberta, ROBERTA_RULES, "roberta.", _IGNORED
)
