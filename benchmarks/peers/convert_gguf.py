"""Convert a benchmark model to GGUF files: bf16, q8_0 and q4_k_m.

    venvs/llama/bin/python benchmarks/peers/convert_gguf.py PEERS tiny-llama-60m qwen2-0.5b-shape

The package `gguf` writes the bf16 file, llama.cpp's own quantiser the others. llama.cpp's converter cannot be used,
because it refuses unknown tokenizers. Reads checkpoints of Llama and Qwen2 with a byte-level tokenizer.
"""

import argparse
import json
import os
import pathlib
import sys
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from safetensors.torch import load_file

QUANTIZED = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """Write the tokenizer. Missing ids, up to the model's vocabulary, become unused tokens."""
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for token in tokenizer["added_tokens"]:
        texts[token["id"]], kinds[token["id"]] = token["content"], gguf.TokenType.CONTROL
    every_id = range(config["vocab_size"])
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(i, f"<unused {i}>") for i in every_id])
    writer.add_token_types([kinds.get(i, gguf.TokenType.UNUSED) for i in every_id])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of a q or k projection for llama.cpp's Llama, which rotates neighbours instead of halves."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_bf16(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Write a checkpoint as GGUF: matrices in bfloat16, vectors in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    is_llama = config["model_type"] == "llama"
    architecture = gguf.MODEL_ARCH.LLAMA if is_llama else gguf.MODEL_ARCH.QWEN2
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_metadata(writer, config)
    add_tokenizer(writer, config, tokenizer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for key, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.to(torch.float32).numpy()
        suffix = ".".join(key.split(".")[-2:])
        if is_llama and suffix in heads:
            values = interleaved(values, heads[suffix])
        kind = gguf.GGMLQuantizationType.BF16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(np.ascontiguousarray(values), kind)
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            sys.exit(f"{folder}: GGUF has no name for the tensor {key}")
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=pathlib.Path, help="folder of the peers, with models/ and converted/")
    parser.add_argument("models", nargs="+", help="names of folders in models/")
    args = parser.parse_args()
    converted = args.peers / "converted"
    converted.mkdir(exist_ok=True)
    for model in args.models:
        whole = converted / f"{model}-bf16.gguf"
        write_bf16(args.peers / "models" / model, whole)
        for name, kind in QUANTIZED.items():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.nthread = kind, os.cpu_count()
            path = converted / f"{model}-{name}.gguf"
            if llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), params) != 0:
                sys.exit(f"llama.cpp cannot quantise {whole} to {name}")
        for path in sorted(converted.glob(f"{model}-*.gguf")):
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
