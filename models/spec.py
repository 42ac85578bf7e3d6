"""DecoderSpec: everything the one decoder needs to know about a model, and the parameter tree that follows from it.

A family (`families/`) makes a spec from a Hugging Face config. `param_shapes(spec)` is the engine's own parameter
tree: what a loader fills, what the step reads, and what a trainer may hand over to be used without a copy.
"""

import dataclasses
import enum
from collections.abc import Callable
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


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What attention of a layer does beside softmax(q.k) v. Static."""

    scale: float                  # what q.k is multiplied by
    window: int | None = None     # keys that a query sees, itself included
    softcap: float | None = None  # c: scores become c * tanh(scores / c)
    alibi_slopes: tuple[float, ...] | None = None  # one a query head: slope * (key - query position) is added
    v_dim: int | None = None      # latent attention: values are so many first numbers of the keys


# Leaves that are float32 in a model of any dtype. What chooses experts: rounded to bfloat16, DeepSeek-V3's correction
# sends one token in eight to other experts.
FLOAT32_LEAVES = frozenset({"router_correction"})


def leaf_dtype(name: str, dtype: Any) -> np.dtype:
    """The dtype of a leaf in a model of some dtype."""
    return np.dtype(np.float32 if name in FLOAT32_LEAVES else dtype)


class Scoring(enum.Enum):
    """How a router turns its logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # each expert by itself (DeepSeek-V3)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture of experts: feed-forward layers of which each token uses a few (arXiv:1701.06538)."""

    num: int
    per_token: int
    intermediate_size: int       # of one expert
    layers: tuple[bool, ...]     # which layers have experts; the others are dense
    scoring: Scoring = Scoring.SOFTMAX
    renormalise: bool = False    # a token's weights are made to sum to one
    scale: float = 1.0           # and are multiplied by this
    bias: bool = False           # the router and the experts have biases (gpt-oss)
    correction: bool = False     # scores get a bias for the choice, not for the weights (DeepSeek-V3)
    expert_groups: int = 1       # neighbouring experts form expert groups; a token uses experts of its best groups only
    expert_groups_per_token: int = 0  # expert groups that a token chooses from; 0 = all
    expert_group_top: int = 1    # an expert group's score is the sum of this many of its best experts' scores
    shared_size: int = 0         # width of the part that every token uses; 0 = none
    shared_gate: bool = False    # that part is weighted by a sigmoid (Qwen2-MoE)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434). The spec's one KV head is [kv_rank + rope_dim] wide."""

    q_rank: int | None           # width that queries are made from; None: from the hidden state
    kv_rank: int                 # width of what is kept of a token for keys and values
    nope_dim: int                # of a head's queries and keys: the part without rotary embedding
    rope_dim: int                # and the part with it
    v_dim: int                   # of a head's values
    interleaved: bool = True     # rotary embedding turns neighbours instead of halves


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
    shared_norm: bool = False    # both read the same norm, which puts them side by side as well (Falcon-7B)
    embed_norm: bool = False     # a norm behind the embedding (Bloom)
    final_norm: bool = True
    activation: Activation = Activation.SILU
    gated: bool = True           # act(gate) * up, else act(up)
    swiglu_limit: float | None = None  # both are clamped to it, and are combined as gpt-oss does, with this alpha
    swiglu_alpha: float = 1.702
    experts: Experts | None = None
    latent: Latent | None = None
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
    pools: bool = False          # no logits: a hidden state, after the final norm, is the result; no output matrix
    num_labels: int | None = None  # a sequence classifier: that state times a score matrix; goes with `pools`

    @property
    def output_size(self) -> int:
        """Numbers that `decoder.lm_head` gives of a hidden state."""
        if not self.pools:
            return self.vocab_size
        return self.num_labels or self.embed_size or self.hidden_size

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What q.k is multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that rotary embedding turns."""
        if self.latent is not None:
            return self.latent.rope_dim
        return 0 if self.rope is None else int(self.head_dim * self.rope.partial)

    @property
    def page_v_dim(self) -> int | None:
        """Makes the KV pages latent: values are so many first numbers of the keys. None: values have their own."""
        return None if self.latent is None else self.latent.kv_rank

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and self.experts.layers[layer]

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
        return AttentionOptions(self.scale, self.window(layer), self.attention_softcap, slopes, self.page_v_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of every layer."""
        return tuple(self.window(layer) for layer in range(self.num_layers))

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

    tree: dict[str, Any] = {
        "embed": leaf(s.vocab_size, embed),
        "layers": tuple(_layer_shapes(s, i, leaf) for i in range(layers)),
    }
    norms = {name: leaf(layers, hidden) for name in _norm_names(s)}
    if s.embed_norm:
        norms["embed_norm"] = leaf(hidden)
    if s.final_norm:
        norms["final_norm"] = leaf(hidden)
    tree |= norms
    if s.norm is Norm.LAYER:
        tree |= {f"{name}_bias": shape for name, shape in norms.items()}
    if s.qkv_bias and s.latent is None:
        tree["qkv_bias"] = leaf(layers, kv, s.q_per_kv + 2, s.head_dim)
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
    if s.latent is not None:
        tree["kv_a_norm"] = leaf(layers, s.latent.kv_rank)
        if s.qkv_bias:
            tree["kv_a_bias"] = leaf(layers, s.head_dim)
    if s.latent is not None and s.latent.q_rank is not None:
        tree["q_a_norm"] = leaf(layers, s.latent.q_rank)
        if s.qkv_bias:
            tree["q_a_bias"] = leaf(layers, s.latent.q_rank)
    if s.sinks:
        tree["sinks"] = leaf(layers, s.num_heads)
    if s.learned_positions:
        tree["pos_embed"] = leaf(s.max_position + s.position_offset, hidden)
    if embed != hidden:
        tree |= {"project_in": leaf(hidden, embed), "project_out": leaf(embed, hidden)}
    if s.num_labels is not None:
        tree["score"] = leaf(s.num_labels, embed)
    elif not (s.tie_embeddings or s.pools):
        tree["lm_head"] = leaf(s.vocab_size, embed)
    return tree


