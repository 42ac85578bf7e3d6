"""Tiny random checkpoints of every family and variant, the same bits on every machine.

Needs numpy only, so that the recorder (with torch) and the tests (without) make the same files. Weights come from
integer hashes and single multiplications. No random number library and no transcendental function can change the bits.
"""

import dataclasses
import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import fp8_blocks
from tests.golden.tensor_shapes import tensor_shapes

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 131)
NUM_TOKENS = 40  # greedy tokens of each answer
GOLDEN = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Variant:
    """A tiny model for comparisons. `config` is its config.json."""

    name: str
    config: dict[str, Any]
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    num_tokens: int = NUM_TOKENS

    @property
    def is_packed(self) -> bool:
        """True if the file has packed tensors (MXFP4 or fp8)."""
        return "quantization_config" in self.config

    @property
    def answers(self) -> Path:
        """The file with the recorded answers."""
        return GOLDEN / f"{self.name}.json"


def prompts(vocab_size: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    """One prompt of each length, without ids 0 to 2, which are special tokens in some families."""
    return [(3 + random_bits(1000 + n, n) % np.uint64(vocab_size - 3)).astype(int).tolist() for n in lengths]


def write_checkpoint(variant: Variant, seed: int, folder: Path) -> str:
    """Write config.json and model.safetensors into the folder. Returns the SHA-256 of model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(variant.config, indent=1))
    shapes = tensor_shapes(variant.config)
    packed = fp8_blocks.packed(variant.config, shapes)
    tensors = {name: _values(name, shape, seed) for name, shape in shapes.items() if name not in packed}
    for name in packed:
        tensors |= _fp8_values(name, shapes[name], seed)
    kind = variant.config["model_type"]
    if kind.startswith(("gemma3n", "gemma4")):  # their scores have no factor below 1
        of_scores = [name for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]
        factor = np.float32(0.25 if kind == "gemma3n_text" else 0.5)
        tensors |= {name: tensors[name] * factor for name in of_scores}
    elif kind.startswith(("gemma", "qwen3_next", "qwen3_5")):  # norms that add one to the weights
        offset = [name for name in tensors if "norm" in name and "linear_attn" not in name]
        tensors |= {name: tensors[name] - np.float32(1) for name in offset}
    return write_safetensors(folder / "model.safetensors", tensors, frozenset(packed))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], fp8: frozenset[str] = frozenset()) -> str:
    """Write tensors as a safetensors file. Returns its SHA-256.

    fp8: names of uint8 tensors that have the codes of float8 e4m3.
    """
    codes = {
        "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "uint8": "U8", "int8": "I8",
        "int16": "I16", "int32": "I32", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
        "bool": "BOOL", "float8_e8m0fnu": "F8_E8M0",
    }  # fmt: skip
    header, offset = {}, 0
    for name, tensor in tensors.items():
        shape, end = list(tensor.shape), offset + tensor.nbytes
        dtype = "F8_E4M3" if name in fp8 else codes[tensor.dtype.name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(t) for t in tensors.values())):
            data = piece if isinstance(piece, bytes) else piece.tobytes()
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


_LAST_NORMS = (
    "model.norm.weight", "transformer.ln_f.weight", "model.decoder.final_layer_norm.weight",
    "gpt_neox.final_layer_norm.weight", "model.embedding_norm.weight", "backbone.norm_f.weight",
    "model.final_layernorm.weight",
)  # fmt: skip


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values of a tensor, float32, or uint8 for MXFP4. Their scale depends on the tensor, so that greedy output varies.

    Norm weights inside the layers are about 2. With 1, such a model only repeats its last token, which hides errors in
    attention. Embeddings and the output matrix give logits a standard deviation of about 2.
    """
    count = math.prod(shape)
    # 24 bits per value: uniform in [-1, 1), exact in float32
    bits = random_bits(zlib.crc32(name.encode()) + (seed << 32), count) >> np.uint64(40)
    uniform = (bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(shape)
    if name.endswith("_blocks"):  # MXFP4: any bytes
        return bits.astype(np.uint8).reshape(shape)
    if name.endswith("_scales"):  # 2^-6 to 2^-4, for numbers up to 6
        return (np.uint8(121) + (bits % np.uint64(3)).astype(np.uint8)).reshape(shape)
    if name.endswith("gate.tid2eid"):  # experts of DeepSeek V4: two neighbours for each id, below 6
        first = (bits[:: shape[1]] % np.uint64(5)).astype(np.int64)
        return first[:, None] + np.arange(shape[1])
    is_norm = "norm" in name.lower() or ".ln_" in name
    if name == "transformer.word_embeddings_layernorm.weight":  # < 0: a tied model would repeat its last token
        return np.float32(-0.75) + np.float32(0.25) * uniform
    if is_norm and name.endswith("weight"):
        is_last = name in _LAST_NORMS
        centre = 1.0 if is_last else 2.0
        return np.float32(centre) + np.float32(0.5) * uniform
    # a state's decay: from 0.05 to 0.4 times the time step
    if name.endswith(("mamba.A_log", "mixer.A_log", "self_attn.A_log")):
        return np.float32(-2) + uniform
    if name.endswith(".ape"):  # added to the gates of entries
        return uniform
    factors = ("layer_scalar", "per_expert_scale", "correct_output_scale", "_attn_scale", "_ffn_scale")
    if name.endswith((*factors, "hc_scale", "head_scale")):
        return np.float32(1) + np.float32(0.25) * uniform
    if name.endswith("router.scale"):  # is divided by the root of the width
        return np.float32(math.sqrt(shape[0])) * (np.float32(2) + np.float32(0.5) * uniform)
    if not shape:  # of xIELU: eps has an effect if it is below 0
        return np.float32(-0.25 if name.endswith("eps") else 0.5) + np.float32(0.2) * uniform
    if len(shape) == 1:
        return np.float32(0.5) * uniform
    embeddings = ("embed_tokens", "lm_head", "wte", "embed_in", "word_embeddings", "backbone.embeddings")
    if any(part in name for part in embeddings) or name in ("embed.weight", "head.weight"):
        deviation = 2 / math.sqrt(shape[1])
    elif any(part in name for part in ("embed_positions", "wpe")):
        deviation = 0.25
    elif "modality_router" in name:  # its input is divided by the width
        deviation = 2.0
    elif "conv1d" in name or "conv.conv" in name:
        deviation = 1 / math.sqrt(shape[2])
    elif len(shape) == 3:  # all experts, [in, out] each
        deviation = 1 / math.sqrt(shape[1])
    else:
        deviation = 1 / math.sqrt(shape[0] if ".c_" in name else shape[1])
    return np.float32(deviation * math.sqrt(3)) * uniform


def _fp8_values(name: str, shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    """Codes and scales of a matrix in fp8, with about the deviation of `_values`. Eight codes come from 64 bits."""
    count, blocks = math.prod(shape), fp8_blocks.scale_shape(shape)
    number = zlib.crc32(name.encode()) + (seed << 32)
    codes = random_bits(number, -(-count // 8)).astype("<u8").view(np.uint8)[:count]
    bits = random_bits(number + 1, math.prod(blocks)) >> np.uint64(40)
    uniform = (bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(blocks)
    scales = np.float32(1 / (fp8_blocks.DEVIATION * math.sqrt(shape[1]))) * (np.float32(1) + np.float32(0.25) * uniform)
    return {name: fp8_blocks.CODES[codes].reshape(shape), f"{name}_scale_inv": scales}


def random_bits(seed: int, count: int) -> np.ndarray:
    """uint64[count]: the splitmix64 sequence (Steele, Lea & Flood 2014), with the seed mixed first."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    start = mix(np.array([seed], np.uint64))
    return mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _llama(name: str, **changes: Any) -> Variant:
    """A Llama with 2 layers, 4 query heads and 2 KV heads of 16. changes: fields of config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    return Variant(name, config | changes)


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def _kin(name: str, architecture: str, model_type: str, **changes: Any) -> Variant:
    return _llama(name, architectures=[architecture], model_type=model_type, **changes)


def _opt(name: str, **changes: Any) -> Variant:
    config = {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 320, "hidden_size": 64, "ffn_dim": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "activation_function": "relu",
        "do_layer_norm_before": True, "word_embed_proj_dim": 64, "bos_token_id": 2, "eos_token_id": 2,
        "pad_token_id": 1, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    return Variant(name, config | changes)


def _gpt_neox(name: str, **changes: Any) -> Variant:
    config = {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
        "rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "use_parallel_residual": True, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        "torch_dtype": "float32",
    }  # fmt: skip
    return Variant(name, config | changes)


def _falcon(name: str, **changes: Any) -> Variant:
    config = {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 320, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256, "layer_norm_epsilon": 1e-5,
        "alibi": False, "bias": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
        "bos_token_id": 11, "eos_token_id": 11, "torch_dtype": "float32",
    }  # fmt: skip
    return Variant(name, config | changes)


def _bloom(name: str, **changes: Any) -> Variant:
    config = {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 320, "hidden_size": 64,
        "n_layer": 2, "n_head": 4, "seq_length": 256, "layer_norm_epsilon": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
        "apply_residual_connection_post_layernorm": False, "torch_dtype": "float32",
    }  # fmt: skip
    return Variant(name, config | changes)


_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MAMBA = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 4, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip
_FALCON_H1 = {
    "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_chunk_size": 16, "embedding_multiplier": 0.3,
    "lm_head_multiplier": 0.8, "key_multiplier": 0.6, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.6],
    "mlp_multipliers": [0.75, 0.8],
}  # fmt: skip
_NEMOTRON_H = {
    "hybrid_override_pattern": "M-MM*-", "num_hidden_layers": 6, "head_dim": 24, "mamba_num_heads": 6,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32, "conv_kernel": 4, "chunk_size": 16,
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "time_step_min": 0.0,
}  # fmt: skip
_NEMOTRON_EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
_DELTA_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 32, "routed_scaling_factor": 2.446,
    "model_max_length": 512, "pad_token_id": 0,
}  # fmt: skip
_COMPRESSED = {
    "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8,
    "moe_intermediate_size": 32, "intermediate_size": 32, "q_lora_rank": 24, "num_experts_per_tok": 2,
    "n_routed_experts": 6, "sliding_window": 20, "o_groups": 2, "o_lora_rank": 12, "index_n_heads": 16,
    "index_head_dim": 16, "index_topk": 6, "hc_mult": 4, "swiglu_limit": 1.0,
    "num_hash_layers": 1,
    "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                     "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
_UNLIKE = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": 20, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "num_kv_shared_layers": 0, "attention_k_eq_v": False, "use_double_wide_mlp": False,
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 0, "pad_token_id": 0,
}  # fmt: skip


FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}
# DeepSeek-V3's release, with 2 of its 61 layers (one dense, one with experts), 4 of 256 experts and 512 of 129,280 ids:
# its matrices have the real numbers of blocks. A float32 copy takes 4 GB, so its test is started by hand.
FULL_SIZE = Variant(
    "deepseek-v3-full-size",
    {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
        "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 2, "n_routed_experts": 4, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "quantization_config": FP8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 512,
    },
    prompt_lengths=(17,), num_tokens=12,
)  # fmt: skip

# Old and new spellings of config.json alternate. The dynamic model is trained for 64 positions: the prompt of 33 tokens
# outgrows them during its answer, and the prompt of 131 tokens is longer. Windows of 20 are not a multiple of a block.
VARIANTS = (
    _llama("llama"),
    _llama("llama-theta", rope_theta=500000.0, num_hidden_layers=3, vocab_size=257),
    _llama("llama-linear", rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.0}),
    _llama("llama-dynamic", max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    _llama(
        "llama-llama3",
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    _llama("llama-yarn", **_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    _llama(
        "llama-yarn-mscale", num_hidden_layers=3,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5,
                beta_fast=16.0, beta_slow=2.0, truncate=False),
    ),
    _llama("llama-attention-bias", attention_bias=True),
    _llama("llama-mlp-bias", mlp_bias=True),
    _llama("llama-all-bias-tied", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **_rope("default")),
    _llama("llama-tied", tie_word_embeddings=True),
    _llama("llama-head-dim-8", head_dim=8),
    _llama("llama-head-dim-16", head_dim=16, hidden_size=48, num_attention_heads=6),
    _llama("llama-head-dim-40", head_dim=40, num_key_value_heads=1),
    _llama("llama-mqa", num_key_value_heads=1),
    _llama("llama-mha", num_key_value_heads=4),
    _kin("mistral-window", "MistralForCausalLM", "mistral", sliding_window=20),
    _kin("mistral", "MistralForCausalLM", "mistral", sliding_window=None, head_dim=24, **_rope("default")),
    _kin("qwen2", "Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True, rope_theta=1000000.0, use_sliding_window=False,
         sliding_window=20, max_window_layers=2),
    _kin("qwen1.5", "Qwen2ForCausalLM", "qwen2", num_key_value_heads=4, rope_theta=1000000.0, use_sliding_window=False,
         sliding_window=20, max_window_layers=1),
    _kin("qwen2-window", "Qwen2ForCausalLM", "qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=20,
         max_window_layers=1),
    _kin("qwen3", "Qwen3ForCausalLM", "qwen3", head_dim=24, tie_word_embeddings=True, **_rope("default")),
    _kin("qwen3-bias-window", "Qwen3ForCausalLM", "qwen3", head_dim=16, attention_bias=True, num_hidden_layers=3,
         use_sliding_window=True, sliding_window=20,
         layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    _kin("gemma", "GemmaForCausalLM", "gemma", head_dim=24, hidden_act="gelu"),
    _kin("gemma2", "Gemma2ForCausalLM", "gemma2", head_dim=16, num_hidden_layers=3,
         hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=4, sliding_window=20,
         attn_logit_softcapping=5.0, final_logit_softcapping=6.0),
    _kin("gemma2-uncapped", "Gemma2ForCausalLM", "gemma2", head_dim=16, hidden_activation="gelu_pytorch_tanh",
         query_pre_attn_scalar=16, sliding_window=20, attn_logit_softcapping=None, final_logit_softcapping=None,
         layer_types=["full_attention", "sliding_attention"]),
    _kin("gemma3", "Gemma3ForCausalLM", "gemma3_text", head_dim=16, num_hidden_layers=3, query_pre_attn_scalar=4,
         sliding_window=20, sliding_window_pattern=3, rope_theta=100000.0, rope_local_base_freq=100.0,
         rope_scaling={"rope_type": "linear", "factor": 8.0}),
    _kin("gemma3-capped", "Gemma3ForCausalLM", "gemma3_text", head_dim=24, query_pre_attn_scalar=16, sliding_window=20,
         hidden_activation="gelu", final_logit_softcapping=6.0,
         layer_types=["full_attention", "sliding_attention"],
         rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}),
    _kin("granite", "GraniteForCausalLM", "granite", embedding_multiplier=3.0, attention_multiplier=0.3,
         residual_multiplier=0.7, logits_scaling=2.5, tie_word_embeddings=True),
    _kin("phi3", "Phi3ForCausalLM", "phi3", num_key_value_heads=4, pad_token_id=0),
    _kin("phi3-partial-window", "Phi3ForCausalLM", "phi3", sliding_window=20, partial_rotary_factor=0.75,
         pad_token_id=0),
    _kin("phi3-longrope", "Phi3ForCausalLM", "phi3", pad_token_id=0, max_position_embeddings=512,
         original_max_position_embeddings=64,
         rope_scaling={"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
                       "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0, 14.0, 20.0]}),
    _kin("phi3-longrope-partial", "Phi3ForCausalLM", "phi3", pad_token_id=0, max_position_embeddings=512,
         original_max_position_embeddings=64, tie_word_embeddings=True,
         **_rope("longrope", short_factor=[1.0, 1.2, 1.5, 2.0, 2.5, 3.0], long_factor=[1.0, 2.0, 4.0, 8.0, 12.0, 20.0],
                 attention_factor=1.3, original_max_position_embeddings=64, partial_rotary_factor=0.75)),
    _kin("olmo2", "Olmo2ForCausalLM", "olmo2", rope_theta=500000.0),
    _kin("olmo2-bias-mha", "Olmo2ForCausalLM", "olmo2", num_key_value_heads=4, attention_bias=True, **_rope("default")),
    _kin("olmo3", "Olmo3ForCausalLM", "olmo3", num_hidden_layers=4, sliding_window=20, rope_theta=500000.0,
         rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    _kin("olmo3-nested", "Olmo3ForCausalLM", "olmo3", sliding_window=20, attention_bias=True,
         layer_types=["full_attention", "sliding_attention"],
         rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}),
    _kin("smollm3", "SmolLM3ForCausalLM", "smollm3", num_hidden_layers=4, no_rope_layer_interval=2, pad_token_id=0),
    _kin("smollm3-window", "SmolLM3ForCausalLM", "smollm3", num_hidden_layers=3, no_rope_layers=[0, 1, 1],
         use_sliding_window=True, sliding_window=20, pad_token_id=0, **_rope("default")),
    _kin("starcoder2", "Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5,
         use_bias=True, sliding_window=20),
    _kin("starcoder2-no-bias", "Starcoder2ForCausalLM", "starcoder2", hidden_act="gelu_pytorch_tanh",
         norm_epsilon=1e-4, use_bias=False),
    _kin("mixtral", "MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    _kin("mixtral-window", "MixtralForCausalLM", "mixtral", num_local_experts=5, num_experts_per_tok=3,
         sliding_window=20, intermediate_size=32),
    _kin("qwen2-moe", "Qwen2MoeForCausalLM", "qwen2_moe", num_experts=6, num_experts_per_tok=2, num_hidden_layers=3,
         moe_intermediate_size=32, shared_expert_intermediate_size=48, decoder_sparse_step=1, mlp_only_layers=[1]),
    _kin("qwen2-moe-window", "Qwen2MoeForCausalLM", "qwen2_moe", num_experts=6, num_experts_per_tok=3,
         norm_topk_prob=True, moe_intermediate_size=32, shared_expert_intermediate_size=32, qkv_bias=False,
         use_sliding_window=True, sliding_window=20, max_window_layers=2),
    _kin("qwen3-moe", "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
         moe_intermediate_size=32, head_dim=24),
    _kin("qwen3-moe-sparse-step", "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=8, num_experts_per_tok=3,
         moe_intermediate_size=32, decoder_sparse_step=2, attention_bias=True, use_sliding_window=True,
         sliding_window=20),
    _kin("gpt-oss", "GptOssForCausalLM", "gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16,
         intermediate_size=32, num_hidden_layers=3, sliding_window=20, attention_bias=True, swiglu_limit=1.0,
         rope_theta=150000.0, rope_scaling={"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 32.0,
                                            "beta_slow": 1.0, "original_max_position_embeddings": 64}),
    _kin("gpt-oss-mxfp4", "GptOssForCausalLM", "gpt_oss", num_local_experts=8, num_experts_per_tok=3, head_dim=16,
         intermediate_size=64, sliding_window=20, attention_bias=True, swiglu_limit=7.0, **_rope("default"),
         quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}),
    _kin("deepseek-v2", "DeepseekV2ForCausalLM", "deepseek_v2", **_LATENT, n_group=2, topk_group=1,
         topk_method="group_limited_greedy", n_shared_experts=2, routed_scaling_factor=1.5),
    _kin("deepseek-v2-lite", "DeepseekV2ForCausalLM", "deepseek_v2", **(_LATENT | {"q_lora_rank": None}),
         topk_method="greedy", n_shared_experts=1, attention_bias=True),
    _kin("deepseek-v3", "DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT, n_group=4, topk_group=2, n_shared_experts=1,
         norm_topk_prob=True, routed_scaling_factor=2.5,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)),
    # blocks of 128 x 128 that the matrices do not fill: kv_a has 192 rows, the hidden size is 320
    _kin("deepseek-v3-fp8", "DeepseekV3ForCausalLM", "deepseek_v3",
         **_LATENT | {"q_lora_rank": 160, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
                      "v_head_dim": 32, "moe_intermediate_size": 96},
         hidden_size=320, intermediate_size=192, n_group=4, topk_group=2, n_shared_experts=1, norm_topk_prob=True,
         routed_scaling_factor=2.5, num_nextn_predict_layers=1, quantization_config=FP8, **_rope("default")),
    _kin("deepseek-v3-halves", "DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT, n_group=1, topk_group=1,
         n_shared_experts=2, norm_topk_prob=False, rope_interleave=False, attention_bias=True, **_rope("default")),
    _kin("ministral3", "Ministral3ForCausalLM", "ministral3", head_dim=24,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0,
                 llama_4_scaling_beta=0.5)),
    _kin("ministral3-window", "Ministral3ForCausalLM", "ministral3", head_dim=16, sliding_window=20,
         **_rope("default", original_max_position_embeddings=48, llama_4_scaling_beta=0.3)),
    _kin("mistral4", "Mistral4ForCausalLM", "mistral4", **_LATENT, n_group=1, topk_group=1, n_shared_experts=1,
         norm_topk_prob=True, routed_scaling_factor=1.5,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0,
                 llama_4_scaling_beta=0.5)),
    _kin("mistral4-groups", "Mistral4ForCausalLM", "mistral4", **_LATENT | {"first_k_dense_replace": 0}, n_group=4,
         topk_group=2, n_shared_experts=2, norm_topk_prob=False,
         **_rope("yarn", factor=2.0, original_max_position_embeddings=48, llama_4_scaling_beta=0.3)),
    _kin("granite4", "GraniteMoeHybridForCausalLM", "granitemoehybrid", embedding_multiplier=3.0,
         attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=2.5, num_local_experts=0,
         shared_intermediate_size=112, position_embedding_type="rope", layer_types=["attention"] * 2,
         tie_word_embeddings=True),
    _kin("granite4-moe", "GraniteMoeHybridForCausalLM", "granitemoehybrid", embedding_multiplier=2.0,
         attention_multiplier=0.25, residual_multiplier=0.8, logits_scaling=1.5, num_local_experts=6,
         num_experts_per_tok=3, intermediate_size=32, shared_intermediate_size=48, position_embedding_type="nope",
         layer_types=["full_attention"] * 2),
    _kin("glm4", "Glm4ForCausalLM", "glm4", head_dim=24, attention_bias=True, partial_rotary_factor=0.5,
         rms_norm_eps=1.5625e-07, pad_token_id=0),
    _kin("glm4-moe", "Glm4MoeForCausalLM", "glm4_moe", head_dim=24, attention_bias=True, partial_rotary_factor=0.5,
         use_qk_norm=True, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1,
         n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.5),
    _kin("glm4-moe-plain", "Glm4MoeForCausalLM", "glm4_moe", head_dim=16, n_routed_experts=8, num_experts_per_tok=2,
         moe_intermediate_size=32, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=0,
         norm_topk_prob=False, **_rope("default", partial_rotary_factor=0.25)),
    _kin("glm4-moe-lite", "Glm4MoeLiteForCausalLM", "glm4_moe_lite", **_LATENT, n_group=1, topk_group=1,
         n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.8,
         mlp_layer_types=["dense", "sparse"]),
    # 16 of up to 171 tokens. With few heads of the indexer many tokens have the score 0, and a tie would decide
    _kin("deepseek-v32", "DeepseekV32ForCausalLM", "deepseek_v32", **_LATENT, n_group=4, topk_group=2,
         n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5, index_n_heads=16, index_head_dim=16,
         index_topk=16,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)),
    _kin("deepseek-v32-bias", "DeepseekV32ForCausalLM", "deepseek_v32", **_LATENT, n_group=1, topk_group=1,
         n_shared_experts=2, norm_topk_prob=False, index_n_heads=17, index_head_dim=12, index_topk=23,
         attention_bias=True, mlp_layer_types=["sparse", "dense"], **_rope("default")),
    # as deepseek-v3-fp8
    _kin("deepseek-v32-fp8", "DeepseekV32ForCausalLM", "deepseek_v32",
         **_LATENT | {"q_lora_rank": 160, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
                      "v_head_dim": 32, "moe_intermediate_size": 96},
         hidden_size=320, intermediate_size=192, n_group=4, topk_group=2, n_shared_experts=1, norm_topk_prob=True,
         routed_scaling_factor=2.5, index_n_heads=16, index_head_dim=72, index_topk=16,
         quantization_config=FP8 | {"scale_fmt": "ue8m0"},
         **_rope("default")),
    _kin("deepseek-v4", "DeepseekV4ForCausalLM", "deepseek_v4", **_COMPRESSED,
         layer_types=[f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed",
                                                       "compressed_sparse")],
         compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}),
    # as the release spells it
    _kin("deepseek-v4-release", "DeepseekV4ForCausalLM", "deepseek_v4",
         **_COMPRESSED | {"hc_mult": 3, "num_hash_layers": 2, "num_hidden_layers": 3},
         compress_ratios=[128, 4, 0, 0], scoring_func="sigmoid", rope_theta=500.0, compress_rope_theta=5000.0),
    _kin("glm-moe-dsa", "GlmMoeDsaForCausalLM", "glm_moe_dsa", **_LATENT, n_group=1, topk_group=1,
         n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5, index_n_heads=16, index_head_dim=16,
         index_topk=16, mlp_layer_types=["dense", "sparse"], **_rope("default")),
    _kin("glm-moe-dsa-shared", "GlmMoeDsaForCausalLM", "glm_moe_dsa", **_LATENT, num_hidden_layers=4, n_group=2,
         topk_group=1, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5, index_n_heads=16,
         index_head_dim=16, index_topk=16, indexer_types=["full", "shared", "full", "shared"], **_rope("default")),
    _kin("seed-oss", "SeedOssForCausalLM", "seed_oss", head_dim=24, attention_bias=True, attention_out_bias=False,
         rope_theta=1e7, attention_dropout=0.1, residual_dropout=0.1),
    _kin("ernie", "Ernie4_5ForCausalLM", "ernie4_5", head_dim=24, rope_theta=500000.0, tie_word_embeddings=True),
    _kin("ernie-bias", "Ernie4_5ForCausalLM", "ernie4_5", head_dim=16, use_bias=True, **_rope("default")),
    _kin("ernie-moe", "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", num_hidden_layers=3, moe_k=2, moe_num_experts=6,
         moe_intermediate_size=32, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=1,
         rope_theta=500000.0),
    _kin("exaone4", "Exaone4ForCausalLM", "exaone4", num_hidden_layers=3, sliding_window=20,
         layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    _kin("exaone4-full", "Exaone4ForCausalLM", "exaone4", sliding_window=None, sliding_window_pattern=None,
         layer_types=["full_attention"] * 2, tie_word_embeddings=True,
         **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    _kin("cohere", "CohereForCausalLM", "cohere", logit_scale=0.5, layer_norm_eps=1e-5, tie_word_embeddings=True,
         rope_theta=8000000.0, pad_token_id=0),
    _kin("cohere2", "Cohere2ForCausalLM", "cohere2", num_hidden_layers=3, logit_scale=0.25, layer_norm_eps=1e-5,
         sliding_window=20, sliding_window_pattern=3, attention_bias=True, tie_word_embeddings=True,
         rope_theta=50000.0, pad_token_id=0),
    _kin("olmoe", "OlmoeForCausalLM", "olmoe", num_experts=6, num_experts_per_tok=2, intermediate_size=32,
         norm_topk_prob=False),
    _kin("hunyuan", "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", head_dim=24, rope_theta=10000.0,
         rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
                       "mscale": 1.0, "mscale_all_dim": 1.0}),
    _kin("hunyuan3", "HYV3ForCausalLM", "hy_v3", head_dim=24, num_hidden_layers=3, num_experts=8,
         num_experts_per_tok=3, num_shared_experts=1, moe_intermediate_size=32, router_scaling_factor=2.5,
         mlp_layer_types=["dense", "sparse", "sparse"], **_rope("default")),
    _kin("minimax-m2", "MiniMaxM2ForCausalLM", "minimax_m2", head_dim=16, rotary_dim=8, num_local_experts=8,
         num_experts_per_tok=3, intermediate_size=32, rope_theta=5000000.0),
    _kin("phimoe", "PhimoeForCausalLM", "phimoe", num_local_experts=6, num_experts_per_tok=2, intermediate_size=32,
         attention_bias=True, lm_head_bias=True, router_jitter_noise=0.2, rope_theta=10000.0,
         max_position_embeddings=512,
         rope_scaling={"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
                       "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0, 14.0, 20.0], "short_mscale": 1.25,
                       "long_mscale": 1.25, "original_max_position_embeddings": 256}),
    _kin("phimoe-plain", "PhimoeForCausalLM", "phimoe", num_local_experts=8, num_experts_per_tok=2,
         intermediate_size=32, router_jitter_noise=0.05, **_rope("default")),
    _kin("laguna", "LagunaForCausalLM", "laguna", num_hidden_layers=3, head_dim=16, num_experts=8,
         num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=48, sliding_window=20,
         gating=True, num_attention_heads_per_layer=[4, 6, 6], moe_routed_scaling_factor=2.5,
         layer_types=["full_attention", "sliding_attention", "sliding_attention"],
         mlp_layer_types=["dense", "sparse", "sparse"],
         rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 50000.0,
                                             "partial_rotary_factor": 0.5},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 200.0,
                                                "partial_rotary_factor": 1.0}}),
    _kin("laguna-elements", "LagunaForCausalLM", "laguna", head_dim=16, num_experts=8, num_experts_per_tok=2,
         moe_intermediate_size=32, shared_expert_intermediate_size=32, sliding_window=20, gating="per-element",
         moe_router_logit_softcapping=0.5, mlp_layer_types=["sparse", "dense"]),
    _kin("llama4", "Llama4ForCausalLM", "llama4_text", num_hidden_layers=4, head_dim=16, intermediate_size=32,
         intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
         no_rope_layer_interval=2, attention_chunk_size=32, attn_temperature_tuning=True, floor_scale=24,
         attn_scale=0.5, rope_theta=500000.0,
         rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 64}),
    _kin("llama4-plain", "Llama4ForCausalLM", "llama4_text", num_hidden_layers=2, head_dim=24, intermediate_size=32,
         intermediate_size_mlp=96, num_local_experts=6, num_experts_per_tok=2, interleave_moe_layer_step=1,
         no_rope_layers=[1, 0], attention_chunk_size=48, attn_temperature_tuning=False, use_qk_norm=False,
         **_rope("default")),
    # values of gated DeltaNet: 2 for each key, 1 for each, 3 for each
    _kin("qwen3-next", "Qwen3NextForCausalLM", "qwen3_next", **_DELTA, **_DELTA_EXPERTS, norm_topk_prob=True,
         **_rope("default", partial_rotary_factor=0.5)),
    _kin("qwen3-next-dense-layer", "Qwen3NextForCausalLM", "qwen3_next",
         **_DELTA | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}, **_DELTA_EXPERTS,
         norm_topk_prob=False, mlp_only_layers=[1], rope_theta=500000.0),
    _kin("qwen3.5", "Qwen3_5ForCausalLM", "qwen3_5_text", **_DELTA | {"linear_num_value_heads": 6},
         tie_word_embeddings=True,
         **_rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)),
    _kin("qwen3.5-moe", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **_DELTA, **_DELTA_EXPERTS,
         **_rope("default", partial_rotary_factor=0.5)),
    _kin("lfm2", "Lfm2ForCausalLM", "lfm2", num_hidden_layers=3, full_attn_idxs=[1], block_ff_dim=112,
         block_multiple_of=16, block_ffn_dim_multiplier=1.2, norm_eps=1e-5, tie_embedding=True, rope_theta=500000.0),
    _kin("lfm2-bias", "Lfm2ForCausalLM", "lfm2", num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"],
         block_auto_adjust_ff_dim=False, conv_bias=True, conv_L_cache=4, norm_eps=1e-5, **_rope("default")),
    _kin("lfm2-moe", "Lfm2MoeForCausalLM", "lfm2_moe", num_hidden_layers=3, norm_eps=1e-5, num_dense_layers=1,
         layer_types=["conv", "full_attention", "conv"], num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
         routed_scaling_factor=1.5, tie_embedding=True, **_rope("default")),
    _kin("lfm2-moe-plain", "Lfm2MoeForCausalLM", "lfm2_moe", norm_eps=1e-5, num_dense_layers=0,
         layer_types=["conv", "full_attention"], num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
         use_expert_bias=False, norm_topk_prob=False, conv_bias=True),
    _kin("granite4-hybrid", "GraniteMoeHybridForCausalLM", "granitemoehybrid", **_MAMBA, embedding_multiplier=2.0,
         attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=1.5, num_local_experts=0,
         shared_intermediate_size=112, position_embedding_type="nope", tie_word_embeddings=True),
    _kin("granite4-hybrid-moe", "GraniteMoeHybridForCausalLM", "granitemoehybrid",
         **_MAMBA | {"mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_n_heads": 4, "mamba_d_conv": 3,
                     "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
         mamba_conv_bias=False, mamba_proj_bias=True, residual_multiplier=0.8, num_local_experts=6,
         num_experts_per_tok=3, intermediate_size=32, shared_intermediate_size=48, position_embedding_type="rope"),
    # One block for each layer. Transformers limits the time step in prompts only: see docs/decisions.md
    _kin("nemotron-h", "NemotronHForCausalLM", "nemotron_h", **_NEMOTRON_H),
    _kin("nemotron-h-moe", "NemotronHForCausalLM", "nemotron_h",
         **_NEMOTRON_H | {"hybrid_override_pattern": "MEM*EM-E", "num_hidden_layers": 8}, **_NEMOTRON_EXPERTS,
         n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5),
    _kin("nemotron-h-latent", "NemotronHForCausalLM", "nemotron_h",
         **{name: value for name, value in _NEMOTRON_H.items() if name != "hybrid_override_pattern"},
         **_NEMOTRON_EXPERTS | {"num_experts_per_tok": 3},
         layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe", "mlp"],
         norm_topk_prob=False, moe_latent_size=48, use_bias=True, use_conv_bias=False),
    # attention and Mamba-2 side by side; without a norm, with the norm before the gate, and after it
    _kin("falcon-h1", "FalconH1ForCausalLM", "falcon_h1", **_FALCON_H1, mamba_rms_norm=False, **_rope("default")),
    _kin("falcon-h1-norm", "FalconH1ForCausalLM", "falcon_h1", **_FALCON_H1 | {"mlp_multipliers": None},
         mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_conv_bias=False, rope_theta=500.0),
    _kin("falcon-h1-gate", "FalconH1ForCausalLM", "falcon_h1", **_FALCON_H1 | {"ssm_multipliers": None},
         mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True, projectors_bias=True,
         tie_word_embeddings=True),
    _kin("kimi-linear", "KimiLinearForCausalLM", "kimi_linear", **_KIMI, q_lora_rank=None, num_hidden_layers=4,
         linear_attn_config={"kda_layers": [1, 2, 4], "full_attn_layers": [3], "head_dim": 16, "num_heads": 4,
                             "short_conv_kernel_size": 4},
         num_expert_group=4, topk_group=2, moe_renormalize=True, num_shared_experts=1, first_k_dense_replace=1),
    _kin("kimi-linear-second", "KimiLinearForCausalLM", "kimi_linear", **_KIMI, q_lora_rank=24, num_hidden_layers=3,
         layer_types=["full_attention", "linear_attention", "linear_attention"], linear_head_dim=32, linear_num_heads=2,
         linear_conv_kernel_dim=3, num_expert_group=1, topk_group=1, moe_renormalize=False, num_shared_experts=2,
         mlp_layer_types=["sparse", "dense", "sparse"]),
    _kin("gemma3n", "Gemma3nForCausalLM", "gemma3n_text", num_hidden_layers=5, head_dim=16, sliding_window=20,
         layer_types=["sliding_attention", "full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
         num_kv_shared_layers=2, intermediate_size=[96, 64, 96, 128, 96], laurel_rank=8, altup_num_inputs=4,
         altup_active_idx=0, altup_correct_scale=True, activation_sparsity_pattern=[0.5, 0.0, 0.3, 0.0, 0.5],
         hidden_size_per_layer_input=16, vocab_size_per_layer_input=300, final_logit_softcapping=6.0,
         tie_word_embeddings=True, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", pad_token_id=0,
         rope_theta=50000.0, rope_local_base_freq=200.0),
    _kin("gemma3n-second", "Gemma3nForCausalLM", "gemma3n_text", num_hidden_layers=3, head_dim=24, sliding_window=20,
         layer_types=["full_attention"] + ["sliding_attention"] * 2, num_kv_shared_layers=0, num_key_value_heads=1,
         intermediate_size=[96, 96, 96], laurel_rank=16, altup_num_inputs=3, altup_active_idx=1,
         altup_correct_scale=False, activation_sparsity_pattern=[0.0, 0.0, 0.0], hidden_size_per_layer_input=16,
         vocab_size_per_layer_input=320, final_logit_softcapping=30.0, tie_word_embeddings=False, rms_norm_eps=1e-6,
         hidden_activation="gelu_pytorch_tanh", pad_token_id=0,
         rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}),
    # two layers with a window in a page of a layer with full attention, then two of the latter in one of the former
    _kin("gemma4", "Gemma4ForCausalLM", "gemma4_text",
         **_UNLIKE | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16,
                      "vocab_size_per_layer_input": 320, "final_logit_softcapping": 6.0, "attention_k_eq_v": True,
                      "num_global_key_value_heads": 2},
         rope_parameters={"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                             "rope_theta": 50000.0},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}),
    _kin("gemma4-moe", "Gemma4ForCausalLM", "gemma4_text",
         **_UNLIKE | {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 1},
         enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32),
    _kin("gemma4-unified", "Gemma4UnifiedForCausalLM", "gemma4_unified_text",
         **_UNLIKE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": False,
                      "num_kv_shared_layers": 1, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
                      "num_hidden_layers": 4}),
    # as the release spells it; then Transformers' default rope
    _kin("apertus", "ApertusForCausalLM", "apertus", hidden_act="xielu", qk_norm=True, post_norm=False, mlp_bias=False,
         rope_theta=500.0, rope_scaling={"type": "llama3", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    _kin("apertus-bias", "ApertusForCausalLM", "apertus", hidden_act="xielu", head_dim=24, num_hidden_layers=3,
         attention_bias=True, tie_word_embeddings=True),
    _kin("arcee", "ArceeForCausalLM", "arcee", hidden_act="relu2", head_dim=16,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    _kin("arcee-bias", "ArceeForCausalLM", "arcee", hidden_act="relu2", attention_bias=True, mlp_bias=True,
         tie_word_embeddings=True, rope_theta=500000.0),
    Variant("gpt2", {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_layer": 2,
        "n_head": 4, "n_positions": 256, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
    }),
    _gpt_neox("gpt-neox"),
    _gpt_neox("gpt-neox-sequential", use_parallel_residual=False, attention_bias=False, rotary_pct=1.0,
              hidden_act="gelu_new", rotary_emb_base=500),
    _falcon("falcon-7b"),
    _falcon("falcon-new", new_decoder_architecture=True, num_kv_heads=2, bias=True, tie_word_embeddings=False),
    _falcon("falcon-11b", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, activation="relu",
            rope_theta=500.0, ffn_hidden_size=96),
    _falcon("falcon-rw", alibi=True, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False),
    _bloom("bloom"),
    _bloom("bloom-6-heads", n_head=6, hidden_size=96, tie_word_embeddings=False),
    _opt("opt-125m"),
    _opt("opt-350m", do_layer_norm_before=False, word_embed_proj_dim=32),
    _opt("opt-no-bias", enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=False),
)  # fmt: skip
BY_NAME = {variant.name: variant for variant in VARIANTS}
# Model types that are mostly tested by slow tests: their mechanisms are those of other families.
NEWER = (
    "ministral3", "mistral4", "granitemoehybrid", "glm4", "glm4_moe", "glm4_moe_lite", "seed_oss", "ernie4_5",
    "ernie4_5_moe", "exaone4", "cohere", "cohere2", "olmoe", "hunyuan_v1_dense", "hy_v3", "minimax_m2", "phimoe",
    "laguna", "llama4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "nemotron_h",
    "falcon_h1", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "deepseek_v32", "deepseek_v4", "glm_moe_dsa",
    "apertus", "arcee", "kimi_linear",
)  # fmt: skip


def first_of_each_family() -> list[Variant]:
    """The first variant of each model_type, and further ones whose layers are of another kind."""
    firsts = {variant.config["model_type"]: variant for variant in reversed(VARIANTS)}.values()
    return [*list(firsts)[::-1], BY_NAME["granite4-hybrid"], BY_NAME["nemotron-h-moe"]]
