"""Model families. Each one converts a Hugging Face config into a DecoderSpec, and names its checkpoints' tensors."""

import difflib
from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.families.apertus import APERTUS
from jpaged.models.families.arcee import ARCEE
from jpaged.models.families.base import Family
from jpaged.models.families.bert import BERT, ROBERTA, XLM_ROBERTA
from jpaged.models.families.cohere import COHERE, COHERE2
from jpaged.models.families.config import CLASSIFIER, CheckpointConfig
from jpaged.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jpaged.models.families.early.bloom import BLOOM
from jpaged.models.families.early.falcon import FALCON
from jpaged.models.families.early.gpt2 import GPT2
from jpaged.models.families.early.gpt_neox import GPT_NEOX
from jpaged.models.families.early.opt import OPT
from jpaged.models.families.exaone import EXAONE4
from jpaged.models.families.gemma import GEMMA, GEMMA2
from jpaged.models.families.gemma3 import GEMMA3
from jpaged.models.families.gemma3n import GEMMA3N
from jpaged.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from jpaged.models.families.gpt_oss import GPT_OSS
from jpaged.models.families.granite import GRANITE, GRANITE4
from jpaged.models.families.hybrids.falcon_h1 import FALCON_H1
from jpaged.models.families.hybrids.kimi_linear import KIMI_LINEAR
from jpaged.models.families.hybrids.lfm2 import LFM2, LFM2_MOE
from jpaged.models.families.hybrids.nemotron_h import NEMOTRON_H
from jpaged.models.families.hybrids.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from jpaged.models.families.llama import LLAMA
from jpaged.models.families.ministral import MINISTRAL3
from jpaged.models.families.mistral import MISTRAL
from jpaged.models.families.mixtral import MIXTRAL
from jpaged.models.families.mixtures.deepseek_v4 import DEEPSEEK_V4
from jpaged.models.families.mixtures.deepseek_v32 import DEEPSEEK_V32, GLM_MOE_DSA
from jpaged.models.families.mixtures.ernie import ERNIE, ERNIE_MOE
from jpaged.models.families.mixtures.glm import GLM4, GLM4_MOE, GLM4_MOE_LITE
from jpaged.models.families.mixtures.hunyuan import HUNYUAN, HUNYUAN3
from jpaged.models.families.mixtures.laguna import LAGUNA
from jpaged.models.families.mixtures.llama4 import LLAMA4
from jpaged.models.families.mixtures.minimax import MINIMAX_M2
from jpaged.models.families.mixtures.mistral4 import MISTRAL4
from jpaged.models.families.mixtures.olmoe import OLMOE
from jpaged.models.families.mixtures.phimoe import PHIMOE
from jpaged.models.families.modernbert import MODERNBERT
from jpaged.models.families.olmo2 import OLMO2
from jpaged.models.families.olmo3 import OLMO3
from jpaged.models.families.phi3 import PHI3
from jpaged.models.families.qwen2 import QWEN2
from jpaged.models.families.qwen3 import QWEN3
from jpaged.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jpaged.models.families.seed_oss import SEED_OSS
from jpaged.models.families.smollm3 import SMOLLM3
from jpaged.models.families.starcoder2 import STARCODER2
from jpaged.models.families.wrappers import WRAPPERS, text_config
from jpaged.models.spec import DecoderSpec

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, GRANITE, SMOLLM3, OLMO2, OLMO3, STARCODER2, GPT2, OPT,
    GPT_NEOX, FALCON, BLOOM, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3,
    DEEPSEEK_V32, DEEPSEEK_V4, GLM_MOE_DSA,
    MINISTRAL3, MISTRAL4, GRANITE4, GLM4, GLM4_MOE, GLM4_MOE_LITE, SEED_OSS, ERNIE, ERNIE_MOE, EXAONE4, COHERE, COHERE2,
    OLMOE, HUNYUAN, HUNYUAN3, MINIMAX_M2, PHIMOE, LAGUNA, LLAMA4, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, LFM2, LFM2_MOE,
    NEMOTRON_H, FALCON_H1, KIMI_LINEAR, GEMMA3N, GEMMA4, GEMMA4_UNIFIED, APERTUS, ARCEE,
    BERT, ROBERTA, XLM_ROBERTA, MODERNBERT,
)  # fmt: skip
ARCHITECTURES: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
# Sequence classifiers: the base model with a score matrix.
ARCHITECTURES |= {
    family.architectures[1].removesuffix("Model") + CLASSIFIER: family for family in FAMILIES if family.has_classifier
}

__all__ = ["ARCHITECTURES", "FAMILIES", "Family", "family_of", "spec_of"]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its architectures, else its model_type. Raises ModelLoadError if unsupported."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, (list, tuple)) or not all(isinstance(name, str) for name in architectures):
        raise ModelLoadError(f"config.json: architectures={architectures!r} must be a list of names")
    model_type = config.get("model_type")
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    by_type = {family.model_type: family for family in FAMILIES}
    if not architectures and isinstance(model_type, str) and model_type in by_type:
        return by_type[model_type]
    asked = f"architecture {', '.join(architectures)}" if architectures else f"model_type {model_type!r}"
    supported = ", ".join(family.architectures[0] for family in FAMILIES)
    own_code = " (code in the checkpoint, auto_map, is not run)" if config.get("auto_map") else ""
    wrappers = ", ".join(WRAPPERS)
    names = architectures or ([model_type] if isinstance(model_type, str) else [])
    known = [*ARCHITECTURES, *WRAPPERS] if architectures else list(by_type)
    similar = difflib.get_close_matches(names[0], known, 1) if names else []
    nearest = f"; the nearest is {similar[0]}" if similar else ""
    raise ModelLoadError(
        f"config.json: {asked} is not supported by jpaged{own_code}; supported: {supported}; "
        f"and the text models inside {wrappers}{nearest}; docs/adding_a_model.md says how to add a model"
    )


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """DecoderSpec of a config.json. Raises ModelLoadError, which names the wrong or unsupported key."""
    config = text_config(config)
    return family_of(config).spec(CheckpointConfig(config))
