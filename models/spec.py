"""DecoderSpec: the description of a model for the decoder, and the shapes of the model's parameters.

A family (`families/`) builds a spec from a Hugging Face config. `param_shapes(spec)` is the engine's parameter tree.
Loaders fill this tree, and compiled steps read it. A trainer can pass its own arrays in this tree without a copy.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

from jpaged.models.compressed_spec import Compressed, HyperConnections
from jpaged.models.latent_spec import Indexer, Latent
from jpaged.models.recurrent_spec import Recurrence

# The tree of `param_shapes`: leaves by name, and under "layers" a tuple with a dict of leaves per layer. Leaves are
# jax.Array, np.ndarray or ShapeDtypeStruct, so the value type is Any.
Params: TypeAlias = dict[str, Any]


class Norm(enum.Enum):
    """Kind of normalisation."""

    RMS = "rms"            # x / rms(x) * w                       (Zhang & Sennrich 2019)
    RMS_OFFSET = "offset"  # x / rms(x) * (1 + w), all in float32 (Gemma, arXiv:2403.08295)
    LAYER = "layer"        # (x - mean) / std * w + b             (Ba et al. 2016)


class NormPosition(enum.Enum):
    """Position of the norms in a layer. f is attention or the feed-forward network."""

    PRE = "pre"            # x + f(norm(x))
    POST = "post"          # norm(x + f(x))        (OPT-350m)
    SANDWICH = "sandwich"  # x + norm(f(norm(x)))  (Gemma 2)
    OUTPUT = "output"      # x + norm(f(x))        (OLMo 2)


class QKNorm(enum.Enum):
    """RMS norm of queries and keys, applied before rope, or after it."""

    HEAD = "head"              # over each head; all heads share one weight vector  (Qwen 3)
    ROTATED = "rotated"        # as HEAD, but after rope                            (Hunyuan)
    PROJECTION = "projection"  # over all heads of a token together                 (OLMo 2)


class Activation(enum.Enum):
    """Activation function of the feed-forward network."""

    SILU = "silu"
    GELU = "gelu"            # exact, with erf
    GELU_TANH = "gelu_tanh"  # the tanh approximation ("gelu_new", "gelu_pytorch_tanh")
    RELU = "relu"
    RELU2 = "relu2"          # relu(x) squared (arXiv:2109.08668; Arcee, Nemotron-H)
    TANH = "tanh"            # only of the layer before an encoder's score matrix
    XIELU = "xielu"          # with four numbers per layer, the leaf "xielu": see `layers.xielu` (Apertus)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021), rotate-half form."""

    theta: float = 10000.0
    partial: float = 1.0      # rotated share of each head, from its first dimension
    # default | linear | dynamic | llama3 | yarn | longrope | proportional: pairs are (i, i + half) of the whole head,
    # and only the first `partial` of the pairs rotate (Gemma 4)
    scaling: str = "default"
    factor: float = 1.0
    original_max_position: int = 0     # dynamic, llama3, yarn, longrope: trained length, in tokens
    low_freq_factor: float = 1.0       # llama3
    high_freq_factor: float = 4.0      # llama3
    beta_fast: float = 32.0            # yarn
    beta_slow: float = 1.0             # yarn
    attention_factor: float | None = None  # yarn, longrope; None: computed from factor (or mscale)
    mscale: float | None = None        # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True              # yarn: round the correction range outward to whole dimensions
    short_factor: tuple[float, ...] = ()   # longrope: divisors of the frequencies, up to the trained length
    long_factor: tuple[float, ...] = ()    # longrope: divisors for longer sequences


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Static options of one layer's attention."""

    scale: float                  # factor of q.k
    window: int | None = None     # number of keys that a query sees, its own included
    softcap: float | None = None  # c: scores become c * tanh(scores / c)
    alibi_slopes: tuple[float, ...] | None = None  # one per query head: slope * (key - query position) is added
    v_dim: int | None = None      # latent attention: values are the first v_dim elements of the keys
    chunk: int | None = None      # c: a query at position p sees the keys from position p // c * c
    kv_heads: int | None = None   # KV heads of the layer if layers differ; its pages are a part of larger ones
    keeps_kv: bool = False        # later layers read this layer's keys and values


