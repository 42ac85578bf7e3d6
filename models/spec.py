"""DecoderSpec: everything the one decoder needs to know about a model, and the parameter tree that follows from it.

A family (`families/`) makes a spec from a Hugging Face config. `param_shapes(spec)` is the engine's own parameter
tree: what a loader fills, what the step reads, and what a trainer may hand over to be used without a copy.
"""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np


class Norm(enum.Enum):
    """Which normalisation."""

    RMS = "rms"            # x / rms(x) * w                       (Zhang & Sennrich 2019)
    RMS_OFFSET = "offset"  # x / rms(x) * (1 + w), all in float32 (Gemma, arXiv:2403.08295)
    LAYER = "layer"        # (x - mean) / std * w + b             (Ba et al. 2016)


class Activation(enum.Enum):
    """Which non-linearity of the feed-forward layer."""

    SILU = "silu"
    GELU = "gelu"            # exact, with erf
    GELU_TANH = "gelu_tanh"  # the tanh approximation ("gelu_new", "gelu_pytorch_tanh")
    RELU = "relu"


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021), rotate-half form."""

    theta: float = 10000.0
    partial: float = 1.0      # the share of a head, from its first number on, that is turned
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn
    factor: float = 1.0
    original_max_position: int = 0     # dynamic, llama3, yarn: the length the model was trained for
    low_freq_factor: float = 1.0       # llama3
    high_freq_factor: float = 4.0      # llama3
    beta_fast: float = 32.0            # yarn
    beta_slow: float = 1.0             # yarn
    attention_factor: float | None = None  # yarn: None = from factor (or mscale)
    mscale: float | None = None        # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True              # yarn: round the correction range outward to whole dimensions


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """One decoder-only transformer. Hashable: it is a static argument of the compiled step."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int            # the longest sequence the model takes
    norm: Norm = Norm.RMS
    norm_eps: float = 1e-6
    post_norm: bool = False      # norms after the residual sum instead of before the block (OPT-350m)
    sandwich_norm: bool = False  # a second norm behind each block, before the residual sum (Gemma 2)
    final_norm: bool = True
    activation: Activation = Activation.SILU
    gated: bool = True           # act(gate) * up, else act(up)
    qkv_bias: bool = False       # one flag for q, k and v together
    o_bias: bool = False
    up_bias: bool = False        # gate and up
    down_bias: bool = False
    qk_norm: bool = False        # RMS norm of every q and k head, before rope (Qwen3)
    rope: Rope | None = None     # None: learned positions
    rope_layers: tuple[bool, ...] = ()  # which layers turn q and k; () = all (SmolLM3 leaves some out)
    position_offset: int = 0     # learned positions: row of position 0 (2 for OPT)
    sliding_window: tuple[int | None, ...] = ()  # one a layer; () = none anywhere
    attention_scale: float | None = None         # None: head_dim ** -0.5
    attention_softcap: float | None = None       # c: scores become c * tanh(scores / c)
    final_softcap: float | None = None           # the same, of the logits
    embed_scale: float = 1.0     # embeddings are multiplied by it, rounded to their dtype
    residual_scale: float = 1.0  # what a block gives is multiplied by it before the residual sum (Granite)
    logit_divisor: float = 1.0   # logits are divided by it (Granite)
    embed_size: int | None = None  # width of the embedding where it differs from hidden_size (OPT-350m: project_in/out)
    tie_embeddings: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What q.k is multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that rotary embedding turns."""
        return 0 if self.rope is None else int(self.head_dim * self.rope.partial)

    def uses_rope(self, layer: int) -> bool:
        """Whether a layer turns its queries and keys."""
        return self.rope is not None and (not self.rope_layers or self.rope_layers[layer])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of every layer."""
        return tuple(self.window(layer) for layer in range(self.num_layers))

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer: how many keys a query sees, itself included. None = all before it."""
        return self.sliding_window[layer] if self.sliding_window else None


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """How live arrays are stored where that differs from `param_shapes`: static flags, so nothing is copied."""

    split_qkv: bool = False       # layers hold "q" [heads * head_dim, in], "k" and "v" [kv_heads * head_dim, in] apart
    split_gate_up: bool = False   # layers hold "gate" and "up" [intermediate, in] apart
    transposed: frozenset[str] = frozenset()  # leaf names held [in, out]: of q, k, v, o, gate, up, down, lm_head, …


def param_shapes(spec: DecoderSpec, dtype: Any) -> dict[str, Any]:
    """The engine's own parameter tree, as ShapeDtypeStructs.

    Matrices are [out, in], one array a layer, q, k and v fused by KV head and gate and up fused, so that they split
    over heads without being rewritten. Small vectors are stacked over layers: fewer arguments (0.7 us each a call).
    """
    s = spec
    layers, hidden, kv, inter = s.num_layers, s.hidden_size, s.num_kv_heads, s.intermediate_size
    embed = s.embed_size or hidden

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    layer = {
        "qkv": leaf(kv, s.group + 2, s.head_dim, hidden),  # of each KV head: its `group` query heads, then k, then v
        "o": leaf(hidden, s.num_heads * s.head_dim),
        "down": leaf(hidden, inter),
    }
    if s.gated:
        layer["gate_up"] = leaf(2, inter, hidden)
    else:
        layer["up"] = leaf(inter, hidden)
    tree: dict[str, Any] = {
        "embed": leaf(s.vocab_size, embed),
        "layers": tuple(dict(layer) for _ in range(layers)),
        "attn_norm": leaf(layers, hidden),
        "mlp_norm": leaf(layers, hidden),
    }
    if s.sandwich_norm:
        tree |= {"attn_out_norm": leaf(layers, hidden), "mlp_out_norm": leaf(layers, hidden)}
    if s.norm is Norm.LAYER:
        tree |= {"attn_norm_bias": leaf(layers, hidden), "mlp_norm_bias": leaf(layers, hidden)}
    if s.final_norm:
        tree["final_norm"] = leaf(hidden)
        if s.norm is Norm.LAYER:
            tree["final_norm_bias"] = leaf(hidden)
    if s.qkv_bias:
        tree["qkv_bias"] = leaf(layers, kv, s.group + 2, s.head_dim)
    if s.o_bias:
        tree["o_bias"] = leaf(layers, hidden)
    if s.up_bias:
        tree["up_bias"] = leaf(layers, 2, inter) if s.gated else leaf(layers, inter)
    if s.down_bias:
        tree["down_bias"] = leaf(layers, hidden)
    if s.qk_norm:
        tree |= {"q_norm": leaf(layers, s.head_dim), "k_norm": leaf(layers, s.head_dim)}
    if s.rope is None:
        tree["pos_embed"] = leaf(s.max_position + s.position_offset, hidden)
    if embed != hidden:
        tree |= {"project_in": leaf(hidden, embed), "project_out": leaf(embed, hidden)}
    if not s.tie_embeddings:
        tree["lm_head"] = leaf(s.vocab_size, embed)
    return tree
