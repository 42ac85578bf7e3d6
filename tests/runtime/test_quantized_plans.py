"""Bytes of quantised checkpoints from their config.json alone, compared with arithmetic from the published shapes."""

import json

import pytest

from jpaged import cli
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.model_description import describe
from jpaged.runtime import targets
from jpaged.runtime.memory.weight_bytes import weight_kinds
from tests.golden.checkpoints import BY_NAME, write_checkpoint

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# As published: deepseek-ai/DeepSeek-V3 (and R1), openai/gpt-oss-120b, Qwen/Qwen3-235B-A22B-FP8 and
# hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4; keys that jpaged does not read are left out.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4,
    "max_position_embeddings": 131072, "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-05,
    "rope_theta": 150000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 201088,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
        "quant_method": "mxfp4",
    },
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
    "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "moe_intermediate_size": 1536, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
    "quantization_config": FP8 | {
        "modules_to_not_convert": ["lm_head", *(
            f"model.layers.{i}.{name}" for i in range(94)
            for name in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        )],
    },
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 128256,
    "quantization_config": {
        "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
}  # fmt: skip


def fp8(outputs, inputs):
    """A byte for each number, and a float32 scale for 128 inputs of an output: blocks are widened when they load."""
    return outputs * inputs + 4 * outputs * inputs // 128


def mxfp4(outputs, inputs):
    """Half a byte, and a bfloat16 scale for 32 inputs."""
    return outputs * inputs // 2 + 2 * outputs * inputs // 32


def awq(outputs, inputs):
    """Half a byte, and a float16 scale and a zero of one byte for 128 inputs."""
    return outputs * inputs // 2 + 3 * outputs * inputs // 128


# Parts by hand: bytes on a card
CASES = {
    "deepseek-v3": (DEEPSEEK, {
        "embedding": 2 * 129280 * 7168,
        "output matrix": 2 * 129280 * 7168,
        # kv_b is held dequantised: it is multiplied per head
        "attention": 61 * (fp8(1536, 7168) + fp8(24576, 1536) + fp8(576, 7168) + fp8(7168, 16384) + 2 * 32768 * 512),
        "feed-forward": 3 * 3 * fp8(18432, 7168),
        "experts": 58 * (257 * 3 * fp8(2048, 7168) + 2 * 256 * 7168 + 4 * 256),  # and router, correction
        "norms": 2 * (61 * (2 * 7168 + 1536 + 512) + 7168),
    }),
    "gpt-oss-120b": (GPT_OSS, {
        "embedding": 2 * 201088 * 2880,
        "output matrix": 2 * 201088 * 2880,
        "attention": 36 * 2 * (5120 * 2880 + 5120 + 2880 * 4096 + 2880 + 64),  # and biases, sinks
        "experts": 36 * (128 * (3 * mxfp4(2880, 2880) + 2 * 3 * 2880) + 2 * 128 * 2881),
        "norms": 2 * (36 * 2 + 1) * 2880,
    }),
    "qwen3-235b-fp8": (QWEN, {
        "embedding": 2 * 151936 * 4096,
        "output matrix": 2 * 151936 * 4096,
        "attention": 94 * (fp8(9216, 4096) + fp8(4096, 8192)),
        "experts": 94 * (128 * 3 * fp8(1536, 4096) + 2 * 128 * 4096),
        "norms": 2 * (94 * (2 * 4096 + 2 * 128) + 4096),
    }),
    "llama-8b-awq": (LLAMA, {
        "embedding": 2 * 128256 * 4096,
        "output matrix": 2 * 128256 * 4096,
        "attention": 32 * (awq(6144, 4096) + awq(4096, 4096)),
        "feed-forward": 32 * 3 * awq(14336, 4096),
        "norms": 2 * 65 * 4096,
    }),
}  # fmt: skip


def kinds_of(values, folder, platform, **options):
    """Bytes by part and kind."""
    (folder / "config.json").write_text(json.dumps(values))
    described = describe(EngineConfig(model=str(folder), **options), platform)
    return weight_kinds(described.params), described


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if n != "deepseek-v3"])
def test_bytes_on_a_card(name, tmp_path):
    values, parts = CASES[name]
    kinds, described = kinds_of(values, tmp_path, "gpu")
    assert {part: sum(found.values()) for part, found in kinds.items()} == parts
    assert described.format == values["quantization_config"]["quant_method"]


@pytest.mark.parametrize(
    ("variant", "config", "refused"),
    [
        ("gpt-oss-mxfp4", {"quant_method": "mxfp4"}, "experts.gate_up_proj with 72 inputs, .* groups of 32 in"),
        ("llama", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "q_proj.weight with 72 inputs, .* groups of 16"),
    ],
)
def test_fp4_in_groups_that_do_not_divide_the_inputs_is_refused(variant, config, refused, tmp_path):
    values = BY_NAME[variant].config | {"hidden_size": 72, "head_dim": 16, "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=refused):
        describe(EngineConfig(model=str(tmp_path)), "cpu")


def test_rounding_a_quantised_checkpoint_is_refused_as_by_the_engine(tmp_path):
    with pytest.raises(ModelLoadError, match="quantization='int8': the checkpoint is quantised already, as awq"):
        kinds_of(LLAMA, tmp_path, "gpu", quantization="int8")


def test_bytes_on_cpu(tmp_path):
    """4 bits have a native kernel, whose scales are float32 and zeros a byte. fp8 is dequantised."""
    kinds, _ = kinds_of(LLAMA, tmp_path, "cpu", dtype="bfloat16")
    weights = 14336 * 4096 * 3 * 32
    assert kinds["feed-forward"] == {"int4": weights // 2, "scales": 5 * weights // 128}
    kinds, _ = kinds_of(DEEPSEEK | {"num_hidden_layers": 4}, tmp_path, "cpu", dtype="bfloat16")
    assert kinds["feed-forward"] == {"bfloat16": 2 * 3 * 3 * 18432 * 7168}
    assert "scales" not in kinds["experts"]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["deepseek-v3-fp8", "gpt-oss-mxfp4"])
def test_a_config_alone_counts_what_the_headers_count(name, platform, tmp_path):
    write_checkpoint(BY_NAME[name], 0, tmp_path)
    counts = [kinds_of(BY_NAME[name].config, tmp_path, platform)[0]]
    (tmp_path / "model.safetensors").unlink()
    counts.append(kinds_of(BY_NAME[name].config, tmp_path, platform)[0])
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_deepseek_v3_does_not_fit_one_card(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(targets, "_installed", lambda module: False)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    out = tmp_path / "plan.json"
    assert cli.main(["plan", str(tmp_path), "--target", "h200", "--output-json", str(out)]) == 2
    found, parts = json.loads(out.read_text()), CASES["deepseek-v3"][1]
    (weights,) = (row for row in found["rows"] if row["name"] == "weights")
    assert {row["name"]: row["num_bytes"] for row in weights["parts"]} == parts
    assert weights["num_bytes"] == sum(parts.values())
    assert 690e9 < weights["num_bytes"] < 700e9
    assert found["least_devices"] == -(-weights["num_bytes"] // (141 * 10**9 * 9 // 10)) == 6
    text = capsys.readouterr().out
    assert "the weights alone need at least 6 such devices (--tensor-parallel-size)" in text
    assert "weights are quantised in the checkpoint (fp8)\n" in text
    experts = next(line for line in text.splitlines() if line.startswith("  experts"))
    assert "fp8 611.4 GiB, scales 19.1 GiB, bfloat16 203.0 MiB" in experts