Mixer: TypeAlias = AttentionOptions | Recurrence  # static options of what mixes a layer's tokens


@dataclasses.dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position p: they are multiplied by 1 + beta * log(1 + floor((p + first) / length)).

    Published models keep the softmax from flattening over long sequences this way (Llama 4, Ministral 3).
    """

    beta: float
    length: int               # in tokens; the factor is 1 up to it
    first: int = 0            # number of the first position
    layers: tuple[bool, ...] = ()  # per layer: True = its queries grow; () = all layers

    def applies(self, layer: int) -> bool:
        """True if the layer's queries grow."""
        return not self.layers or self.layers[layer]


# Leaves that are float32 in models of any dtype. `router_correction` affects the choice of experts: in bfloat16,
# DeepSeek-V3's would send one token in eight to other experts. Most of the others are exponents of a state's decay.
FLOAT32_LEAVES = frozenset({
    "router_correction", "delta_a_log", "delta_dt_bias", "mamba_a_log", "mamba_dt_bias", "mamba_d", "entry_bias",
    "index_bias", "hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale",
    "hc_head_fn", "hc_head_base", "hc_head_scale",
})  # fmt: skip
HASHED = "router_table"  # int32 leaf [vocab_size, per_token]: the experts of each token id (DeepSeek V4)


def leaf_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    """dtype of the leaf `name` in a model of dtype `dtype`."""
    if name == HASHED:
        return np.dtype(np.int32)
    return np.dtype(np.float32 if name in FLOAT32_LEAVES else dtype)


class Scoring(enum.Enum):
    """Function that turns a router's logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # (DeepSeek-V3)
    SQRT_SOFTPLUS = "sqrtsoftplus"  # sqrt(log(1 + exp(x))) (DeepSeek V4)
    # Each choice has its own softmax, over the experts that are left and nearly as good (arXiv:2310.00811; Phi-3.5-MoE)
    SPARSE_MIXER = "sparse_mixer"


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture of experts (arXiv:1701.06538): each token uses a few of `num` feed-forward networks."""

    num: int
    per_token: int
    intermediate_size: int       # of one expert
    layers: tuple[bool, ...]     # per layer: True = it has experts, False = a dense feed-forward network
    scoring: Scoring = Scoring.SOFTMAX
    renormalise: bool = False    # divide the weights of a token's experts by their sum + weight_offset
    weight_offset: float = 1e-20
    scale: float = 1.0           # factor of the weights, after renormalisation
    bias: bool = False           # the router and the experts have biases (gpt-oss)
    correction: bool = False     # a bias is added to the scores to choose experts, but not to weigh them (DeepSeek-V3)
    expert_groups: int = 1       # number of expert groups, each of neighbouring experts
    expert_groups_per_token: int = 0  # number of best expert groups that a token chooses experts from; 0 = all
    expert_group_top: int = 1    # an expert group's score is the sum of its `expert_group_top` best scores
    shared_size: int = 0         # width of the shared expert, which every token uses; 0 = none
    shared_gate: bool = False    # the shared expert's output is multiplied by a sigmoid gate (Qwen2-MoE)
    weigh_inputs: bool = False   # weights multiply the experts' inputs, not their outputs (Llama 4)
    softcap: float | None = None  # c: the router's logits become c * tanh(logits / c) (Laguna)
    latent_size: int | None = None  # width that hidden states are compressed to for the experts (Nemotron 3); None: no
    jitter: float = 0.0          # SPARSE_MIXER: experts further than 2 * jitter from the best are left out
    # A dense feed-forward network is next to the experts, and both have norms of their own. The router has a norm, and
    # a factor for each expert (Gemma 4)
    beside_dense: bool = False
    hashed: tuple[bool, ...] = ()  # per layer: True = a token's id chooses its experts; () = no layer (DeepSeek V4)


