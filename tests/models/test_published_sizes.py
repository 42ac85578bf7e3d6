"""Numbers of parameters of published models, from their configs alone."""

from typing import Any

import jax
import numpy as np
import pytest
import transformers

from jpaged.models.families import family_of, spec_of
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import param_shapes

_GRANITE_4_H = {  # granite-4.0-h-1b and h-tiny
    "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
    "vocab_size": 100_352, "tie_word_embeddings": True, "position_embedding_type": "nope", "mamba_d_state": 128,
    "mamba_n_heads": 48, "mamba_d_head": 64,
    "layer_types": [*["mamba"] * 5, "attention", *[*["mamba"] * 9, "attention"] * 3, *["mamba"] * 4],
}  # fmt: skip
_NEMOTRON_3 = {"num_key_value_heads": 2, "max_position_embeddings": 262_144, "ssm_state_size": 128}

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
    # 32 layers have two parameters and two constants of xIELU each
    "Apertus-8B-2509": ("apertus", {"intermediate_size": 21_504, "num_key_value_heads": 8}, 8_053_338_176 + 2 * 32),
    # layers, heads and ids of a port's file: the release's config.json was not found
    "AFM-4.5B": (
        "arcee", {"num_hidden_layers": 36, "num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 128_004},
        4_619_184_640,
    ),
    "LFM2-1.2B": (
        "lfm2",
        {"hidden_size": 2048, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_ff_dim": 12_288},
        1_170_340_608,
    ),
    "LFM2-8B-A1B": (
        "lfm2_moe",
        {"num_hidden_layers": 24,
         "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]},
        8_339_930_560,
    ),
    "Kimi-K2": (
        "deepseek_v3",
        {"first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
         "num_key_value_heads": 64, "topk_group": 1, "vocab_size": 163_840, "routed_scaling_factor": 2.827},
        1_026_408_232_448,
    ),
    "granite-4.0-h-1b": (
        "granitemoehybrid",
        {**_GRANITE_4_H, "intermediate_size": 4096, "shared_intermediate_size": 4096, "num_local_experts": 0},
        1_461_538_368,
    ),
    "granite-4.0-h-tiny": (
        "granitemoehybrid",
        {**_GRANITE_4_H, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64,
         "num_experts_per_tok": 6},
        6_939_037_248,
    ),
    "Nemotron-Nano-9B-v2": (
        "nemotron_h",
        {"hidden_size": 4480, "intermediate_size": 15_680, "num_attention_heads": 40, "mamba_head_dim": 80,
         "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"},
        8_888_227_328,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h",
        {**_NEMOTRON_3, "hidden_size": 2688, "intermediate_size": 1856, "mamba_num_heads": 64,
         "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128,
         "num_experts_per_tok": 6, "routed_scaling_factor": 2.5,
         "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
        31_577_940_288,
    ),
    # The order of the layers is not the release's: 40 with Mamba-2, 40 with experts, 8 with attention
    "Nemotron-3-Super-120B-A12B": (
        "nemotron_h",
        {**_NEMOTRON_3, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
         "moe_latent_size": 1024, "n_routed_experts": 512, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0,
         "hybrid_override_pattern": "ME" * 40 + "*" * 8},
        120_668_707_840,
    ),
    "Falcon-H1-0.5B": (
        "falcon_h1",
        {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32_784, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
         "mamba_d_head": 64, "mamba_d_state": 128, "mamba_norm_before_gate": False, "tie_word_embeddings": False},
        521_411_104,
    ),
    "Falcon-H1-3B": (
        "falcon_h1",
        {"hidden_size": 2560, "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 10,
         "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 65_536, "mamba_d_ssm": 4096, "mamba_n_heads": 32,
         "mamba_d_head": 128, "mamba_d_state": 256, "tie_word_embeddings": False},
        3_149_256_192,
    ),
    "Falcon-H1-7B": (
        "falcon_h1",
        {"hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 44, "num_attention_heads": 12,
         "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 130_048, "mamba_d_ssm": 3072, "mamba_n_heads": 24,
         "mamba_d_head": 128, "mamba_d_state": 256, "tie_word_embeddings": False},
        7_585_513_568,
    ),
    # The release has its layers in linear_attn_config, counted from 1
    "Kimi-Linear-48B-A3B": (
        "kimi_linear",
        {"linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "short_conv_kernel_size": 4, "kda_layers": [i for i in range(1, 27) if i % 4],
        }},
        49_122_681_728,
    ),
    "gemma-3n-E2B": (
        "gemma3n_text", {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10}, 4_435_182_688,
    ),
    "gemma-3n-E4B": ("gemma3n_text", {}, 6_835_235_568),
    "gemma-4-E2B": (
        "gemma4_text",
        {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1,
         "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
         "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
        4_628_569_379,
    ),
    "gemma-4-E4B": (
        "gemma4_text",
        {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_key_value_heads": 2,
         "num_kv_shared_layers": 18},
        7_463_013_418,
    ),
    "gemma-4-12B": (
        "gemma4_unified_text",
        {"hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48, "num_attention_heads": 16,
         "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        11_907_350_320,
    ),
    "gemma-4-26B-A4B": (
        "gemma4_text",
        {"hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8,
         "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
         "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        25_233_141_790,
    ),
    "gemma-4-31B": (
        "gemma4_text",
        {"hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 60, "num_attention_heads": 32,
         "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
         "hidden_size_per_layer_input": 0},
        30_697_345_340,
    ),
    "DeepSeek-V3.2": ("deepseek_v32", {}, 671_877_944_064),
    "DeepSeek-V4-Flash": (
        "deepseek_v4", {"compress_ratios": [0, 0, *(128 if i % 2 else 4 for i in range(2, 43)), 0]}, 284_334_567_511,
    ),
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
