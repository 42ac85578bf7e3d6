"""Converts the metadata of a GGUF file to the values of a Hugging Face config.json, which the families can read.

Every key of the architecture is used, known to change nothing, or refused by name. gguf's constants.py lists the keys.
Keys have the meaning that llama.cpp and its converter (conversion/*.py) give them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.loading.safetensors_file import TensorEntry
from jpaged.models.rope import inv_freq
from jpaged.models.spec import Rope

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = {"llama": (ROPE_FREQS,), "phi3": (LONG_FACTORS, SHORT_FACTORS)}  # architecture -> tensors with divisors

# general.architecture -> the architecture of config.json
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_GEMMA2_27B_LAYERS = 46

# Keys that change nothing, with their accepted values (None: any).
_HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": None,
    "rope.scaling.factor": (0.0, 1.0),  # used if there is a rope.scaling.type
    "rope.scaling.original_context_length": None,  # same
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scale_linear": (1.0,),
    "tensor_data_layout": None,
}
# Texts of tokens that end a turn. llama.cpp stops at them regardless of eos_token_id.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>",
)  # fmt: skip
_CONTROL = 3


def hugging_face_config(
    path: Path, metadata: Mapping[str, Any], entries: Mapping[str, TensorEntry], divisors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return the values of the model's config.json.

    entries:  all tensors except the divisors.
    divisors: the tensors in ROPE_TENSORS, float32[rotary_dim / 2]; they divide the rotary frequencies.
    Raises ModelLoadError that names the unsupported key or tensor.
    """
    return _Reader(path, metadata, entries).config(divisors)


