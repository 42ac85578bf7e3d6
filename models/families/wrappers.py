"""Wrappers: multimodal models around a text model. jpaged serves the text model.

A wrapper's config.json has the text model's values under `text_config`, without those that equal Transformers'
defaults. Its tensors have prefixes, in an old and a new form (Transformers 4.52).
"""

from collections.abc import Mapping
from typing import Any

from jpaged.errors import ModelLoadError

# Architecture -> model type of the text model -> the text model's architecture.
WRAPPERS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM",
    },
    "KimiK25ForConditionalGeneration": dict.fromkeys(("kimi_k2", "deepseek_v3"), "DeepseekV3ForCausalLM"),
}  # fmt: skip
_GEMMA4 = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
# Transformers' defaults that the families do not have themselves.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    "gemma3n_text": {
        "vocab_size": 262_400, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
    },
    "gemma4_text": _GEMMA4, "gemma4_unified_text": _GEMMA4,
    "llama4_text": {
        "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
        "num_attention_heads": 40, "max_position_embeddings": 131_072,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 131_072,
    },
    "qwen3_5_text": {
        "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
    "qwen3_5_moe_text": {
        "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    },
    "ministral3": {
        "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "max_position_embeddings": 262_144,
    },
    "mistral4": {
        "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "max_position_embeddings": 1_048_576,
    },
}  # fmt: skip
# Keys of the wrapper that hold for the text model, if it has none of its own.
_SHARED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id")
# (prefix in the checkpoint, prefix that the family knows). The first that matches applies.
TEXT_PREFIXES = (
    ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."), ("lm_head.", "lm_head."), ("mtp.", "mtp."),
)  # fmt: skip


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """The wrapper's architecture; None for other models."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return next((name for name in names if isinstance(name, str) and name in WRAPPERS), None)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config.json; other models' own. Raises ModelLoadError for an unknown text model."""
    wrapper = wrapper_of(config)
    if wrapper is None:
        return dict(config)
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ModelLoadError(f"config.json: text_config={inner!r} must be the config of {wrapper}'s text model")
    kind, known_kinds = inner.get("model_type"), WRAPPERS[wrapper]
    if kind not in known_kinds:
        known = " or ".join(known_kinds)
        raise ModelLoadError(
            f"config.json: text_config.model_type={kind!r} inside {wrapper} is not supported by jpaged (only {known})"
        )
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    return {**DEFAULTS.get(kind, {}), **shared, **inner, "architectures": [known_kinds[kind]]}
