"""GLM-4 (0414), with rope in pairs and norms around the blocks; GLM-4.5 to 4.7, with experts; and GLM-4.7 Flash.

GLM-4.7 Flash (`glm4_moe_lite`) is DeepSeek-V3 with other sizes.
"""

import dataclasses
import re

from jpaged.errors import ModelLoadError
from jpaged.models.families import deepseek, llama, phi3
from jpaged.models.families.base import Family, TensorRule, with_pairs
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec, NormPosition, QKNorm

_LAYER = "model.layers.{layer}."
_SHARE = 0.5  # of each head is rotated
_LATENT_LEAVES = ("q_a", "q_a_bias", "q_a_norm", "q_b", "kv_a", "kv_a_bias", "kv_a_norm", "kv_b")

GLM4_RULES = (
    *with_pairs(tuple(rule for rule in llama.RULES if rule.leaf not in ("gate_up", "mlp_norm", "attn_norm")), _SHARE),
    *(rule for rule in phi3.RULES if rule.leaf == "gate_up"),
    TensorRule(_LAYER + "input_layernorm.weight", "attn_norm"),
    TensorRule(_LAYER + "post_self_attn_layernorm.weight", "attn_out_norm"),
    TensorRule(_LAYER + "post_attention_layernorm.weight", "mlp_norm"),
    TensorRule(_LAYER + "post_mlp_layernorm.weight", "mlp_out_norm"),
)
MOE_RULES = (
    *(rule for rule in llama.RULES if rule.leaf in ("qkv", "qkv_bias")),
    *(rule for rule in deepseek.RULES if rule.leaf not in _LATENT_LEAVES),
)
# The layers after the last one predict a second token. Transformers ignores them too.
IGNORED = re.compile(llama.IGNORED.pattern + r"|model\.layers\.(46|92)\..*")
LITE_IGNORED = re.compile(llama.IGNORED.pattern + r"|model\.layers\.47\..*")


def _glm4(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=128, attention_bias=True, rms_norm_eps=1.5625e-7,
        max_position_embeddings=131_072,
    )  # fmt: skip
    base = llama.spec(config, partial_rope=True, share=_SHARE)
    if base.rope is not None and base.rope.partial != _SHARE:  # `GLM4_RULES` reorder this share of a head
        raise ModelLoadError(
            f"config.json: partial_rotary_factor={base.rope.partial} is not supported for glm4 (only {_SHARE})"
        )
    return dataclasses.replace(base, o_bias=False, norm_position=NormPosition.SANDWICH)


def _glm4_moe(config: CheckpointConfig) -> DecoderSpec:
    config.refuse_layers_but("full_attention")
    config = config.with_defaults(
        num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131_072, moe_intermediate_size=1408,
        n_shared_experts=1, first_k_dense_replace=1,
    )  # fmt: skip
    base = llama.spec(config, partial_rope=True, share=_SHARE)
    return dataclasses.replace(
        base,
        o_bias=False,
        qk_norm=QKNorm.HEAD if config.flag("use_qk_norm") else None,
        experts=deepseek.sigmoid_experts(config, base.num_layers, num=128, per_token=8),
    )


def _glm4_moe_lite(config: CheckpointConfig) -> DecoderSpec:
    config = config.with_defaults(
        q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_shared_experts=1, routed_scaling_factor=1.8,
        moe_intermediate_size=1536, rms_norm_eps=1e-5, max_position_embeddings=202_752,
    )  # fmt: skip
    if config.get("mlp_layer_types") is None:
        config.refuse("first_k_dense_replace", 1)
    base = deepseek.latent_spec(config)
    experts = deepseek.sigmoid_experts(config, base.num_layers, num=64, per_token=4)
    sparse = config.sparse_layers(base.num_layers, dense=1)
    return dataclasses.replace(base, experts=dataclasses.replace(experts, layers=sparse))


GLM4 = Family("glm4", ("Glm4ForCausalLM", "Glm4Model"), _glm4, GLM4_RULES, llama.PREFIX, llama.IGNORED)
GLM4_MOE = Family(
    "glm4_moe", ("Glm4MoeForCausalLM", "Glm4MoeModel"), _glm4_moe, MOE_RULES, llama.PREFIX, IGNORED,
    has_classifier=False,
)  # fmt: skip
GLM4_MOE_LITE = Family(
    "glm4_moe_lite", ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"), _glm4_moe_lite, deepseek.RULES, llama.PREFIX,
    LITE_IGNORED, has_classifier=False,
)  # fmt: skip
