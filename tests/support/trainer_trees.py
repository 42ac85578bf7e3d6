"""Trees with the names that JAX trainers give to a checkpoint's tensors, made of a small checkpoint.

Each function follows the trainer's own converter from Hugging Face: google/tunix (tunix/models/*/params*.py),
AI-Hypercomputer/maxtext (checkpoint_conversion/utils/param_mapping.py), erfanzar/EasyDeL (names of modules), and
google-deepmind/gemma. They share nothing with the tables under test.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

Tensors = Mapping[str, np.ndarray]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dictionaries, from names with dots. Arrays become JAX arrays."""
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *path, last = name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = jnp.array(array)
    return tree


class Checkpoint:
    """Tensors of a checkpoint by Hugging Face's names, and sizes of its config."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors):
        self.tensors, self.config = dict(tensors), config
        self.heads, self.hidden = config["num_attention_heads"], config["hidden_size"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.layers = config["num_hidden_layers"]
        self.head_dim = self("model.layers.0.self_attn.q_proj.weight").shape[0] // self.heads
        self.is_gemma = config["model_type"].startswith("gemma")
        self.has_sandwich = "model.layers.0.pre_feedforward_layernorm.weight" in tensors

    def __call__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def layer(self, i: int, name: str) -> np.ndarray | None:
        return self.tensors.get(f"model.layers.{i}.{name}")

    def dnh(self, i: int, name: str) -> np.ndarray:
        """q_proj, k_proj or v_proj as [in, heads, head_dim]."""
        weight = self(f"model.layers.{i}.self_attn.{name}_proj.weight")
        return weight.T.reshape(self.hidden, -1, self.head_dim)

    def nhd(self, i: int) -> np.ndarray:
        """o_proj as [heads, head_dim, out]."""
        return self(f"model.layers.{i}.self_attn.o_proj.weight").T.reshape(self.heads, self.head_dim, -1)


def easydel(c: Checkpoint) -> dict[str, Any]:
    """EasyDeL: nnx, kernels [in, out], a norm's weights are its kernel."""
    flat = {}
    for name, array in c.tensors.items():
        if not name.endswith((".weight", ".bias")):  # a parameter of the layer itself
            flat[name] = array
            continue
        end = "embedding" if "embed_tokens" in name else "bias" if name.endswith(".bias") else "kernel"
        flat[f"{name.rpartition('.')[0]}.{end}"] = array.T if array.ndim == 2 and end == "kernel" else array
    return nested(flat)


def hugging_face(c: Checkpoint) -> dict[str, Any]:
    """The checkpoint's own names, and matrices [out, in]."""
    return nested(c.tensors)


def linen(c: Checkpoint) -> dict[str, Any]:
    """Transformers' former Flax classes: linen, kernels [in, out], a norm's weights are its weight."""
    flat = {}
    for name, array in c.tensors.items():
        end = "embedding" if "embed_tokens" in name else "kernel" if array.ndim == 2 else name.rpartition(".")[2]
        flat[f"params.{name.rpartition('.')[0]}.{end}"] = array.T if end == "kernel" else array
    return nested(flat)


def linen_scanned(c: Checkpoint) -> dict[str, Any]:
    """`linen` with `nn.scan` over layers: one array for all of them, layers first."""
    flat: dict[str, Any] = {}
    for name, array in c.tensors.items():
        end = "embedding" if "embed_tokens" in name else "kernel" if array.ndim == 2 else name.rpartition(".")[2]
        value, path = array.T if end == "kernel" else array, name.rpartition(".")[0]
        if ".layers." in path:
            before, _, after = path.partition(".layers.")
            flat.setdefault(f"params.{before}.layers.{after.partition('.')[2]}.{end}", []).append(value)
        else:
            flat[f"params.{path}.{end}"] = value
    return nested({name: np.stack(value) if isinstance(value, list) else value for name, value in flat.items()})