class _Reader:
    """Reads the keys of the architecture, and finally refuses keys that were not read."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], entries: Mapping[str, TensorEntry]):
        self._path = path
        self._metadata = metadata
        self._entries = entries
        kind = metadata.get("general.type", "model")
        if kind != "model":
            raise ModelLoadError(f"{path}: general.type={kind!r} is not a language model: use a file of type 'model'")
        self._architecture = str(metadata.get("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{path}: general.architecture={self._architecture!r} is not supported by jpaged for GGUF files; "
                f"supported: {', '.join(_ARCHITECTURES)}"
            )
        self._used: set[str] = set()

    def config(self, divisors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return all values."""
        experts = self._integer("expert_count", 0)
        if experts and self._architecture != "llama":
            raise self._refused("expert_count", "(only in llama)")
        hidden, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        embedding = self._entries.get("token_embd.weight")
        context = self._integer("context_length")
        values: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "vocab_size": self._integer("vocab_size", embedding.shape[0] if embedding else None),
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": self._head_dim(hidden, heads),
            "max_position_embeddings": context,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": self._longrope(divisors) if LONG_FACTORS in divisors else self._rope_scaling(context),
            "tie_word_embeddings": "output.weight" not in self._entries,
            "attention_bias": "blk.0.attn_q.bias" in self._entries,
        }
        if any(entry.dtype not in ("F32", "F16", "BF16") for entry in self._entries.values()):
            # Dequantised values are float32. bfloat16, the dtype of training, needs half the memory. float16 has too
            # small a range for the activations.
            values["dtype"] = "bfloat16"
        match self._architecture:
            case "llama" if experts:
                values |= {
                    "architectures": ["MixtralForCausalLM"],
                    "model_type": "mixtral",
                    "num_local_experts": experts,
                    "num_experts_per_tok": self._integer("expert_used_count"),
                    "sliding_window": None,
                }
            case "llama":
                values["mlp_bias"] = "blk.0.ffn_up.bias" in self._entries
            case "gemma2":
                values |= self._gemma2(hidden, heads, values["num_hidden_layers"], values["head_dim"])
            case "phi3":
                values["sliding_window"] = self._integer("attention.sliding_window", 0) or None
        self._finish_rope(values, divisors)
        self._refuse_the_rest()
        return values | self._ends(values["vocab_size"])

    def _finish_rope(self, values: dict[str, Any], divisors: Mapping[str, np.ndarray]) -> None:
        """Add the share of rotated dimensions and the scaling of Llama 3.1 to `values`."""
        rotary = self._integer("rope.dimension_count", values["head_dim"])
        if rotary != values["head_dim"]:
            if self._architecture != "phi3":
                raise self._refused("rope.dimension_count", f"(only {values['head_dim']}, the width of a head)")
            values["partial_rotary_factor"] = rotary / values["head_dim"]
        if LONG_FACTORS in divisors:
            values["original_max_position_embeddings"] = self._integer("rope.scaling.original_context_length")
        rope_freqs = divisors.get(ROPE_FREQS)
        if rope_freqs is not None:
            if values["rope_scaling"] is not None:
                raise ModelLoadError(
                    f"{self._path}: tensor {ROPE_FREQS} and {self._key('rope.scaling.type')} both scale the rotary "
                    "embedding: use another conversion of the model"
                )
            values["rope_scaling"] = self._llama3_scaling(rope_freqs, values["rope_theta"], values["head_dim"])

    def _head_dim(self, hidden: int, heads: int) -> int:
        width = self._integer("attention.key_length", hidden // heads if heads else 0)
        if self._integer("attention.value_length", width) != width:
            raise self._refused("attention.value_length", f"(only {width}, the length of keys)")
        return width

    def _gemma2(self, hidden: int, heads: int, layers: int, head_dim: int) -> dict[str, Any]:
        """Return the values that only Gemma 2 has.

        The file lacks the scale of queries. Like llama.cpp, recognise the 27B model, whose heads are narrower than
        hidden_size / num_heads, by its number of layers.
        """
        return {
            "sliding_window": self._integer("attention.sliding_window", 4096),
            "attn_logit_softcapping": self._number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self._number("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": hidden // heads if layers == _GEMMA2_27B_LAYERS else head_dim,
        }

    def _rope_scaling(self, context: int) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type", "none")
        linear = self._number("rope.scale_linear", 1.0)  # in files from 2023
        if kind == "none" and linear != 1.0:
            kind = "linear"
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self._number("rope.scaling.factor", linear)}
        if kind != "yarn":
            raise self._refused("rope.scaling.type", "(only none, linear and yarn)")
        # yarn_attn_factor and yarn_ext_factor are refused: converters and llama.cpp have disagreed on their meaning.
        scaling = {
            "rope_type": "yarn",
            "factor": self._number("rope.scaling.factor"),
            "original_max_position_embeddings": self._integer("rope.scaling.original_context_length", context),
        }
        for name in ("beta_fast", "beta_slow"):
            if self._get(f"rope.scaling.yarn_{name}", None) is not None:
                scaling[name] = self._number(f"rope.scaling.yarn_{name}")
        return scaling

    def _longrope(self, divisors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return Phi-3's scaling: two tensors of factors, and the converter's key for the factor of cos and sin."""
        if SHORT_FACTORS not in divisors:
            raise ModelLoadError(
                f"{self._path}: tensor {LONG_FACTORS} has no tensor {SHORT_FACTORS} with it: use another conversion"
            )
        if self._get("rope.scaling.type", "none") not in ("none", "longrope"):
            raise self._refused("rope.scaling.type", f"(only longrope, with the tensor {LONG_FACTORS})")
        return {
            "rope_type": "longrope",
            "short_factor": [float(str(factor)) for factor in divisors[SHORT_FACTORS]],
            "long_factor": [float(str(factor)) for factor in divisors[LONG_FACTORS]],
            "attention_factor": self._number("rope.scaling.attn_factor"),
        }

    def _llama3_scaling(self, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
        """Compute the parameters of the scaling of Llama 3.1 and later from the divisors of the frequencies.

        The converter writes only the divisors. Short wavelengths have divisor 1 and long ones `factor`. Between them it
        is 1 / ((1 - s) / factor + s) with s = (original / wavelength - low) / (high - low). s is linear in the
        frequency. Only the ratios of original, low and high matter, so low is set to 1.
        """
        plain, _ = inv_freq(Rope(theta=theta), head_dim, 0)
        unclear = ModelLoadError(
            f"{self._path}: tensor {ROPE_FREQS} is not the scaling of Llama 3.1, the only one supported: "
            "use another conversion of the model"
        )
        factor = float(factors.max(initial=0))
        blended = (factors > 1) & (factors < factor)
        if factors.shape != plain.shape or factors.min() < 1 or blended.sum() < 2:
            raise unclear
        share = (1 / factors[blended].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(plain[blended].astype(np.float64), share, 1)
        if slope <= 0 or offset >= 0:
            raise unclear
        original, high = round(slope / -offset * 2 * math.pi), round(1 - 1 / offset, 3)
        rope = Rope(theta, scaling="llama3", factor=factor, original_max_position=original, high_freq_factor=high)
        if not np.allclose(plain / inv_freq(rope, head_dim, original)[0], factors, rtol=1e-5):
            raise unclear
        return {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }  # fmt: skip

    def _ends(self, vocab_size: int) -> dict[str, Any]:
        """Return the ids of special tokens, from the keys and from the texts of tokens that end a turn."""
        tokens, types = self._metadata.get("tokenizer.ggml.tokens"), self._metadata.get("tokenizer.ggml.token_type")
        if not isinstance(tokens, list):
            tokens = []
        if len(tokens) > vocab_size:
            raise ModelLoadError(
                f"{self._path}: tokenizer.ggml.tokens has {len(tokens):,} tokens, but the embedding "
                f"(token_embd.weight) has {vocab_size:,} rows: tokenizer and weights are from different models"
            )
        ids = {name: self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
        if isinstance(types, np.ndarray):
            ends += [i for i in np.flatnonzero(types == _CONTROL).tolist() if i < len(tokens) and tokens[i] in _ENDS]
        return {"bos_token_id": ids["bos"], "eos_token_id": list(dict.fromkeys(ends)) or None}

    def _refuse_the_rest(self) -> None:
        for key, value in self._metadata.items():
            name = key.removeprefix(f"{self._architecture}.")
            if name == key or name in self._used:
                continue
            harmless = _HARMLESS.get(name, ())
            if harmless is not None and not (np.ndim(value) == 0 and value in harmless):
                raise self._refused(name)

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def _get(self, name: str, default: Any) -> Any:
        value = self._metadata.get(self._key(name), default)
        if isinstance(value, np.ndarray):  # one value per layer
            if value.size == 0 or (value != value[0]).any():
                raise self._refused(name, "(only one value for all layers)")
            value = value[0].item()
        if value is None and default is None:
            return None
        self._used.add(name)
        return value

    def _integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        # The shortest number with this float32 value: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if value == np.float32(value) else float(value)

    def _wrong(self, name: str, value: Any, wanted: str) -> ModelLoadError:
        if value is None:
            return ModelLoadError(f"{self._path}: {self._key(name)} is missing: use another conversion of the model")
        return ModelLoadError(f"{self._path}: {self._key(name)}={value!r} must be {wanted}")

    def _refused(self, name: str, usual: str = "") -> ModelLoadError:
        value = self._metadata.get(self._key(name))
        shown = f"{value.tolist()[:8]}" if isinstance(value, np.ndarray) else repr(value)
        return ModelLoadError(
            f"{self._path}: {self._key(name)}={shown} is not supported by jpaged{' ' + usual if usual else ''}: "
            "use another checkpoint"
        )
