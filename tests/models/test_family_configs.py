"""config.json to DecoderSpec: both spellings of rope, defaults, and options that are refused by name."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.models import rope
from jpaged.models.families import family_of, spec_of
from jpaged.models.sharding import Shards, split_spec
from jpaged.models.spec import Rope
from jpaged.runtime.memory.plan import decide_limits
from tests.golden.checkpoints import BY_NAME, VARIANTS, Variant


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A variant's config with changes. A change to ... removes the key."""
    return {k: v for k, v in (BY_NAME[name].config | changes).items() if v is not ...}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_config_rewritten_by_transformers_gives_the_same_spec(variant: Variant) -> None:
    rewritten = transformers.AutoConfig.for_model(**variant.config).to_dict()
    assert spec_of(rewritten) == spec_of(variant.config)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_type": "linear", "factor": 2, "rope_theta": 1e4},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_old_and_new_spelling_of_rope(old: dict, new: dict) -> None:
    assert spec_of(config("llama", **old)) == spec_of(config("llama", rope_parameters=new))
    nested = {"full_attention": new, "sliding_attention": dict(new)}
    assert spec_of(config("llama", **old)) == spec_of(config("llama", rope_parameters=nested))


def test_max_position() -> None:
    assert spec_of(config("llama")).max_position == 256
    assert spec_of(config("llama-linear")).max_position == 512
    assert spec_of(config("llama-dynamic")).max_position == 256
    assert spec_of(config("llama-yarn")).max_position == 256
    assert spec_of(config("llama-llama3")).max_position == 256
    # the trained length defaults to max_position_embeddings
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    assert spec_of(config("llama", rope_parameters=yarn)).max_position == 1024
    assert spec_of(config("opt-125m")).max_position == 256
    assert spec_of(config("gpt2")).max_position == 256


def test_windows() -> None:
    assert spec_of(config("mistral-window")).sliding_window == (20, 20)
    assert spec_of(config("mistral")).sliding_window == ()
    assert spec_of(config("mistral", sliding_window=...)).sliding_window == (4096, 4096)
    assert spec_of(config("qwen2")).sliding_window == ()
    assert spec_of(config("qwen2-window")).sliding_window == (None, 20, 20)
    assert spec_of(config("qwen2-window", sliding_window=None)).sliding_window == ()
    assert spec_of(config("qwen2-window", max_window_layers=0)).sliding_window == (20, 20, 20)
    assert spec_of(config("qwen2-window", max_window_layers=...)).sliding_window == ()
    assert spec_of(config("qwen3-bias-window")).sliding_window == (20, None, 20)


def test_defaults() -> None:
    assert spec_of(config("qwen3", head_dim=...)).head_dim == 128
    assert spec_of(config("llama", num_key_value_heads=None)).num_kv_heads == 4
    assert spec_of(config("llama", head_dim=None)).head_dim == 16
    gpt2 = spec_of(config("gpt2", n_inner=None, tie_word_embeddings=...))
    assert (gpt2.intermediate_size, gpt2.tie_embeddings) == (256, True)
    assert spec_of(config("gpt2", scale_attn_weights=False)).scale == 1.0
    assert spec_of(config("opt-350m")).embed_size == 32
    assert not spec_of(config("opt-125m", _remove_final_layer_norm=True)).final_norm


