"""Numbers of parameters of published models, from their configs alone."""

from typing import Any

import jax
import numpy as np
import pytest
import transformers

from jpaged.models.families import family_of, spec_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import param_shapes

# Model type, values of the release's config.json that are not Transformers' defaults for the type, parameters of the
# text model. Transformers' defaults are mostly one release's config.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Ministral-3-8B": ("ministral3", {}, 8_489_553_920),
    "Mistral-Small-4-119B": ("mistral4", {}, 118_972_826_624),
    "granite-4.0-micro": (
        "granitemoehybrid",
        {"hidden_size": 2560, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
         "intermediate_size": 8192, "shared_intermediate_size": 8192, "num_local_experts": 0, "vocab_size": 100_352,
         "layer_types": ["attention"] * 40, "position_embedding_type": "rope", "tie_word_embeddings": True},
        3_402_836_480,
    ),
    "GLM-4-9B-0414": ("glm4", {}, 9_400_279_040),
    "GLM-4.5-Air": ("glm4_moe", {"head_dim": 128, "attention_bias": True}, 106_852_251_264),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}, 29_943_393_920),
    "Seed-OSS-36B": ("seed_oss", {"hidden_size": 5120}, 36_151_104_512),
    "ERNIE-4.5-0.3B": ("ernie4_5", {}, 360_748_032),
    "ERNIE-4.5-21B-A3B": ("ernie4_5_moe", {}, 21_825_437_888),
    "EXAONE-4.0-32B": (
        "exaone4",
        {"hidden_size": 5120, "intermediate_size": 27_392, "num_hidden_layers": 64, "num_attention_heads": 40,
         "num_key_value_heads": 8, "head_dim": 128},
        32_003_216_384,
    ),
    "c4ai-command-r-v01": ("cohere", {}, 34_980_831_232),
    "c4ai-command-r7b-12-2024": (
        "cohere2",
        {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8},
        8_028_033_024,
    ),
    "OLMoE-1B-7B": ("olmoe", {"intermediate_size": 1024}, 6_919_161_856),
    "Phi-3.5-MoE": ("phimoe", {"attention_bias": True, "lm_head_bias": True}, 41_873_153_344),
    "Hunyuan-MT-7B": (
        "hunyuan_v1_dense",
        {"intermediate_size": 14_336, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
         "tie_word_embeddings": True},
        7_504_932_864,
    ),
    "Hy3": ("hy_v3", {}, 295_033_543_488),
    "MiniMax-M2": ("minimax_m2", {"rotary_dim": 64}, 228_689_764_864),
    "Laguna (Transformers' defaults)": ("laguna", {}, 33_189_975_808),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {"intermediate_size": 5120}, 79_674_391_296),
    "Kimi-K2": (
        "deepseek_v3",
        {"first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
         "num_key_value_heads": 64, "topk_group": 1, "vocab_size": 163_840, "routed_scaling_factor": 2.827},
        1_026_408_232_448,
    ),
    "DeepSeek-V3.2": ("deepseek_v32", {}, 671_877_944_064),
    "GLM-5": ("glm_moe_dsa", {}, 743_911_218_432),
    "GLM-5.2": ("glm_moe_dsa", {"index_topk_freq": 4, "index_skip_topk_offset": 3}, 743_377_019_904),
    "Llama-4-Scout-17B-16E": ("llama4_text", {}, 107_769_861_120),
    "Llama-4-Maverick-17B-128E": (
        "llama4_text", {"interleave_moe_layer_step": 2, "num_local_experts": 128}, 400_711_848_960,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_published_model(name: str) -> None:
    kind, values, parameters = PUBLISHED[name]
    config = transformers.CONFIG_MAPPING[kind](**values).to_dict()
    tree = param_shapes(spec_of(config), np.float32)
    made = family_of(config).constants(CheckpointConfig(config))  # leaves that no checkpoint has
    leaves = [leaf for path, leaf in jax.tree.leaves_with_path(tree) if path[-1].key not in made]
    assert sum(leaf.size for leaf in leaves) == parameters