def _gemma_attention(c: Checkpoint, i: int) -> dict[str, Any]:
    q, k, v = (c.dnh(i, name).transpose(1, 0, 2) for name in "qkv")
    flat = {"attn.attn_vec_einsum.w": c.nhd(i)}
    if c.heads == c.kv_heads:
        flat["attn.qkv_einsum.w"] = np.stack([q, k, v])
    else:
        flat |= {"attn.q_einsum.w": q, "attn.kv_einsum.w": np.stack([k, v])}
    flat["pre_attention_norm.scale"] = c.layer(i, "input_layernorm.weight")
    if c.has_sandwich:
        flat["pre_ffw_norm.scale"] = c.layer(i, "pre_feedforward_layernorm.weight")
        flat["post_ffw_norm.scale"] = c.layer(i, "post_feedforward_layernorm.weight")
    else:
        flat["pre_ffw_norm.scale"] = c.layer(i, "post_attention_layernorm.weight")
    for hugging_face, own in (("q_norm", "_query_norm"), ("k_norm", "_key_norm")):
        if (norm := c.layer(i, f"self_attn.{hugging_face}.weight")) is not None:
            flat[f"attn.{own}.scale"] = norm
    return flat


def tunix(c: Checkpoint) -> dict[str, Any]:
    """tunix: nnx. Its Gemmas have Gemma's names of attention."""
    flat: dict[str, Any] = {"embedder.input_embedding": c("model.embed_tokens.weight")}
    flat["final_norm.scale" if c.is_gemma else "final_norm.w"] = c("model.norm.weight")
    if "lm_head.weight" in c.tensors and not c.is_gemma:
        flat["lm_head.w"] = c("lm_head.weight").T
    for i in range(c.layers):
        of_layer = {f"mlp.{name}.kernel": c(f"model.layers.{i}.mlp.{name}.weight").T for name in _MLP}
        if c.is_gemma:
            of_layer |= _gemma_attention(c, i)
            if c.has_sandwich:  # Gemma 2 says post_attn_norm, Gemma 3 post_attention_norm
                name = "post_attention_norm" if "attn._query_norm.scale" in of_layer else "post_attn_norm"
                of_layer[f"{name}.scale"] = c.layer(i, "post_attention_layernorm.weight")
        else:
            of_layer |= {f"attn.{name}_proj.w": c.dnh(i, name) for name in "qkv"} | {"attn.o_proj.w": c.nhd(i)}
            for name in ("input_layernorm", "post_attention_layernorm"):
                of_layer[f"{name}.w"] = c.layer(i, f"{name}.weight")
            for name in "qk":
                if (norm := c.layer(i, f"self_attn.{name}_norm.weight")) is not None:
                    of_layer[f"attn.{name}_norm.w"] = norm
            for name in "qkv":
                if (bias := c.layer(i, f"self_attn.{name}_proj.bias")) is not None:
                    of_layer[f"attn.{name}_bias"] = bias
        flat |= {f"layers.{i}.{name}": array for name, array in of_layer.items()}
    return nested(flat)


def gemma_linen(c: Checkpoint, *, turned: bool = False) -> dict[str, Any]:
    """Gemma's own tree. turned: gating_einsum is [2, in, intermediate] (`transpose_gating_einsum=False`)."""
    flat: dict[str, Any] = {
        "transformer.embedder.input_embedding": c("model.embed_tokens.weight"),
        "transformer.final_norm.scale": c("model.norm.weight"),
    }
    for i in range(c.layers):
        gating = np.stack([c(f"model.layers.{i}.mlp.{name}.weight") for name in ("gate_proj", "up_proj")])
        of_layer = _gemma_attention(c, i) | {
            "mlp.gating_einsum": gating.swapaxes(1, 2) if turned else gating,
            "mlp.linear": c(f"model.layers.{i}.mlp.down_proj.weight").T,
        }
        if c.has_sandwich:
            of_layer["post_attention_norm.scale"] = c.layer(i, "post_attention_layernorm.weight")
        flat |= {f"transformer.layer_{i}.{name}": array for name, array in of_layer.items()}
    return nested(flat)