@dataclasses.dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer, where layers differ (Gemma 3n, Gemma 4)."""

    heads: int
    head_dim: int                  # of queries, keys and values
    values_are_keys: bool = False  # no value projection: values are the projected keys, before norm and rope
    source: int | None = None      # earlier layer with the keys and values that this layer reads; None: it has its own


@dataclasses.dataclass(frozen=True)
class LayerEmbedding:
    """Per-layer embeddings (Gemma 3n): each token has a vector for each layer, which is added through a gate.

    The vector is the mean of an embedding of the token, and of a projection of the first layer's input.
    """

    size: int        # of a layer's vector
    vocab_size: int  # rows of the embedding


@dataclasses.dataclass(frozen=True)
class AltUp:
    """Alternating updates (arXiv:2301.13310): several streams of hidden states, and one passes through each layer."""

    streams: int
    active: int = 0          # stream that passes through the layers
    scales: bool = True      # the stream that gates the per-layer embedding has a learned factor


class TextPooling(enum.Enum):
    """How the hidden states of a text become one vector. Values are Sentence Transformers' names."""

    MEAN = "mean"       # of all tokens
    CLS = "cls"         # the first token
    LAST = "lasttoken"


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A bidirectional encoder (BERT, arXiv:1810.04805): each token sees all tokens of its text. It samples nothing.

    A spec with an encoder has no KV, `pools`, and a `sliding_window` of 2n + 1 keys: n on each side of the query.
    """

    pooling: TextPooling = TextPooling.MEAN
    max_length: int | None = None    # tokens of the longest text that it was trained with; None: `max_position`
    token_types: int = 0             # rows of the token-type embedding; 0: there is none
    head: Activation | None = None   # a dense layer before the score matrix, with this activation; None: no layer
    head_bias: bool = False
    head_norm: bool = False          # a norm after the activation (ModernBERT)
    score_bias: bool = False


@dataclasses.dataclass(frozen=True)
class Stage:
    """A pipeline stage: layers with their own devices (`jpaged.models.stages`). Static: a part of compiled programs."""

    index: int = 0
    count: int = 1                # stages of the model
    first_layer: int = 0
    num_layers: int | None = None  # None: all

    @property
    def is_first(self) -> bool:
        """True if the stage embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if the stage has the `lm_head`."""
        return self.index == self.count - 1

    @property
    def layers(self) -> range:
        """Indices of the layers. Only with several stages."""
        assert self.num_layers is not None
        return range(self.first_layer, self.first_layer + self.num_layers)


ALONE = Stage()  # the only stage


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer, or an encoder. Hashable, because it is a static argument of compiled programs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int            # longest sequence that the model supports, in tokens
    norm: Norm = Norm.RMS
    norm_eps: float = 1e-6
    norm_position: NormPosition = NormPosition.PRE
    parallel_residual: bool = False  # x + attention(norm(x)) + feed_forward(norm(x))  (GPT-NeoX)
    shared_norm: bool = False    # parallel_residual with one norm for both (Falcon-7B)
    embed_norm: bool = False     # a norm after the embedding (Bloom)
    first_norm: bool = True      # False: no norm before the first layer's attention (ModernBERT)
    final_norm: bool = True
    activation: Activation = Activation.SILU
    gated: bool = True           # act(gate) * up, else act(up)
    swiglu_limit: float | None = None  # limit of gate and up in gpt-oss's activation; see `layers.gate`
    swiglu_alpha: float | None = 1.702  # slope of the sigmoid there; None: SiLU, and no 1 is added (DeepSeek V4)
    experts: Experts | None = None
    latent: Latent | None = None
    recurrence: Recurrence | None = None  # layers with a state of fixed size per request (Qwen3.5, LFM2, Nemotron-H)
    # Per layer: True = it has attention, next to its recurrence if it has one; () = all layers without a recurrence
    attention_layers: tuple[bool, ...] = ()
    # One block a layer: True = a feed-forward network, False = attention or a recurrence (Nemotron-H); () = each layer
    # has both
    lone_feed_forward: tuple[bool, ...] = ()
    attention_gate: bool = False  # the output of attention times sigmoid(gate), before the o projection (Qwen3-Next)
    qkv_bias: bool = False       # of q, k and v
    o_bias: bool = False
    up_bias: bool = False        # of gate and up
    down_bias: bool = False
    qk_norm: QKNorm | None = None
    rope: Rope | None = None     # a model with neither rope nor alibi has learned positions
    rope_layers: tuple[bool, ...] = ()  # per layer: True = q and k are rotated; () = all layers (SmolLM3 has both)
    window_rope: Rope | None = None     # rope of the layers with a sliding window, if it differs (Gemma 3)
    alibi: float | None = None   # ALiBi (arXiv:2108.12409): factor of the paper's slopes
    position_offset: int = 0     # learned positions: row of position 0 (2 for OPT)
    sliding_window: tuple[int | None, ...] = ()  # one per layer; () = none in any layer
    attention_scale: float | None = None         # None: head_dim ** -0.5
    query_scaling: QueryScaling | None = None    # queries grow with their position (Llama 4)
    attention_softcap: float | None = None       # c: scores become c * tanh(scores / c)
    # Chunk of each layer, in tokens: a query sees the keys of its own chunk only; () = none in any layer (Llama 4)
    attention_chunks: tuple[int | None, ...] = ()
    heads_by_layer: tuple[int, ...] = ()  # query heads of each layer, at most num_heads; () = num_heads (Laguna)
    qk_norm_layers: tuple[bool, ...] = ()  # per layer: True = `qk_norm` applies; () = all layers (Llama 4)
    layer_kv: tuple[LayerKV, ...] = ()  # KV of each layer; () = num_kv_heads of head_dim in all layers (Gemma 4)
    v_norm: bool = False         # RMS norm of each value head, without weights (Gemma 4)
    intermediate_sizes: tuple[int, ...] = ()  # width of each layer's feed-forward network; () = intermediate_size
    layer_embed: LayerEmbedding | None = None
    altup: AltUp | None = None   # (Gemma 3n)
    hyper: HyperConnections | None = None  # (DeepSeek V4)
    laurel_rank: int = 0         # rank of a matrix next to attention, with its own residual (LAuReL, arXiv:2411.07501)
    # per layer: share of the gates that are cut off, if they were normally distributed; () = none (Gemma 3n)
    activation_sparsity: tuple[float, ...] = ()
    layer_scalars: bool = False  # each layer's output is multiplied by a learned number (Gemma 4)
    # Attention's output is multiplied by softplus(gate): gates per head, 1 or head_dim; 0 = no gate (Laguna)
    output_gates: int = 0
    sinks: bool = False          # attention sinks: one learned logit per head joins the softmax's sum (gpt-oss)
    final_softcap: float | None = None           # c: logits become c * tanh(logits / c)
    embed_scale: float = 1.0     # factor of the embeddings, rounded to their dtype
    gate_scale: float = 1.0      # factor of the gate before its activation (Falcon-H1, as the two below)
    feed_forward_scale: float = 1.0   # factor of the feed-forward network's output
    attention_out_scale: float = 1.0  # factor of attention's output, after the o projection
    residual_scale: float = 1.0  # factor of a block's output before the residual sum (Granite)
    logit_divisor: float = 1.0   # logits are divided by this (Granite)
    embed_size: int | None = None  # width of the embedding if it differs from hidden_size (OPT-350m: project_in/out)
    tie_embeddings: bool = False
    lm_head_bias: bool = False   # (Phi-3.5-MoE)
    pools: bool = False          # returns hidden states after the final norm, not logits, and has no lm_head
    num_labels: int | None = None  # sequence classifier: labels of the score matrix, which follows the final norm
    encoder: Encoder | None = None  # None: a decoder, with causal attention over KV pages

    @property
    def output_size(self) -> int:
        """Width of the output of `decoder.lm_head`."""
        if not self.pools:
            return self.vocab_size
        return self.num_labels or self.embed_size or self.hidden_size

    @property
    def q_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_heads(self) -> int:
        """Heads of the fused qkv leaf per KV head: gates if there are any, queries, one key head and one value head."""
        return self.q_per_kv * (1 + self.attention_gate) + 2

    @property
    def scale(self) -> float:
        """Factor of q.k."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def rope_dim(self, rope: Rope) -> int:
        """Number of dimensions per head that a rope of the model rotates."""
        if rope.scaling == "proportional":
            return self.head_dim
        rotating = self.latent or self.compressed
        return int(self.head_dim * rope.partial) if rotating is None else rotating.rope_dim

    def of_layer(self, layer: int) -> "DecoderSpec":
        """The spec with this layer's heads, norms and widths; itself if all layers are alike.

        Its `layer_kv` and `activation_sparsity` have one entry, the layer's own.
        """
        if not (self.heads_by_layer or self.qk_norm_layers or self.layer_kv or self.intermediate_sizes):
            return self
        has_norm = not self.qk_norm_layers or self.qk_norm_layers[layer]
        kv = self.kv_of(layer)
        return dataclasses.replace(
            self, num_heads=self.heads_by_layer[layer] if self.heads_by_layer else self.num_heads, heads_by_layer=(),
            qk_norm=self.qk_norm if has_norm else None, qk_norm_layers=(), attention_scale=self.scale,
            num_kv_heads=kv.heads, head_dim=kv.head_dim, layer_kv=(kv,) if self.layer_kv else (),
            intermediate_size=self.width(layer), intermediate_sizes=(),
            activation_sparsity=self.activation_sparsity[layer : layer + 1],
        )  # fmt: skip

    def kv_of(self, layer: int) -> LayerKV:
        """Keys and values of a layer. In a spec of `of_layer`, use `layer` 0."""
        return self.layer_kv[layer] if self.layer_kv else LayerKV(self.num_kv_heads, self.head_dim)

    def width(self, layer: int) -> int:
        """Width of a layer's dense feed-forward network."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    @property
    def kv_sources(self) -> tuple[int | None, ...]:
        """Per layer: the earlier layer with the keys and values that it reads; None: its own. () = all their own."""
        return tuple(kv.source for kv in self.layer_kv)

    @property
    def page_parts(self) -> tuple[int, ...]:
        """Per layer: number of layers whose KV fits into one page of num_kv_heads heads of head_dim. () = 1."""
        most = self.num_kv_heads * self.head_dim
        return tuple(most // (kv.heads * kv.head_dim) for kv in self.layer_kv)

    @property
    def page_v_dim(self) -> int | None:
        """Latent pages: values are the first `page_v_dim` elements of the keys. None: values are stored separately."""
        if self.compressed is not None:
            return self.head_dim
        return None if self.latent is None else self.latent.kv_rank

    @property
    def compressed(self) -> Compressed | None:
        """Attention of DeepSeek V4; None: other attention."""
        return self.recurrence if isinstance(self.recurrence, Compressed) else None

    @property
    def indexer(self) -> Indexer | None:
        """Chooses the tokens that a query attends to; None: all."""
        return None if self.latent is None else self.latent.indexer

    def lines(self, block_size: int) -> int:
        """Vectors of a KV head in a page of `block_size` tokens: their keys, and DeepSeek V4's entries."""
        return block_size if self.compressed is None else self.compressed.lines(block_size)

    def is_sparse(self, layer: int) -> bool:
        """True if the layer has experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def learned_positions(self) -> bool:
        return self.rope is None and self.alibi is None

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """Per layer: True = it keeps a state of fixed size per request. () = no layer."""
        return () if self.recurrence is None else self.recurrence.layers

    @property
    def attends(self) -> tuple[bool, ...]:
        """Per layer: True = it has attention, and KV. () = all layers."""
        return self.attention_layers or tuple(not recurrent for recurrent in self.recurrent)

    def layer_rope(self, layer: int) -> Rope | None:
        """Rope of a layer; None if the layer does not rotate queries and keys."""
        if self.attends and not self.attends[layer]:
            return None
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        return self.window_rope if self.window_rope is not None and self.window(layer) is not None else self.rope

    def mixers(self, layer: int) -> tuple[Mixer, ...]:
        """Static options of what mixes a layer's tokens: attention, recurrence, or both in this order."""
        of_layer: tuple[Mixer, ...] = ()
        if not self.attends or self.attends[layer]:
            of_layer += (self.attention(layer),)
        if self.recurrence is not None and self.recurrence.layers[layer]:
            of_layer += (self.recurrence.of_layer(layer),)
        return of_layer

    def attention(self, layer: int) -> AttentionOptions:
        """Static options of a layer's attention."""
        slopes = None if self.alibi is None else alibi_slopes(self.num_heads, self.alibi)
        chunk = self.attention_chunks[layer] if self.attention_chunks else None
        return AttentionOptions(
            self.scale, self.window(layer), self.attention_softcap, slopes, self.page_v_dim, chunk,
            self.layer_kv[layer].heads if self.layer_kv else None, layer in self.kv_sources,
        )  # fmt: skip

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of every layer."""
        return tuple(self.window(layer) for layer in range(self.num_layers))

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer: number of keys that a query sees, its own included. None = all keys up to it."""
        return self.sliding_window[layer] if self.sliding_window else None


