"""Writes the demo model's speculators as Hugging Face folders: config, bf16 safetensors, training record, model card.

The folders have no tokenizer: a speculator shares the target's.
"""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
from demo_folder import in_bfloat16, layer_tensors, llama_config, llama_tensors, save_tensors, write_json
from safetensors.numpy import load_file

from jpaged.models.draft_head import HeadSpec
from jpaged.models.spec import DecoderSpec, Params

END_OF_TEXT_ID = 0  # of the demo model


def write_draft(out: pathlib.Path, spec: DecoderSpec, params: Params, record: dict[str, Any]) -> int:
    """Write the draft model, a Llama. Returns the size of the folder in bytes."""
    shape = f"{spec.num_layers} layers, hidden size {spec.hidden_size}, feed-forward {spec.intermediate_size}"
    text = DRAFT_TEXT.format(parameters=record["parameters"])
    return _write(out, llama_config(spec, END_OF_TEXT_ID), llama_tensors(spec, params), record, text, shape)


def write_eagle3(out: pathlib.Path, spec: HeadSpec, params: Params, record: dict[str, Any]) -> int:
    """Write an EAGLE-3 head in the format of the published heads. Returns the size of the folder in bytes."""
    layers = list(spec.aux_layers)
    config = llama_config(spec.layer, END_OF_TEXT_ID) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": spec.num_logits,
        "target_hidden_size": spec.target_hidden_size,
        "norm_before_residual": spec.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
    }
    tensors = in_bfloat16(layer_tensors("midlayer.", spec.layer, params, 0) | {
        "midlayer.hidden_norm.weight": params["hidden_norm"],
        "fc.weight": params["fc"],
        "norm.weight": params["final_norm"],
        "lm_head.weight": params["lm_head"],
    })  # fmt: skip
    d2t = np.asarray(params["d2t"], np.int64)
    is_drafted = np.zeros(spec.layer.vocab_size, bool)
    is_drafted[np.arange(len(d2t)) + d2t] = True
    shape = (
        f"one layer, hidden size {spec.layer.hidden_size}, feed-forward {spec.layer.intermediate_size}, "
        f"{spec.num_logits:,} draft ids; reads the inputs of the target's layers {', '.join(map(str, layers))}"
    )
    text = EAGLE3_TEXT.format(parameters=record["parameters"])
    return _write(out, config, tensors | {"d2t": d2t, "t2d": is_drafted}, record, text, shape)


def write_mtp(out: pathlib.Path, model: pathlib.Path, spec: HeadSpec, params: Params) -> int:
    """Write a copy of the target `model` with an MTP layer, under DeepSeek-V3's names. Returns its size in bytes.

    Embedding and output matrix are the target's, so the layer's own are not in the file.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix in (".json", ".txt", ".md"):
            shutil.copyfile(file, out / file.name)
    config = json.loads((model / "config.json").read_text("utf-8"))
    prefix = f"model.layers.{config['num_hidden_layers']}."
    write_json(out / "config.json", config | {"num_nextn_predict_layers": 1})
    layer = layer_tensors(prefix, spec.layer, params, 0) | {
        prefix + "enorm.weight": params["embedding_norm"],
        prefix + "hnorm.weight": params["hidden_norm"],
        prefix + "eh_proj.weight": params["fc"],
        prefix + "shared_head.norm.weight": params["final_norm"],
    }
    save_tensors(load_file(model / "model.safetensors") | in_bfloat16(layer), out / "model.safetensors")
    return sum(file.stat().st_size for file in out.iterdir())


def _write(
    out: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray], record: dict[str, Any], text: str,
    shape: str,
) -> int:  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, out / "model.safetensors")
    write_json(out / "config.json", config)
    write_json(out / "training.json", record)
    recipe, acceptance = record["recipe"], record["acceptance"]
    lines = [
        f"| {name} | " + " | ".join(f"{value:.2f}" for value in acceptance[name]["lengths"]) + " |"
        for name in acceptance
    ]
    card = CARD.format(
        text=text, shape=shape, table="\n".join(lines), steps=recipe["steps"], tokens=recipe["batch_tokens"],
        seed=recipe["seed"], cpu_minutes=record["cpu_seconds"] / 60,
    )  # fmt: skip
    (out / "README.md").write_text(card, "utf-8")
    return sum(file.stat().st_size for file in out.iterdir())


DRAFT_TEXT = """# The draft model of jpaged's demo model

A Llama of {parameters:,} parameters, a tenth of the demo model's size. It drafts tokens that the demo model checks."""

EAGLE3_TEXT = """# The EAGLE-3 head of jpaged's demo model

A draft head of {parameters:,} parameters. It drafts tokens from the demo model's hidden states, and the demo model
checks them. The embedding is the demo model's."""

CARD = """---
license: other
license_name: psf-2.0
---
{text}
It has no tokenizer of its own: it uses the demo model's. Made by `tools/train_speculators.py`; how and why is in
`docs/speculative_decoding.md`.

| | |
|---|---|
| Shape | {shape} |
| Trained on | the demo model's probabilities, on its training text and on its own continuations |
| Training | {steps:,} steps of {tokens:,} tokens, seed {seed} |
| Time | {cpu_minutes:.0f} CPU minutes |

Mean tokens of a verify step, on the demo model's continuations of held-out text:

| Drafts | 1 | 2 | 3 | 4 | 5 | 6 |
|---|---|---|---|---|---|---|
{table}

`training.json` holds the curve, the recipe and all figures. The training text is under the Python Software Foundation
License; so are these weights, as far as they are a work derived from it.
"""