def _layer_shapes(s: DecoderSpec, layer: int, leaf: Callable[..., jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The matrices of one layer, and what its experts have beside matrices."""
    hidden, kv = s.hidden_size, s.num_kv_heads
    if s.latent is None:
        # of each KV head: its `q_per_kv` query heads, then k, then v
        tree = {"qkv": leaf(kv, s.q_per_kv + 2, s.head_dim, hidden), "o": leaf(hidden, s.num_heads * s.head_dim)}
    else:
        m = s.latent
        tree = {
            "kv_a": leaf(m.kv_rank + m.rope_dim, hidden),
            "kv_b": leaf(s.num_heads, m.nope_dim + m.v_dim, m.kv_rank),  # of each head: keys, then values
            "o": leaf(hidden, s.num_heads * m.v_dim),
        }
        tree["q_b"] = leaf(s.num_heads, m.nope_dim + m.rope_dim, m.q_rank or hidden)
        if m.q_rank is not None:
            tree["q_a"] = leaf(m.q_rank, hidden)
    if s.experts is not None and s.is_sparse(layer):
        return tree | _expert_shapes(s.experts, hidden, leaf)
    tree["down"] = leaf(hidden, s.intermediate_size)
    if s.gated:
        tree["gate_up"] = leaf(2, s.intermediate_size, hidden)
    else:
        tree["up"] = leaf(s.intermediate_size, hidden)
    return tree


def _expert_shapes(e: Experts, hidden: int, leaf: Callable[..., jax.ShapeDtypeStruct]) -> dict[str, Any]:
    tree = {
        "router": leaf(e.num, hidden),
        "expert_gate_up": leaf(e.num, 2, e.intermediate_size, hidden),
        "expert_down": leaf(e.num, hidden, e.intermediate_size),
    }
    if e.bias:
        tree |= {
            "router_bias": leaf(e.num),
            "expert_gate_up_bias": leaf(e.num, 2, e.intermediate_size),
            "expert_down_bias": leaf(e.num, hidden),
        }
    if e.correction:
        tree["router_correction"] = jax.ShapeDtypeStruct((e.num,), leaf_dtype("router_correction", np.float32))
    if e.shared_size:
        tree |= {"shared_gate_up": leaf(2, e.shared_size, hidden), "shared_down": leaf(hidden, e.shared_size)}
        if e.shared_gate:
            tree["shared_gate"] = leaf(1, hidden)
    return tree


def _norm_names(s: DecoderSpec) -> list[str]:
    """The norms of a layer."""
    names = []
    if s.norm_place is not NormPlace.OUTPUT:
        names += ["attn_norm"] if s.shared_norm else ["attn_norm", "mlp_norm"]
    if s.norm_place in (NormPlace.SANDWICH, NormPlace.OUTPUT):
        names += ["attn_out_norm", "mlp_out_norm"]
    return names