def alibi_slopes(num_heads: int, factor: float = 1.0) -> tuple[float, ...]:
    """One slope per head, times `factor` (arXiv:2108.12409, section 3).

    2^n heads have slopes 2 ** (-8 i / 2^n), i from 1. More heads also get every second slope of 2^(n+1) heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return tuple(slope * factor for slope in slopes)


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Layout of live arrays that differ from `param_shapes`. With these static flags, no array needs a copy."""

    split_qkv: bool = False       # separate leaves "q" [heads * head_dim, in], "k" and "v" [kv_heads * head_dim, in]
    split_gate_up: bool = False   # separate leaves "gate" and "up" [intermediate, in]
    transposed: frozenset[str] = frozenset()  # leaves stored [in, out]: any of q, k, v, o, gate, up, down, lm_head, …


def param_shapes(spec: DecoderSpec, dtype: DTypeLike) -> Params:
    """The engine's parameter tree, as ShapeDtypeStructs.

    Matrices are [out, in], with one array per matrix and layer. q, k and v are fused by KV head, and gate and up are
    fused, so that they split over heads without a copy. Small vectors are stacked over layers, because each argument of
    a call costs 0.7 us. XLA slices them inside the operation that reads them. Vectors that a kernel reads are not
    stacked, because a slice for a kernel is a copy, about 2 us on a GPU.
    """
    s = spec
    hidden, embed = s.hidden_size, s.embed_size or s.hidden_size

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    tree: Params = {
        "embed": leaf(s.vocab_size, embed),
        "layers": tuple(_layer_shapes(s.of_layer(i), i, leaf) for i in range(s.num_layers)),
    }
    tree |= _vector_shapes(s, leaf)
    if s.learned_positions:
        tree["pos_embed"] = leaf(s.max_position + s.position_offset, hidden)
    if embed != hidden:
        tree |= {"project_in": leaf(hidden, embed), "project_out": leaf(embed, hidden)}
    if s.encoder is not None:
        tree |= _encoder_shapes(s, s.encoder, leaf)
    if s.layer_embed is not None:
        width = s.num_layers * s.layer_embed.size
        tree |= {"layer_embed": leaf(s.layer_embed.vocab_size, width), "layer_embed_in": leaf(width, hidden)}
        tree["layer_embed_norm"] = leaf(s.layer_embed.size)
    if s.hyper is not None:
        tree |= s.hyper.last_leaves(hidden)
    if s.altup is not None:
        names = (f"altup_{kind}_{i}" for kind in ("in", "out") for i in range(s.altup.streams - 1))
        tree |= {name: leaf(hidden, hidden) for name in names}
    if s.num_labels is not None:
        tree["score"] = leaf(s.num_labels, embed)
    elif not (s.tie_embeddings or s.pools):
        tree["lm_head"] = leaf(s.vocab_size, embed)
    if s.lm_head_bias and not s.pools:
        tree["lm_head_bias"] = leaf(s.vocab_size)
    return tree


