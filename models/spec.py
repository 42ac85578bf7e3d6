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


class NormPlace(enum.Enum):
    """Where the norms of a layer stand, f being attention or the feed-forward layer."""

    PRE = "pre"            # x + f(norm(x))
    POST = "post"          # norm(x + f(x))        (OPT-350m)
    SANDWICH = "sandwich"  # x + norm(f(norm(x)))  (Gemma 2)
    OUTPUT = "output"      # x + norm(f(x))        (OLMo 2)


class QKNorm(enum.Enum):
    """Over what queries and keys are normalised (RMS) before rope."""

    HEAD = "head"              # each head by itself, all with the same gains  (Qwen 3)
    PROJECTION = "projection"  # all heads of a token together                 (OLMo 2)


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
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope
    factor: float = 1.0
    original_max_position: int = 0     # dynamic, llama3, yarn, longrope: the length the model was trained for
    low_freq_factor: float = 1.0       # llama3
    high_freq_factor: float = 4.0      # llama3
    beta_fast: float = 32.0            # yarn
    beta_slow: float = 1.0             # yarn
    attention_factor: float | None = None  # yarn, longrope: None = from factor (or mscale)
    mscale: float | None = None        # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True              # yarn: round the correction range outward to whole dimensions
    short_factor: tuple[float, ...] = ()   # longrope: what each frequency is divided by within the trained length
    long_factor: tuple[float, ...] = ()    # longrope: the same for sequences that are longer

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's angles depend on how long its sequence is, not on its position alone."""
        return self.scaling in ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What attention of a layer does beside softmax(q.k) v. Static."""

    scale: float                  # what q.k is multiplied by
    window: int | None = None     # keys that a query sees, itself included
    softcap: float | None = None  # c: scores become c * tanh(scores / c)
    alibi_slopes: tuple[float, ...] | None = None  # one a query head: slope * (key - query position) is added


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
    norm_place: NormPlace = NormPlace.PRE
    parallel_residual: bool = False  # x + attention(norm(x)) + feed-forward(norm(x))  (GPT-NeoX)
    shared_norm: bool = False    # then both read the same norm (Falcon-7B)
    embed_norm: bool = False     # a norm behind the embedding (Bloom)
    final_norm: bool = True
    activation: Activation = Activation.SILU
    gated: bool = True           # act(gate) * up, else act(up)
    qkv_bias: bool = False       # one flag for q, k and v together
    o_bias: bool = False
    up_bias: bool = False        # gate and up
    down_bias: bool = False
    qk_norm: QKNorm | None = None
    rope: Rope | None = None     # without rope and alibi: learned positions
    rope_layers: tuple[bool, ...] = ()  # which layers turn q and k; () = all (SmolLM3 leaves some out)
    window_rope: Rope | None = None     # rope of the layers with a window, where it is another (Gemma 3)
    alibi: float | None = None   # scores are biased by distance, the paper's slopes times this (arXiv:2108.12409)
    position_offset: int = 0     # learned positions: row of position 0 (2 for OPT)
    sliding_window: tuple[int | None, ...] = ()  # one a layer; () = none anywhere
    attention_scale: float | None = None         # None: head_dim ** -0.5
    attention_softcap: float | None = None       # c: scores become c * tanh(scores / c)
    sinks: bool = False          # one learned logit a head joins the softmax's sum (gpt-oss)
    final_softcap: float | None = None           # as attention_softcap, of the logits
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

    @property
    def learned_positions(self) -> bool:
        """Whether a position has an embedding of its own."""
        return self.rope is None and self.alibi is None

    def layer_rope(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer; None where it does not turn its queries and keys."""
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        return self.window_rope if self.window_rope is not None and self.window(layer) is not None else self.rope

    def attention(self, layer: int) -> AttentionOptions:
        """What attention of a layer does."""
        slopes = None if self.alibi is None else alibi_slopes(self.num_heads, self.alibi)
        return AttentionOptions(self.scale, self.window(layer), self.attention_softcap, slopes)

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer: how many keys a query sees, itself included. None = all before it."""
        return self.sliding_window[layer] if self.sliding_window else None


def alibi_slopes(num_heads: int, factor: float = 1.0) -> tuple[float, ...]:
    """One slope a head, times `factor` (arXiv:2108.12409, section 3).

    With 2^n heads 2 ** (-8 i / 2^n), i from 1; with more, every other slope of twice as many heads follows.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return tuple(slope * factor for slope in slopes)


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
    }
    norms = {name: leaf(layers, hidden) for name in _norm_names(s)}
    if s.embed_norm:
        norms["embed_norm"] = leaf(hidden)
    if s.final_norm:
        norms["final_norm"] = leaf(hidden)
    tree |= norms
    if s.norm is Norm.LAYER:
        tree |= {f"{name}_bias": shape for name, shape in norms.items()}
    if s.qkv_bias:
        tree["qkv_bias"] = leaf(layers, kv, s.group + 2, s.head_dim)
    if s.o_bias:
        tree["o_bias"] = leaf(layers, hidden)
    if s.up_bias:
        tree["up_bias"] = leaf(layers, 2, inter) if s.gated else leaf(layers, inter)
    if s.down_bias:
        tree["down_bias"] = leaf(layers, hidden)
    if s.qk_norm is QKNorm.HEAD:
        tree |= {"q_norm": leaf(layers, s.head_dim), "k_norm": leaf(layers, s.head_dim)}
    if s.qk_norm is QKNorm.PROJECTION:
        tree |= {"q_norm": leaf(layers, s.num_heads * s.head_dim), "k_norm": leaf(layers, kv * s.head_dim)}
    if s.sinks:
        tree["sinks"] = leaf(layers, s.num_heads)
    if s.learned_positions:
        tree["pos_embed"] = leaf(s.max_position + s.position_offset, hidden)
    if embed != hidden:
        tree |= {"project_in": leaf(hidden, embed), "project_out": leaf(embed, hidden)}
    if not s.tie_embeddings:
        tree["lm_head"] = leaf(s.vocab_size, embed)
    return tree


def _norm_names(s: DecoderSpec) -> list[str]:
    """The norms of a layer."""
    names = []
    if s.norm_place is not NormPlace.OUTPUT:
        names += ["attn_norm"] if s.shared_norm else ["attn_norm", "mlp_norm"]
    if s.norm_place in (NormPlace.SANDWICH, NormPlace.OUTPUT):
        names += ["attn_out_norm", "mlp_out_norm"]
    return names
