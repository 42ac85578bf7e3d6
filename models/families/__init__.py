"""Model families. Each one converts a Hugging Face config into a DecoderSpec, and names its checkpoints' tensors."""

from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.models.families.base import Family
from jpaged.models.families.bloom import BLOOM
from jpaged.models.families.config import CLASSIFIER, CheckpointConfig
from jpaged.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jpaged.models.families.falcon import FALCON
from jpaged.models.families.gemma import GEMMA, GEMMA2
from jpaged.models.families.gemma3 import GEMMA3
from jpaged.models.families.gpt2 import GPT2
from jpaged.models.families.gpt_neox import GPT_NEOX
from jpaged.models.families.gpt_oss import GPT_OSS
from jpaged.models.families.granite import GRANITE
from jpaged.models.families.llama import LLAMA
from jpaged.models.families.mistral import MISTRAL
from jpaged.models.families.mixtral import MIXTRAL
from jpaged.models.families.olmo2 import OLMO2
from jpaged.models.families.olmo3 import OLMO3
from jpaged.models.families.opt import OPT
from jpaged.models.families.phi3 import PHI3
from jpaged.models.families.qwen2 import QWEN2
from jpaged.models.families.qwen3 import QWEN3
from jpaged.models.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from jpaged.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jpaged.models.families.smollm3 import SMOLLM3
from jpaged.models.families.starcoder2 import STARCODER2
from jpaged.models.families.wrappers import WRAPPERS, text_config
from jpaged.models.spec import DecoderSpec

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, GRANITE, SMOLLM3, OLMO2, OLMO3, STARCODER2, GPT2, OPT,
    GPT_NEOX, FALCON, BLOOM, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3,
    QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE,
)  # fmt: skip
ARCHITECTURES: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
# Sequence classifiers: the base model with a score matrix. Transformers has none for Granite, OLMo 2 and Qwen3.5-MoE.
ARCHITECTURES |= {
    family.architectures[1].removesuffix("Model") + CLASSIFIER: family
    for family in FAMILIES
    if family not in (GRANITE, OLMO2, QWEN3_5_MOE)
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
    raise ModelLoadError(
        f"config.json: {asked} is not supported by jpaged{own_code}; supported: {supported}; "
        f"and the text models inside {wrappers}"
    )


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """DecoderSpec of a config.json. Raises ModelLoadError, which names the wrong or unsupported key."""
    config = text_config(config)
    return family_of(config).spec(CheckpointConfig(config))