def _encoder_shapes(s: DecoderSpec, e: Encoder, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Leaves that only encoders have: the embedding of token types, and the parts around the score matrix."""
    tree: Params = {"type_embed": leaf(e.token_types, s.hidden_size)} if e.token_types else {}
    if s.num_labels is None:
        return tree
    if e.head is not None:
        tree["head"] = leaf(s.hidden_size, s.hidden_size)
        if e.head_bias:
            tree["head_bias"] = leaf(s.hidden_size)
        if e.head_norm:
            tree |= {"head_norm": leaf(s.hidden_size), "head_norm_bias": leaf(s.hidden_size)}
    if e.score_bias:
        tree["score_bias"] = leaf(s.num_labels)
    return tree


def _vector_shapes(s: DecoderSpec, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Norms and biases that XLA's operations read. Vectors of layers are stacked over layers."""
    layers, hidden, inter = s.num_layers, s.hidden_size, s.intermediate_size
    norms = {name: leaf(layers, hidden) for name in _norm_names(s)}
    if s.embed_norm:
        norms["embed_norm"] = leaf(hidden)
    if s.final_norm:
        norms["final_norm"] = leaf(hidden)
    tree: Params = dict(norms)
    if s.norm is Norm.LAYER:
        tree |= {f"{name}_bias": shape for name, shape in norms.items()}
    tree |= {name: leaf(layers, hidden) for name in ("o_bias", "down_bias") if getattr(s, name)}
    if s.up_bias:
        tree["up_bias"] = leaf(layers, 2, inter) if s.gated else leaf(layers, inter)
    if s.layer_scalars:
        tree["layer_scalar"] = leaf(layers, 1)
    if s.activation is Activation.XIELU:
        tree["xielu"] = leaf(layers, 4)
    if s.altup is not None:
        tree |= {"altup_scale": leaf(layers, hidden), "altup_router_norm": leaf(layers, hidden)}
    if s.laurel_rank:
        tree["laurel_norm"] = leaf(layers, hidden)
    if s.latent is not None and s.recurrence is None:  # with a recurrence, not all layers have them
        tree |= _latent_vectors(s, s.latent, functools.partial(leaf, layers))
    return tree


def _latent_vectors(s: DecoderSpec, m: Latent, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Norms and biases of latent attention."""
    widths = {"kv_a": (m.kv_rank, m.key_dim)} | ({} if m.q_rank is None else {"q_a": (m.q_rank, m.q_rank)})
    biases = {f"{name}_bias": leaf(bias) for name, (_, bias) in widths.items() if s.qkv_bias}
    return {f"{name}_norm": leaf(norm) for name, (norm, _) in widths.items()} | biases


def _layer_shapes(s: DecoderSpec, layer: int, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Leaves of one layer: matrices, biases of experts, and vectors that kernels read."""
    tree: Params = {}
    if s.compressed is None and (not s.attends or s.attends[layer]):
        tree |= _attention_shapes(s, layer, leaf)
    if s.recurrence is not None and s.recurrence.layers[layer]:
        tree |= s.recurrence.of_layer(layer).leaves(s.hidden_size, leaf)
    if s.hyper is not None:
        tree |= s.hyper.leaves(s.hidden_size)
    if s.layer_embed is not None:
        size = s.layer_embed.size
        tree |= {"layer_in": leaf(size, s.hidden_size), "layer_out": leaf(s.hidden_size, size)}
    if s.altup is not None:
        n = s.altup.streams
        tree |= {"altup_router": leaf(n, s.hidden_size), "altup_predict": leaf(n, n, n), "altup_correct": leaf(n, n)}
    if s.laurel_rank:
        rank = s.laurel_rank
        tree |= {"laurel_left": leaf(rank, s.hidden_size), "laurel_right": leaf(s.hidden_size, rank)}
    if s.lone_feed_forward and not s.lone_feed_forward[layer]:
        return tree
    return tree | _feed_forward_shapes(s, layer, leaf)


def _attention_shapes(s: DecoderSpec, layer: int, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Leaves of a layer's attention."""
    hidden, kv = s.hidden_size, s.num_kv_heads
    own = s.kv_of(0)
    if own.values_are_keys or own.source is not None:
        tree = {"q": leaf(s.num_heads * s.head_dim, hidden), "o": leaf(hidden, s.num_heads * s.head_dim)}
        tree |= {"k": leaf(kv * s.head_dim, hidden)} if own.source is None else {}
    elif s.latent is None:
        # per KV head: a gate for each query head if the model has gates, its query heads, its key head, its value head
        tree = {"qkv": leaf(kv, s.qkv_heads, s.head_dim, hidden), "o": leaf(hidden, s.num_heads * s.head_dim)}
    else:
        m = s.latent
        tree = {
            "kv_a": leaf(m.key_dim, hidden),
            "kv_b": leaf(s.num_heads, m.nope_dim + m.v_dim, m.kv_rank),  # per head: keys, then values
            "o": leaf(hidden, s.num_heads * m.v_dim),
        }
        tree["q_b"] = leaf(s.num_heads, m.nope_dim + m.rope_dim, m.q_rank or hidden)
        if m.q_rank is not None:
            tree["q_a"] = leaf(m.q_rank, hidden)
        tree |= {} if s.recurrence is None else _latent_vectors(s, m, leaf)
        if m.indexer is not None and m.indexer.is_in(layer):
            tree |= _indexer_shapes(m.indexer, m.q_rank or hidden, hidden, leaf)
    if s.qkv_bias and s.latent is None:
        tree["qkv_bias"] = leaf(kv, s.qkv_heads, s.head_dim)
    if s.qk_norm is not None:
        heads = (s.num_heads, kv) if s.qk_norm is QKNorm.PROJECTION else (1, 1)
        tree |= {name: leaf(n * s.head_dim) for name, n in zip(("q_norm", "k_norm"), heads, strict=True)}
        if own.source is not None:
            del tree["k_norm"]
    if s.sinks:
        tree["sinks"] = leaf(s.num_heads)
    if s.output_gates:
        tree["output_gate"] = leaf(s.num_heads * s.output_gates, hidden)
    return tree


def _indexer_shapes(i: Indexer, queries: int, hidden: int, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Leaves of a layer's indexer. queries: width of the input of its queries."""
    return {
        "index_q": leaf(i.heads, i.head_dim, queries),
        "index_k": leaf(i.head_dim, hidden),
        "index_weights": leaf(i.heads, hidden),
        "index_norm": leaf(i.head_dim),
        "index_norm_bias": leaf(i.head_dim),
    }


def _feed_forward_shapes(s: DecoderSpec, layer: int, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Matrices of a layer's feed-forward network, dense or of experts."""
    sparse = {}
    if s.experts is not None and s.is_sparse(layer):
        sparse = _expert_shapes(s.experts, s.hidden_size, 1 + s.gated, leaf)
        if s.experts.hashed and s.experts.hashed[layer]:
            sparse.pop("router_correction", None)
            sparse[HASHED] = jax.ShapeDtypeStruct((s.vocab_size, s.experts.per_token), leaf_dtype(HASHED, np.int32))
        if not s.experts.beside_dense:
            return sparse
    tree = sparse | {"down": leaf(s.hidden_size, s.intermediate_size)}
    if s.gated:
        tree["gate_up"] = leaf(2, s.intermediate_size, s.hidden_size)
    else:
        tree["up"] = leaf(s.intermediate_size, s.hidden_size)
    return tree


def _expert_shapes(e: Experts, hidden: int, parts: int, leaf: Callable[..., jax.ShapeDtypeStruct]) -> Params:
    """Leaves of a layer's experts. parts: 2, gate and up, or 1: networks without a gate have only up."""
    inner = e.latent_size or hidden
    tree = {
        "router": leaf(e.num, hidden),
        "expert_gate_up": leaf(e.num, parts, e.intermediate_size, inner),
        "expert_down": leaf(e.num, inner, e.intermediate_size),
    }
    if e.latent_size is not None:
        tree |= {"latent_in": leaf(inner, hidden), "latent_out": leaf(hidden, inner)}
    if e.bias:
        tree |= {
            "router_bias": leaf(e.num),
            "expert_gate_up_bias": leaf(e.num, parts, e.intermediate_size),
            "expert_down_bias": leaf(e.num, hidden),
        }
    if e.beside_dense:
        tree["router_scale"] = leaf(e.num)
    if e.correction:
        tree["router_correction"] = jax.ShapeDtypeStruct((e.num,), leaf_dtype("router_correction", np.float32))
    if e.shared_size:
        tree |= {"shared_gate_up": leaf(parts, e.shared_size, hidden), "shared_down": leaf(hidden, e.shared_size)}
        if e.shared_gate:
            tree["shared_gate"] = leaf(1, hidden)
    return tree


def _norm_names(s: DecoderSpec) -> list[str]:
    names = []
    if s.norm_position is not NormPosition.OUTPUT:
        names += ["attn_norm"] if s.shared_norm or s.lone_feed_forward else ["attn_norm", "mlp_norm"]
    if s.norm_position in (NormPosition.SANDWICH, NormPosition.OUTPUT):
        names += ["attn_out_norm", "mlp_out_norm"]
    if s.layer_embed is not None:
        names.append("layer_out_norm")
    if s.experts is not None and s.experts.beside_dense:
        names += ["router_norm", "dense_out_norm", "sparse_norm", "sparse_out_norm"]
    return names
