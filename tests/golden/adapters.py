"""Tiny LoRA adapters for the checkpoints of tests/golden, one per feature. Needs numpy only.

tools/record_lora.py makes each adapter with PEFT, and records PEFT's adapter_config.json, the names and shapes of its
tensors, and its answers. Values come from integer hashes of the names, so that tests write the same adapters.
"""

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.checkpoints import GOLDEN, random_bits, write_safetensors

FOLDER = GOLDEN / "lora"
PROMPT_LENGTH = 16
NUM_TOKENS = 16
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclasses.dataclass(frozen=True)
class AdapterVariant:
    """An adapter of one of the tiny checkpoints. `options` are arguments of PEFT's LoraConfig."""

    name: str
    base: str                # name of the checkpoint's variant
    options: dict[str, Any]
    as_file: bool = False    # PEFT's own files are committed too
    per_expert: bool = False  # has modules of single experts, as Transformers 4 named them

    @property
    def record(self) -> Path:
        """The file with PEFT's names, options and answers."""
        return FOLDER / f"{self.name}.json"

    @property
    def files(self) -> Path:
        """The folder that PEFT wrote, if `as_file`."""
        return FOLDER / self.name


def _variant(name: str, base: str, targets: Any, r: int = 2, alpha: float = 4, **options: Any) -> AdapterVariant:
    kinds = {key: options.pop(key) for key in ("as_file", "per_expert") if key in options}
    return AdapterVariant(name, base, {"r": r, "lora_alpha": alpha, "target_modules": targets, **options}, **kinds)


VARIANTS = (
    _variant("llama", "llama", "all-linear", as_file=True),
    _variant("llama-mha-rslora", "llama-mha", _ATTENTION, r=4, use_rslora=True),
    _variant("llama-patterns", "llama", "all-linear", rank_pattern={"q_proj": 3, r"layers.[1-9]\.mlp.up_proj": 5},
             alpha_pattern={"model.layers.0.self_attn.k_proj": 9, "down_proj": 1.5}),
    _variant("llama-one-layer", "llama", [*_ATTENTION, "down_proj"], layers_to_transform=[1]),
    _variant("llama-embeddings", "llama", ["embed_tokens", "lm_head", "q_proj"]),
    _variant("llama-tied-embedding", "llama-tied", ["embed_tokens", "v_proj"]),
    _variant("llama-tied-head", "llama-tied", ["lm_head", "v_proj"]),
    _variant("llama-tied-both", "llama-tied", ["embed_tokens", "lm_head"], ensure_weight_tying=True),
    _variant("llama-qv", "llama", ["q_proj", "v_proj"]),
    _variant("phi3", "phi3", "all-linear"),
    _variant("gpt2", "gpt2", ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, as_file=True),
    _variant("qwen2", "qwen2", "all-linear"),
    _variant("qwen3", "qwen3", "all-linear"),
    _variant("gemma2", "gemma2", ["embed_tokens", "gate_proj", "q_proj"]),
    _variant("falcon-new", "falcon-new", "all-linear"),
    _variant("gpt-neox", "gpt-neox", "all-linear"),
    _variant("opt-350m", "opt-350m", [*_ATTENTION[:3], "out_proj", "fc1", "fc2", "embed_tokens", "lm_head"]),
    _variant("mixtral-fused", "mixtral", ["q_proj"], target_parameters=_EXPERTS, as_file=True),
    _variant("mixtral-down", "mixtral", [], target_parameters=_EXPERTS[1:], rank_pattern={"experts.down_proj": 3}),
    _variant("mixtral-experts", "mixtral", ["w1", "w2", "w3", "k_proj"], per_expert=True),
    _variant("gpt-oss", "gpt-oss", ["o_proj"], target_parameters=_EXPERTS),
    _variant("qwen3.5", "qwen3.5", "all-linear"),
    _variant("qwen3-next", "qwen3-next", [*_ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]),
    _variant("lfm2", "lfm2", "all-linear"),
    # PEFT refuses the output matrix of Mamba-2 in Nemotron-H and Falcon-H1
    _variant("granite4-hybrid", "granite4-hybrid", ["q_proj", "in_proj", "out_proj"]),
    _variant("nemotron-h", "nemotron-h-moe", ["q_proj", "o_proj", "in_proj", "up_proj", "down_proj"]),
    _variant("nemotron-h-latent", "nemotron-h-latent", ["k_proj", "in_proj", "fc1_latent_proj", "fc2_latent_proj"],
             target_parameters=["mixer.experts.up_proj", "mixer.experts.down_proj"]),
    _variant("falcon-h1", "falcon-h1-gate", [*_ATTENTION, "in_proj", *_MLP]),
    # layers with unlike keys, values and widths; then experts next to a dense network
    _variant("gemma4", "gemma4", "all-linear"),
    _variant("gemma4-moe", "gemma4-moe", [*_ATTENTION, "gate_proj", "down_proj"],
             target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    _variant("gemma3n", "gemma3n", [*_ATTENTION, *_MLP, "linear_left", "linear_right", "per_layer_input_gate"]),
    _variant("qwen2-moe", "qwen2-moe", [*_ATTENTION, *_MLP], target_parameters=_EXPERTS),
)  # fmt: skip
BY_NAME = {variant.name: variant for variant in VARIANTS}


def values_of(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 values of a tensor. B (A x) is about as large as W x."""
    count = math.prod(shape)
    bits = random_bits(zlib.crc32(name.encode()) + ((seed + 77) << 32), count) >> np.uint64(40)
    uniform = (bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(shape)
    if "lora_A" in name:
        deviation = 1 / math.sqrt(shape[1])
    else:
        deviation = 0.05 if "lora_embedding_B" in name else 0.3
    return np.float32(1 if "lora_embedding_A" in name else deviation * math.sqrt(3)) * uniform


def write_adapter(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]], seed: int) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: values_of(name, tuple(shape), seed) for name, shape in shapes.items()}
    if config.get("ensure_weight_tying"):
        a, b = (tensors[f"base_model.model.model.embed_tokens.lora_embedding_{side}"] for side in "AB")
        tensors |= {
            "base_model.model.lm_head.lora_A.weight": np.ascontiguousarray(b.T),
            "base_model.model.lm_head.lora_B.weight": np.ascontiguousarray(a.T),
        }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