def test_family_by_architecture_then_by_model_type() -> None:
    assert family_of({"architectures": ["Qwen2ForCausalLM"], "model_type": "llama"}).model_type == "qwen2"
    assert family_of({"model_type": "opt"}).model_type == "opt"
    assert family_of({"architectures": ["GPT2Model"]}).model_type == "gpt2"
    assert family_of({"architectures": ["GPT2ForSequenceClassification"]}).model_type == "gpt2"
    tokens = {"architectures": ["LlamaForTokenClassification"], "model_type": "llama"}
    for values in ({}, {"architectures": ["T5Model"]}, tokens):
        with pytest.raises(ModelLoadError, match="is not supported by jpaged; supported: LlamaForCausalLM, Mistral"):
            family_of(values)


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ({"architectures": ["Glm5MoeForCausalLM"]}, "; the nearest is Glm4MoeForCausalLM; docs/adding_a_model.md says"),
        ({"model_type": "qwen4_moe"}, "; the nearest is qwen3_moe; docs/adding_a_model.md says"),
        ({"architectures": ["Zyx"]}, "Llama4ForConditionalGeneration.*; docs/adding_a_model.md says how to add"),
    ],
)
def test_an_unknown_model_is_told_the_nearest_one(values: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ModelLoadError, match=nearest):
        family_of(values)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"hidden_size": "64"}, "hidden_size='64' must be a whole number"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number from 1"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6}, "hidden size 64 is not a multiple"),
        ("llama", {"head_dim": 7}, "head_dim=7 must be even"),
        ("llama", {"hidden_size": 10**30}, "hidden_size=10* must be a whole number"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps=10* must be a finite number"),
        ("llama", {"architectures": 1}, "architectures=1 must be a list of names"),
        ("llama", {"architectures": [1]}, r"architectures=\[1\] must be a list of names"),
        ("llama", {"architectures": ..., "model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ("llama", {"layer_types": 3}, "layer_types=3 must be a list of names"),
        ("llama", {"layer_types": [[]]}, "layer_types=.* must be a list of names"),
        ("mistral", {"layer_types": "full_attention"}, "layer_types='full_attention' must be a list of names"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        ("llama", {"rope_theta": [1]}, r"rope_theta=\[1\] must be a finite number"),
        ("llama", {"rope_theta": 0}, "rope_theta=0 must be above 0"),
        ("llama", {"rope_scaling": {"type": [1]}}, r"rope scaling \[1\] is not supported"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0 must be above 0"),
        (
            "llama-yarn",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings=0 must be a whole number from 1",
        ),
        ("llama-yarn", {"original_max_position_embeddings": 0}, "original_max_position_embeddings=0 must be"),
        (
            "llama",
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_theta=1.0 must be above 1 for yarn",
        ),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1e308}}, r"beta_fast=1e\+308 must be"),
        ("llama-dynamic", {"head_dim": 2}, "head_dim=2 must be at least 4"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act='xielu' is not supported; supported: silu"),
        ("llama", {"attention_bias": "yes"}, "attention_bias='yes' must be true or false"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("llama", {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"attention_chunk_size": 128}, "attention_chunk_size=128"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types=.* is not supported"),
        ("llama", {"rope_scaling": {"type": "su"}}, "scaling 'su' is not supported"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing: linear rope scaling needs it"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' must be a finite number"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        ("llama", {"rope_scaling": {"type": "default", "mrope_section": [8, 8]}}, "mrope_section=.* is not an option"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling=.* must be an object"),
        ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is given more than once"),
        ("llama", {"rope_parameters": {"a": {"rope_theta": 1}, "b": {"rope_theta": 2}}}, "differs between kinds of"),
        ("mistral-window", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("mistral-window", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, it must have one for"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention', which jpaged"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "but sliding_window is not set"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping=0 must be above 0"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 must be above 0"),
        ("gemma2", {"hidden_activation": "xielu"}, "'xielu' is not supported"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be above 0"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "long_factor=None must be a list"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]}}, "short_factor has 1 n"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2}}, "factor=None must be a list of numbers"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of a Phi-3 must be longrope"),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 is not supported"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "no entry for sliding_attention"),
        ("gpt-neox", {"rotary_pct": 0.2}, "partial_rotary_factor=0.2 of head_dim=16 must be even"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
        ("falcon-new", {"parallel_attn": False}, "parallel_attn=False"),
        ("falcon-new", {"num_kv_heads": 3}, "num_attention_heads=4 is not a multiple of num_kv_heads=3"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True"),
        ("deepseek-v3", {"n_group": 8}, "n_group must divide the experts into groups of at least 2"),
        ("deepseek-v3", {"topk_group": 5}, "n_group=4, topk_group=5"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' .* checkpoint in bfl"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
        ("qwen2-moe", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] must be a list of layer numbers"),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact=True is not supported"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("phi3", {"partial_rotary_factor": 0.3, "head_dim": 10}, "partial_rotary_factor=0.3 of head_dim=10"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=.* at most 1"),
        ("smollm3", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers=.* must be a list of 4 numbers, each 0 or 1"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers="),
        ("starcoder2", {"use_bias": 1}, "use_bias=1 must be true or false"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("opt-125m", {"activation_function": "gelu_10"}, "activation_function='gelu_10'"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta is missing"),
        ("mistral4", {"rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}}, "yarn"),
        ("granite4", {"layer_types": ["mamba", "mamba"]}, "layer_types=.* attention for at least one"),
        ("granite4", {"layer_types": ...}, "layer_types=.* must have mamba or attention for each of 2 layers"),
        ("granite4-hybrid", {"layer_types": ["attention"] * 3}, "layer_types=.* must have mamba or attention"),
        ("granite4-hybrid", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("granite4-hybrid", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("granite4-hybrid", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit=\[0.001, 0.1\] is not supported"),
        ("granite4-hybrid", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.* not supported"),
        ("nemotron-h", {"quantization_config": {"quant_method": "modelopt"}}, "quantization_config=.* not supported"),
        ("granite4-hybrid", {"mamba_d_head": 32}, "mamba_n_heads=8 times mamba_d_head=32 must be 128"),
        ("granite4-hybrid", {"mamba_n_groups": 3}, "mamba_n_heads=8 is not a multiple of mamba_n_groups=3"),
        ("granite4-hybrid", {"mamba_d_conv": 1}, "mamba_d_conv=1 must be a whole number from 2"),
        ("granite4-hybrid", {"mamba_conv_bias": 1}, "mamba_conv_bias=1 must be true or false"),
        ("nemotron-h", {"hybrid_override_pattern": "M-M-"}, "layers_block_type=.* at least one each of the first two"),
        ("nemotron-h", {"hybrid_override_pattern": "M*X"}, "layers_block_type=.* must have one of linear_attention"),
        ("nemotron-h", {"time_step_limit": [0.0, 1.0]}, r"time_step_limit=\[0.0, 1.0\] is not supported"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu' is not supported"),
        ("nemotron-h", {"residual_in_fp32": True}, "residual_in_fp32=True is not supported"),
        ("nemotron-h", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("nemotron-h", {"sliding_window": 64}, "sliding_window=64 is not supported"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
        ("kimi-linear", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax' is not"),
        ("kimi-linear", {"use_grouped_topk": False}, "use_grouped_topk=False is not supported"),
        ("kimi-linear", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ("kimi-linear", {"linear_attn_config": []}, r"linear_attn_config=\[\] must be an object"),
        ("kimi-linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound.* no other keys than"),
        ("kimi-linear", {"attn_res_block_size": 6}, "attn_res_block_size=6 is not supported"),
        ("kimi-linear", {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}}, "different whole"),
        ("kimi-linear", {"linear_attn_config": {"kda_layers": [[1]], "full_attn_layers": [2]}}, "different whole"),
        ("kimi-linear", {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3]}},
         "layer_types=.*, from linear_attn_config if the key is absent, must have"),
        ("falcon-h1", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("falcon-h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers=\[1.0\] must be a list of 2 numbers above 0"),
        ("falcon-h1", {"ssm_multipliers": [0.7] * 4 + [True]}, "ssm_multipliers=.* must be a list of 5 numbers"),
        ("falcon-h1", {"mamba_d_ssm": 128}, "mamba_n_heads=6 times mamba_d_head=16 must be 128"),
        ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not supported"),
        ("glm4", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75 is not supported for glm4"),
        ("glm4-moe", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense", "mamba"]}, "mlp_layer_types=.* each dense or sparse"),
        ("deepseek-v32", {"layer_types": ["full_attention"] * 2}, "layer_types=.* is not supported"),
        ("deepseek-v32", {"q_lora_rank": None}, "q_lora_rank=null: an indexer needs compressed queries"),
        ("deepseek-v32", {"index_head_dim": 6}, "index_head_dim=6 must be at least qk_rope_head_dim=8"),
        ("deepseek-v32", {"index_topk_freq": 4}, "index_topk_freq=4 is not supported"),
        ("deepseek-v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True is not supported"),
        ("deepseek-v4", {"layer_types": ["full_attention"] * 4}, "layer_types=.* must be a list of at least 4 names"),
        ("deepseek-v4", {"mlp_layer_types": ["moe"]}, "mlp_layer_types=.* must be a list of at least 4 names"),
        ("deepseek-v4-release", {"compress_ratios": [0, 4, 64]}, "compress_ratios=.* must be a list of 0, 4 and 128"),
        ("deepseek-v4", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported: sqrtsoftplus or"),
        ("deepseek-v4", {"n_shared_experts": 2}, "n_shared_experts=2 is not supported"),
        ("deepseek-v4", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method='mxfp4' is not supported"),
        ("deepseek-v4", {"o_groups": 3}, "o_groups=3 must divide num_attention_heads=4"),
        ("deepseek-v4", {"index_head_dim": 32}, "index_head_dim=32 must be from 8, the rotated dimensions"),
        ("deepseek-v4", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not"),
        ("glm-moe-dsa", {"indexer_types": ["shared", "full"]}, "indexer_types=.* must be a list of 2 names"),
        ("glm-moe-dsa", {"indexer_types": ["full"]}, "indexer_types=.* must be a list of 2 names"),
        ("glm-moe-dsa", {"index_topk_pattern": "FX"}, "indexer_types='FX' must be a list of 2 names"),
        ("glm-moe-dsa", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        ("ernie-moe", {"use_bias": True}, "use_bias=True is not supported"),
        ("exaone4", {"layer_types": ..., "sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG' must be"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("hunyuan", {"use_cla": True}, "use_cla=True is not supported"),
        ("minimax-m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported"),
        ("minimax-m2", {"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\] is not supported"),
        ("phimoe-plain", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supported for phimoe"),
        ("laguna", {"num_attention_heads_per_layer": [4, 6, 5]}, "must be a list of 3 multiples of num_key_value_h"),
        ("laguna", {"gating": "none"}, "gating='none' is not supported"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types=.* is not supported"),
        ("llama4", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of a Llama 4 must be llama3"),
        ("qwen3-next", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("qwen3-next", {"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is not supported"),
        ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ("qwen3.5", {"linear_value_head_dim": 32}, "linear_value_head_dim=32 is not supported"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads=3 is not a multiple of linear_num_key_"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 must be a whole number from 2"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 3}, "layer_types=.*, and both of them"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act='silu' is not supported by jpaged .only 'xielu'"),
        ("apertus", {"qk_norm": False}, "qk_norm=False is not supported"),
        ("apertus", {"post_norm": True}, "post_norm=True is not supported"),
        ("apertus", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("apertus-bias", {"rope_theta": 500.0}, "rope_theta is given more than once"),
        ("arcee", {"hidden_act": "xielu"}, "hidden_act='xielu' is not supported; supported: silu"),
        ("qwen3.5-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        ("lfm2", {"layer_types": ["conv", "mamba", "full_attention"]}, "layer_types=.* full_attention or conv"),
        ("lfm2", {"full_attn_idxs": []}, "layer_types=.* full_attention for at least one"),
        ("lfm2", {"full_attn_idxs": 1}, "full_attn_idxs=1 must be a list of layer numbers"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 must be a whole number from 2"),
        ("lfm2", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("lfm2", {"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is not supported"),
        ("lfm2-moe", {"layer_types": ...}, "layer_types=.* for each of 3 layers"),
        ("gemma3n", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("gemma3n", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3n", {"num_kv_shared_layers": 4}, "num_kv_shared_layers=4: no layer before the last 4 is of their kind"),
        ("gemma3n", {"intermediate_size": [96]}, r"intermediate_size=\[96\] must be a list of 5 numbers"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 5}, "activation_sparsity_pattern below 1"),
        ("gemma3n", {"altup_active_idx": 4}, "altup_num_inputs=4 must be at most 8 and above altup_active_idx=4"),
        ("gemma3n", {"altup_num_inputs": 9}, "altup_num_inputs=9 must be at most 8"),
        ("gemma4", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6: no layer before the last 6 is of their kind"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5: no layer before the last 5 is of their kind"),
        ("gemma4", {"layer_types": ["chunked_attention"] * 6}, "layer_types=.* is not supported"),
        ("gemma4", {"global_head_dim": 24}, "2 KV heads of 16 and with 2 of 24.*multiples of each other"),
        ("gemma4", {"per_layer_config": {"1": {"sliding_window": 8}}}, "per_layer_config=.* is not supported"),
        ("gemma4", {"per_layer_config": {"full_attention": {}}}, "per_layer_config=.* is not supported"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5},
                                        "sliding_attention": {}}}, "partial_rotary_factor=0.5 is not supported"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
                                        "sliding_attention": {}}}, "rope_parameters=.*yarn.* is not supported"),
        ("gemma4-moe", {"top_k_experts": 7}, "top_k_experts=7 is more than num_experts=6"),
        ("gemma4-moe", {"num_experts": ...}, "num_experts is missing"),
    ],
)
def test_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(config(name, **changes))


@pytest.mark.parametrize(
    ("name", "field"), [("laguna", "heads_by_layer"), ("phimoe", "lm_head_bias")]
)
def test_models_that_cannot_be_split_over_devices(name: str, field: str) -> None:
    with pytest.raises(ModelLoadError, match=f"the model has {field}=.*cannot be split over devices yet"):
        split_spec(spec_of(config(name)), Shards(2))


def test_names_and_values_of_published_configs() -> None:
    assert family_of({"architectures": ["Ernie4_5_ForCausalLM"]}).model_type == "ernie4_5"
    assert spec_of(config("minimax-m2", attn_type_list=[1, 1])) == spec_of(config("minimax-m2"))
    assert spec_of(config("llama4", no_rope_layers=[])) == spec_of(config("llama4"))


def test_kimi_k2_is_a_deepseek_v3() -> None:
    """The values of its published config.json that the code of DeepSeek-V3 reads."""
    kimi = {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072,
        "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "v_head_dim": 128, "vocab_size": 163840,
    }  # fmt: skip
    spec = spec_of(kimi)
    assert (family_of(kimi).model_type, spec.max_position, spec.num_heads) == ("deepseek_v3", 131_072, 64)
    assert spec.experts is not None
    assert (spec.experts.num, spec.experts.scale, sum(spec.experts.layers)) == (384, 2.827, 60)


def test_harmless_options_are_accepted() -> None:
    spec = spec_of(config("llama"))
    for changes in (
        {"pretraining_tp": 2}, {"partial_rotary_factor": 1.0}, {"layer_types": ["full_attention"] * 2},
        {"rope_scaling": None}, {"rope_scaling": {"type": "default"}}, {"use_cache": False}, {"attention_dropout": 0.1},
    ):  # fmt: skip
        assert spec_of(config("llama", **changes)) == spec


def test_frequencies_are_those_of_transformers() -> None:
    """Recorded with Transformers 5.24: the last bit of a frequency is multiplied by the position."""
    llama3 = Rope(theta=500.0, scaling="llama3", factor=8.0, original_max_position=64)
    recorded = [
        1.0, 0.45986328, 0.09761663, 0.012156156, 0.00559017, 0.002570714, 0.001182177, 0.0005436398,
    ]  # fmt: skip
    assert rope.inv_freq(llama3, 16, 256)[0].tolist() == np.array(recorded, np.float32).tolist()


def test_unknown_and_dynamic_rope_have_no_fixed_frequencies() -> None:
    for scaling in ("dynamic", "other"):
        with pytest.raises(ValueError, match="no fixed frequencies"):
            rope.inv_freq(Rope(scaling=scaling), 64, 128)


def test_dynamic_rope_is_plain_up_to_the_trained_length_and_slower_beyond() -> None:
    dynamic = Rope(scaling="dynamic", factor=2.0, original_max_position=64)
    plain, _ = rope.inv_freq(Rope(), 16, 64)
    within, at, beyond = np.asarray(rope.dynamic_inv_freq(dynamic, 16, jnp.array([1, 64, 65])))
    np.testing.assert_allclose(within, plain, rtol=1e-6)
    np.testing.assert_allclose(at, plain, rtol=1e-6)
    assert (beyond[1:] < plain[1:]).all()


def test_the_guide_lists_the_olmo3_file() -> None:
    root = Path(__file__).parent.parent.parent
    assert (root / "models/families/olmo3.py").read_text() in (root / "docs/adding_a_model.md").read_text()


def test_layers_that_share_the_tokens_of_an_indexer() -> None:
    """The three spellings of GLM-5.2's layers, as Transformers reads them."""
    name, count = "glm-moe-dsa-shared", BY_NAME["glm-moe-dsa-shared"].config["num_hidden_layers"]
    for keys in (
        {"indexer_types": ["full", "full", "shared", "shared"]}, {"index_topk_pattern": "FFSS"},
        {"index_topk_freq": 3}, {"index_topk_freq": 4, "index_skip_topk_offset": 2}, {"index_topk_freq": 1}, {},
    ):  # fmt: skip
        values = config(name, **{"indexer_types": ..., **keys})
        reference = transformers.AutoConfig.for_model(**values).indexer_types
        indexer = spec_of(values).indexer
        assert indexer is not None
        assert [indexer.is_in(layer) for layer in range(count)] == [kind == "full" for kind in reference]


def test_sparse_attention_refuses_tpus_and_layers_that_share_tokens_refuse_stages() -> None:
    spec = spec_of(BY_NAME["glm-moe-dsa-shared"].config)
    with pytest.raises(ModelLoadError, match=r"pipeline_parallel_size=2: .* that the layer before has chosen"):
        decide_limits(spec, EngineConfig(model="", pipeline_parallel_size=2), "cpu")
    decide_limits(spec, EngineConfig(model=""), "cpu")
    with pytest.raises(ModelLoadError, match="sparse attention, which does not run on TPUs"):
        decide_limits(spec, EngineConfig(model=""), "tpu")
