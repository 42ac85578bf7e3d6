"""Writes Hugging Face checkpoints as GGUF files, with the changes that llama.cpp's converter makes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

ARCHITECTURES = {"mistral": "llama", "mixtral": "llama"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
GEMMA2_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, model_type: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    names = LAYER_NAMES | (GEMMA2_NAMES if model_type == "gemma2" else {})
    return f"blk.{layer}.{names[rest]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of every head from [first half, second half] to [pair, pair, …]."""
    dim = len(rows) // heads
    order = [head * dim + half * (dim // 2) + i for head in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return rows[order]


def converted(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a Hugging Face checkpoint as the converter writes them."""
    kind, out = config["model_type"], {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        if ARCHITECTURES.get(kind, kind) == "llama" and ".q_proj." in name:
            values = interleaved(values, config["num_attention_heads"])
        if ARCHITECTURES.get(kind, kind) == "llama" and ".k_proj." in name:
            values = interleaved(values, config["num_key_value_heads"])
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if ".experts." in name:
            layer, part = name.split(".")[2], {"w1": "gate", "w2": "down", "w3": "up"}[name.split(".")[-2]]
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(values)
        else:
            out[gguf_name(name, kind)] = values
    return out | {name: np.stack(parts) for name, parts in experts.items()}


def rope_divisors(config: Mapping[str, Any]) -> np.ndarray | None:
    """Compute rope_freqs.weight of Llama 3.1's scaling, one value at a time."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, divisors = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < original / rope["high_freq_factor"]:
            divisors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    kind = config["model_type"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type") or rope.get("type")
    if kind not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        writer.add_rope_dimension_count(int(head_dim * (rope | config).get("partial_rotary_factor", 1.0)))
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(rope["factor"])
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if kind == "phi3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
        writer.add_rope_scaling_orig_ctx_len(
            config.get("original_max_position_embeddings", config["max_position_embeddings"])
        )
    if scaling == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if kind == "gemma2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "mixtral":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    add: Any = None,
) -> Path:
    """Write a model, its matrices as `kind`. `add` is called with the writer before the tensors."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(config["model_type"], config["model_type"]))
    writer.add_type("model")
    add_metadata(writer, config)
    if add is not None:
        add(writer)
    if (divisors := rope_divisors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, values in converted(config, tensors).items():
        stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str], types: list[int], kind: str, **special: int) -> None:
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType(number) for number in types])
    for name, number in special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