def maxtext(c: Checkpoint, *, scanned: bool = False, padding: int = 0) -> dict[str, Any]:
    """MaxText. scanned: layers are stacked along axis 1. padding: rows at the end of the embedding."""
    add = np.float32(1 if c.is_gemma else 0)
    embed = c("model.embed_tokens.weight") * np.float32(c.hidden**0.5 if c.is_gemma else 1)
    flat: dict[str, Any] = {
        "params.token_embedder.embedding": np.pad(embed, ((0, padding), (0, 0))),
        "params.decoder.decoder_norm.scale": c("model.norm.weight") + add,
    }
    if "lm_head.weight" in c.tensors and not c.is_gemma:
        flat["params.decoder.logits_dense.kernel"] = c("lm_head.weight").T
    stacks: dict[str, list[np.ndarray]] = {}
    for i in range(c.layers):
        before, end, is_stacked = _maxtext_place(c, i, scanned=scanned)
        for name, array in _maxtext_layer(c, i).items():
            module, _, leaf = name.partition(".")
            full = f"params.decoder.{before}.{module}{end}.{leaf}"
            if is_stacked:
                stacks.setdefault(full, []).append(array)
            else:
                flat[full] = array
    return nested(flat | {name: np.stack(arrays, axis=1) for name, arrays in stacks.items()})


def _maxtext_place(c: Checkpoint, i: int, *, scanned: bool) -> tuple[str, str, bool]:
    """Where MaxText has a layer: the beginning of its names, the end of its modules' names, and if it is stacked."""
    kind = c.config["model_type"]
    if kind == "gemma2":
        end = "_global" if i % 2 else "_local"
        return ("layers", end, True) if scanned else (f"layers_{i // 2}", end, False)
    if kind == "gemma3_text" and scanned:
        beyond = i - (c.layers - c.layers % 6)
        return (f"layers_remainder.layers_{beyond}", "", False) if beyond >= 0 else (f"layers.layers_{i % 6}", "", True)
    return ("layers", "", True) if scanned else (f"layers_{i}", "", False)


def _maxtext_layer(c: Checkpoint, i: int) -> dict[str, np.ndarray]:
    kind = c.config["model_type"]
    q, k, v = (c.dnh(i, name) for name in "qkv")
    if kind in ("llama", "gemma", "gemma2"):
        scale = c.config.get("query_pre_attn_scalar", 256 if kind == "gemma2" else c.head_dim)
        q = q * np.float32(scale**-0.5)
    if (c.config.get("rope_parameters") or c.config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        q, k = (np.stack(np.split(a, 2, axis=-1), axis=-1).reshape(a.shape) for a in (q, k))
    add = np.float32(1 if c.is_gemma else 0)
    layer = {
        "self_attention.query.kernel": q, "self_attention.key.kernel": k, "self_attention.value.kernel": v,
        "self_attention.out.kernel": c.nhd(i),
    }  # fmt: skip
    for own, name in zip(("wi_0", "wi_1", "wo"), _MLP, strict=True):
        layer[f"mlp.{own}.kernel"] = c(f"model.layers.{i}.mlp.{name}.weight").T
    if c.has_sandwich:
        norms = _MAXTEXT_SANDWICH
    elif c.is_gemma:
        norms = {"pre_self_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}
    else:
        norms = {
            "pre_self_attention_layer_norm": "input_layernorm",
            "post_self_attention_layer_norm": "post_attention_layernorm",
        }
    norms = norms | {"self_attention.query_norm": "self_attn.q_norm", "self_attention.key_norm": "self_attn.k_norm"}
    for own, name in norms.items():
        if (norm := c.layer(i, f"{name}.weight")) is not None:
            layer[f"{own}.scale"] = norm + add
    for own, name in (("query", "q"), ("key", "k"), ("value", "v")):
        if (bias := c.layer(i, f"self_attn.{name}_proj.bias")) is not None:
            layer[f"self_attention.{own}.bias"] = bias.reshape(-1, c.head_dim)
    return layer


_MLP = ("gate_proj", "up_proj", "down_proj")
_MAXTEXT_SANDWICH = {
    "pre_self_attention_norm": "input_layernorm", "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


def nnx_module(values: Any) -> Any:
    """An nnx module with the names of a tree."""
    from flax import nnx

    if not isinstance(values, dict):
        return nnx.Param(values)
    if values.keys() == {str(i) for i in range(len(values))}:
        return nnx.List([nnx_module(values[str(i)]) for i in range(len(values))])
    made = nnx.Module()
    for name, value in values.items():
        setattr(made, name, nnx_module(value))
    return made
