"""Writes the demo model as a Hugging Face folder: config, tokenizer, bf16 safetensors, training curve, model card."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from demo_corpus import END_OF_TEXT
from safetensors.numpy import save_file

from jpaged.models.spec import DecoderSpec


def write_folder(
    out: pathlib.Path, spec: DecoderSpec, params: dict[str, Any], tokenizer: Any, record: dict[str, Any]
) -> int:
    """Write the folder `out`. Returns the size of its files in bytes.

    params:    the tree of `param_shapes(spec)`, written as bf16.
    tokenizer: a tokenizers.Tokenizer.
    record:    measurements of `train_demo.export`, written to training_curve.json and to the card.
    """
    out.mkdir(parents=True, exist_ok=True)
    save_tensors(llama_tensors(spec, params), out / "model.safetensors")
    tokenizer.save(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    write_json(out / "config.json", llama_config(spec, end))
    write_json(out / "generation_config.json", {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end})
    write_json(out / "tokenizer_config.json", _tokenizer_config(spec))
    write_json(out / "training_curve.json", record)
    (out / "README.md").write_text(_card(spec, record), "utf-8")
    return sum(file.stat().st_size for file in out.iterdir())


def llama_config(spec: DecoderSpec, end: int) -> dict[str, Any]:
    if spec.rope is None:
        raise ValueError("spec.rope is None: a Llama needs rotary positions")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "hidden_act": spec.activation.value,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": spec.tie_embeddings,
        "initializer_range": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(spec: DecoderSpec) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position,
        "chat_template": CHAT_TEMPLATE,
    }


def _card(spec: DecoderSpec, record: dict[str, Any]) -> str:
    return CARD.format(
        spec=spec,
        recipe=record["recipe"],
        corpus=record["corpus"],
        versions=record["versions"],
        held_out=record["held_out"],
        cpu_minutes=record["cpu_seconds"] / 60,
        **{name: record[name] for name in ("parameters", "steps_done", "platform", "cores")},
    )


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


def llama_tensors(spec: DecoderSpec, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return bf16 tensors under the names of Transformers' LlamaForCausalLM, with a tied output matrix."""
    names = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    for i in range(spec.num_layers):
        names |= layer_tensors(f"model.layers.{i}.", spec, params, i)
    return in_bfloat16(names)


def layer_tensors(prefix: str, spec: DecoderSpec, params: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return a Llama layer's arrays under Transformers' names."""
    matrices, q_per_kv = params["layers"][layer], spec.q_per_kv
    qkv, inputs = matrices["qkv"], matrices["qkv"].shape[-1]
    return {
        prefix + "self_attn.q_proj.weight": qkv[:, :q_per_kv].reshape(-1, inputs),
        prefix + "self_attn.k_proj.weight": qkv[:, q_per_kv].reshape(-1, inputs),
        prefix + "self_attn.v_proj.weight": qkv[:, q_per_kv + 1].reshape(-1, inputs),
        prefix + "self_attn.o_proj.weight": matrices["o"],
        prefix + "mlp.gate_proj.weight": matrices["gate_up"][0],
        prefix + "mlp.up_proj.weight": matrices["gate_up"][1],
        prefix + "mlp.down_proj.weight": matrices["down"],
        prefix + "input_layernorm.weight": params["attn_norm"][layer],
        prefix + "post_attention_layernorm.weight": params["mlp_norm"][layer],
    }


def in_bfloat16(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(np.asarray(a).astype(ml_dtypes.bfloat16)) for name, a in arrays.items()}


def save_tensors(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600


CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- '# ' + message['content'] | trim | replace('\\n', '\\n# ') + '\\n' -}}
{%- else -%}
{{- message['content'] + '\\n' -}}
{%- endif -%}
{%- endfor -%}
"""
"""Renders a chat as a Python file: message contents on consecutive lines, system messages as comments."""

CARD = """---
license: other
license_name: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---
# The demo model of jpaged

A Llama-architecture language model of {parameters:,} parameters that continues Python. It is here so that the engine
has something real to run without a download. It knows Python's shape and a little of its libraries; it does not know
what it says. Made by `tools/train_demo.py`; how and why is in `docs/demo_model.md`.

| | |
|---|---|
| Layers | {spec.num_layers}, hidden size {spec.hidden_size}, feed-forward {spec.intermediate_size} |
| Heads | {spec.num_heads} query and {spec.num_kv_heads} KV heads of {spec.head_dim} |
| Context | {spec.max_position:,} tokens |
| Tokenizer | byte-level BPE, {spec.vocab_size:,} tokens, made from the training text; embeddings are tied |
| Trained on | {corpus[train_tokens]:,} tokens, {corpus[train_files]} files: Python's standard library |
| Held out | {corpus[held_out_tokens]:,} tokens, {corpus[held_out_files]} files, chosen by the hash of their path |
| Corpus SHA-256 | `{corpus[sha256]}` |
| Training | {steps_done:,} steps of {recipe[batch_tokens]:,} tokens, seed {recipe[seed]} |
| Time | {cpu_minutes:.0f} CPU minutes, on a machine with {cores} cores |
| Held-out loss | {held_out[loss]:.4f} nats a token, {held_out[bits_per_byte]:.4f} bits a byte |
| Measured | over {held_out[tokens]:,} held-out tokens in windows of {held_out[window]:,}, with the weights in bf16 |
| Made with | JAX {versions[jax]}, optax {versions[optax]}, tokenizers {versions[tokenizers]} |
| Platform | Python {versions[python]}, {platform} |

`training_curve.json` holds the curve, the recipe and these figures. The training text is under the Python Software
Foundation License; so are these weights, as far as they are a work derived from it.
"""
