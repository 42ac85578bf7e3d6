"""LoRA adapters: which matrices of a decoder they may change, and the arrays that hold them.

An adapter adds scale * B (A x) to the result of a matmul W x, with A [rank, in] and B [out, rank] (arXiv:2106.09685).
Every matrix has a pool of adapters on the device, with a fixed number of slots. A token names its slot, so one program
serves any mix of adapters.

A fused matrix has several parts, each with its own A: qkv has q, k and v, and gate_up has gate and up. In gated
DeltaNet, delta_qkvz has qkv and z, and delta_ba has b and a.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.models.spec import DecoderSpec, WeightLayout
from pallas_kernels import grouped_lora, lora_dot, lora_expand

# (part, width): the next `width` outputs of a matrix belong to this part. Repeated until all outputs have a part
Pattern = tuple[tuple[int, int], ...]

NO_ADAPTER = -1  # slot of a token that uses the base model alone
LM_HEAD, EMBED, LAYER_EMBED_IN = "lm_head", "embed", "layer_embed_in"
OF_NO_LAYER = (LM_HEAD, EMBED, LAYER_EMBED_IN)


@dataclasses.dataclass(frozen=True)
class AdapterTarget:
    """A matrix of the decoder that adapters may change, in all layers that have it with the same size."""

    leaf: str                   # name in `spec.param_shapes`
    layers: tuple[int, ...]     # layers that have it, in order; (0,) if it belongs to no layer
    inputs: int
    # axes of the outputs, of one expert: [kv_heads, heads per KV head, head_dim], [2, inter] ([1, inter] of experts
    # without a gate), [out], or those of `GatedDelta.leaves`
    out_shape: tuple[int, ...]
    experts: int = 1            # matrices per layer
    kind: int = 0               # number of this size, if the matrix has unlike sizes in the layers

    @property
    def name(self) -> str:
        """Name of its pool: of the leaf, with a number if layers have unlike sizes."""
        return f"{self.leaf}.{self.kind}" if self.kind else self.leaf

    @property
    def outputs(self) -> int:
        """Number of outputs of one expert."""
        return math.prod(self.out_shape)

    @property
    def num_parts(self) -> int:
        """Number of matrices A per slot."""
        return len(self.pattern)

    @property
    def pattern(self) -> Pattern:
        return pattern(self.leaf, self.out_shape)

    def index(self, layer: int) -> int:
        """Index of a layer in the arrays of the pool."""
        return self.layers.index(layer)


@dataclasses.dataclass(frozen=True)
class AdapterMatrix:
    """An adapter's part for one `AdapterTarget`, in host memory. `rank` is the largest of its layers and parts."""

    a: np.ndarray       # [layers, experts, parts, rank, in]; of the embedding: [1, 1, vocab, rank]
    b: np.ndarray       # [layers, experts, rank, out]
    ranks: np.ndarray   # int32[layers, experts, parts]; 0: the adapter does not change this part
    scales: np.ndarray  # float32[layers, experts, parts]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.ranks.nbytes + self.scales.nbytes


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in host memory, ready to be copied into a slot."""

    matrices: Mapping[str, AdapterMatrix]  # by `AdapterTarget.name`
    num_tensors: int                       # tensors that were read

    @property
    def rank(self) -> int:
        """The largest rank of all its matrices."""
        return max((int(matrix.ranks.max()) for matrix in self.matrices.values()), default=0)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self.matrices.values())


def pattern(leaf: str, out_shape: tuple[int, ...]) -> Pattern:
    """The parts of a leaf's outputs, in order: 3 for fused qkv, 2 for gate and up and in gated DeltaNet, else 1."""
    match out_shape:
        case (_, heads, head_dim) if leaf == "delta_qkvz":  # q, k and half of the rest; then the gates
            gates = (heads // 2 - 1) * head_dim
            return (0, heads * head_dim - gates), (1, gates)
        case (_, 2, width) if leaf == "delta_ba":
            return (0, width), (1, width)
        case (_, heads, head_dim):
            return (0, (heads - 2) * head_dim), (1, head_dim), (2, head_dim)
        case (2, width):
            return (0, width), (1, width)
        case (1, width):  # experts without a gate
            return ((0, width),)
        case _:
            return ((0, out_shape[0]),)


def adapter_targets(spec: DecoderSpec, layout: WeightLayout = WeightLayout()) -> tuple[AdapterTarget, ...]:
    """The matrices of a model that adapters may change: of attention, of recurrent layers, of feed-forward networks and
    experts, of per-layer embeddings and LAuReL, the embedding, the lm_head.

    The projections of latent attention are not among them: they are read in several ways. Neither are projections of
    layers with unlike numbers of query heads.
    """
    hidden, every = spec.hidden_size, tuple(range(spec.num_layers))
    of_layer = [spec.of_layer(layer) for layer in every]
    found: list[AdapterTarget] = []

    def add(leaf: str, layers: Iterable[int], size: Callable[[DecoderSpec], tuple[int, ...]], experts: int = 1) -> None:
        """One target for each size. size: inputs, then the axes of the outputs, by the spec of the layer."""
        by_size: dict[tuple[int, ...], list[int]] = {}
        for layer in layers:
            by_size.setdefault(size(of_layer[layer]), []).append(layer)
        for kind, ((inputs, *out_shape), members) in enumerate(by_size.items()):
            found.append(AdapterTarget(leaf, tuple(members), inputs, tuple(out_shape), experts, kind))

    if spec.latent is None and not spec.heads_by_layer:
        _add_attention(spec, layout, add)
    if spec.recurrence is not None:
        layers = tuple(layer for layer in every if spec.recurrent[layer])
        for leaf, (inputs, outputs) in spec.recurrence.matrices(hidden).items():
            add(leaf, layers, lambda s, inputs=inputs, outputs=outputs: (inputs, *outputs))
    sparse = tuple(layer for layer in every if spec.is_sparse(layer))
    beside_dense = spec.experts is not None and spec.experts.beside_dense
    networks = tuple(layer for layer in every if not spec.lone_feed_forward or spec.lone_feed_forward[layer])
    dense = tuple(layer for layer in networks if layer not in sparse or beside_dense)
    if not spec.gated:
        add("up", dense, lambda s: (hidden, s.intermediate_size))
    elif layout.split_gate_up:
        add("gate", dense, lambda s: (hidden, s.intermediate_size))
        add("up", dense, lambda s: (hidden, s.intermediate_size))
    else:
        add("gate_up", dense, lambda s: (hidden, 2, s.intermediate_size))
    add("down", dense, lambda s: (s.intermediate_size, hidden))
    if spec.experts is not None:
        e = spec.experts
        parts, inner = 1 + spec.gated, e.latent_size or hidden
        add("expert_gate_up", sparse, lambda s: (inner, parts, e.intermediate_size), e.num)
        add("expert_down", sparse, lambda s: (e.intermediate_size, inner), e.num)
        if e.latent_size is not None:
            add("latent_in", sparse, lambda s: (hidden, inner))
            add("latent_out", sparse, lambda s: (inner, hidden))
        if e.shared_size:
            add("shared_gate_up", sparse, lambda s: (hidden, parts, e.shared_size))
            add("shared_down", sparse, lambda s: (e.shared_size, hidden))
    if (rank := spec.laurel_rank) > 0:
        add("laurel_left", every, lambda s: (hidden, rank))
        add("laurel_right", every, lambda s: (rank, hidden))
    if spec.layer_embed is not None:
        width = spec.layer_embed.size
        add("layer_in", every, lambda s: (hidden, width))
        add("layer_out", every, lambda s: (width, hidden))
        add(LAYER_EMBED_IN, (0,), lambda s: (hidden, spec.num_layers * width))
    embed = spec.embed_size or hidden
    add(EMBED, (0,), lambda s: (spec.vocab_size, embed))
    if not spec.pools:
        add(LM_HEAD, (0,), lambda s: (embed, spec.vocab_size))
    return tuple(found)


def _add_attention(spec: DecoderSpec, layout: WeightLayout, add: Callable[..., None]) -> None:
    """The projections of all layers with attention. add: of `adapter_targets`."""
    hidden = spec.hidden_size
    attends = [layer for layer in range(spec.num_layers) if not spec.attends or spec.attends[layer]]
    kv = {layer: spec.kv_of(layer) for layer in attends}
    with_keys = [layer for layer in attends if kv[layer].source is None]
    fused = [layer for layer in with_keys if not (layout.split_qkv or kv[layer].values_are_keys)]
    add("qkv", fused, lambda s: (hidden, s.num_kv_heads, s.qkv_heads, s.head_dim))
    add("q", (layer for layer in attends if layer not in fused), lambda s: (hidden, s.num_heads * s.head_dim))
    split = [layer for layer in with_keys if layer not in fused]
    add("k", split, lambda s: (hidden, s.num_kv_heads * s.head_dim))
    has_values = (layer for layer in split if not kv[layer].values_are_keys)
    add("v", has_values, lambda s: (hidden, s.num_kv_heads * s.head_dim))
    add("o", attends, lambda s: (s.num_heads * s.head_dim, hidden))


# -- on the device ------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterPool:
    """The slots of one `AdapterTarget`. A slot has one entry per expert: `entries` is slots * experts.

    An axis for the experts would make XLA for CPU copy pools in every step: it gives an axis of size 1 another layout.
    """

    a: Any       # [layers, entries, parts, rank, in]; of the embedding: [1, slots, vocab, rank]
    b: Any       # [layers, entries, rank, *out_shape]
    ranks: Any   # int32[layers, entries, parts]
    scales: Any  # float32[layers, entries, parts]

    def operands(self) -> tuple[Array, Array, Array, Array]:
        """The arrays as `grouped_lora` reads them, with one axis for the outputs."""
        return self.a, self.b.reshape(*self.b.shape[:3], -1), self.ranks, self.scales


Pools = Mapping[str, AdapterPool]  # by `AdapterTarget.name`; of one layer: by leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerAdapters:
    """The pools as one layer reads them."""

    pools: Pools
    slots: Int[Array, " tokens"]  # slot of each token; NO_ADAPTER: the base model alone
    layer: Mapping[str, Array]    # int32[]: index of the layer in each pool


def pool_shapes(targets: tuple[AdapterTarget, ...], *, slots: int, rank: int, dtype: Any) -> dict[str, AdapterPool]:
    """The pools of an engine on one device, as ShapeDtypeStructs. rank: the largest rank of an adapter."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    def pool(target: AdapterTarget) -> AdapterPool:
        lead = (len(target.layers), slots * target.experts)
        of_a = (target.inputs, rank) if target.leaf == EMBED else (target.num_parts, rank, target.inputs)
        return AdapterPool(
            a=array(dtype, *lead, *of_a), b=array(dtype, *lead, rank, *target.out_shape),
            ranks=array(np.int32, *lead, target.num_parts), scales=array(np.float32, *lead, target.num_parts),
        )  # fmt: skip

    return {target.name: pool(target) for target in targets}


def layer_adapters(
    pools: Pools, targets: tuple[AdapterTarget, ...], slots: Int[Array, " tokens"], layer: int
) -> LayerAdapters:
    """The pools of a layer's matrices. layer: its index in the model."""
    of_layer = [target for target in targets if layer in target.layers and target.leaf not in OF_NO_LAYER]
    here = {target.leaf: pools[target.name] for target in of_layer}
    return LayerAdapters(here, slots, {target.leaf: jnp.int32(target.index(layer)) for target in of_layer})


def whole_adapters(leaf: str, pools: Pools, slots: Int[Array, " tokens"] | None) -> LayerAdapters | None:
    """The pool of a matrix that belongs to no layer, as `linear` reads it. None: there are no adapters."""
    return None if slots is None else LayerAdapters({leaf: pools[leaf]}, slots, {leaf: jnp.int32(0)})


def has_adapters(leaf: str, adapters: LayerAdapters | None) -> bool:
    """True if adapters may change the matrix `leaf`."""
    return adapters is not None and leaf in adapters.pools


def with_adapters(
    leaf: str, x: Float[Array, "rows in"], out: Float[Array, "rows out"], adapters: LayerAdapters | None,
    num_rows: Int[Array, ""] | None,
) -> Float[Array, "rows out"]:  # fmt: skip
    """The result `out` of the matmul of x with `leaf`, plus each row's adapter. num_rows: needed rows; None: all."""
    if adapters is None or leaf not in adapters.pools:
        return out
    pool = adapters.pools[leaf]
    return _add(leaf, pool, x, out, adapters.slots, adapters.layer[leaf], num_rows)


def product_with_adapters(
    leaf: str, x: Float[Array, "rows in"], weight: Float[Array, "out in"], adapters: LayerAdapters,
    num_rows: Int[Array, ""], dtype: Any,
) -> Float[Array, "rows out"]:  # fmt: skip
    """The matmul of x with the array of `leaf`, plus each row's adapter. num_rows, dtype: as in `dot`."""
    pool, layer = adapters.pools[leaf], adapters.layer[leaf]
    options = {"layer": layer, "pattern": pattern(leaf, pool.b.shape[3:]), "dtype": dtype}
    return lora_dot(x, weight, *pool.operands(), adapters.slots, num_rows, **options)


def with_expert_adapters(
    leaf: str, x: Float[Array, "blocks rows in"], out: Float[Array, "blocks rows out"],
    token_of_row: Int[Array, "blocks rows"], expert_of_block: Int[Array, " blocks"],
    rows_of_block: Int[Array, " blocks"], num_experts: int, adapters: LayerAdapters | None,
) -> Float[Array, "blocks rows out"]:  # fmt: skip
    """`with_adapters` for blocks of rows, each with its expert. rows_of_block: needed rows, 0 for an unused block."""
    if adapters is None or leaf not in adapters.pools:
        return out
    pool = adapters.pools[leaf]
    slots = jnp.take(adapters.slots, token_of_row, axis=0)
    used = jnp.arange(x.shape[1]) < rows_of_block[:, None]
    slots = jnp.where(used & (slots >= 0), slots * num_experts + expert_of_block[:, None], NO_ADAPTER)
    flat = x.reshape(-1, x.shape[2]), out.reshape(-1, out.shape[2])
    return _add(leaf, pool, *flat, slots.reshape(-1), adapters.layer[leaf], None).reshape(out.shape)


def with_embedding_adapters(
    x: Float[Array, "tokens width"], token_ids: Int[Array, " tokens"], pool: AdapterPool,
    slots: Int[Array, " tokens"], num_rows: Int[Array, ""] | None,
) -> Float[Array, "tokens width"]:  # fmt: skip
    """Embedded tokens plus each token's adapter: row `token` of A [vocab, rank], times B."""
    looked_up = pool.a[0, jnp.maximum(slots, 0), token_ids].astype(jnp.float32)
    _, b, ranks, scales = pool.operands()
    count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
    return lora_expand(looked_up, x, b, ranks, scales, slots, count, layer=jnp.int32(0))


def with_lm_head_adapters(
    x: Float[Array, "rows width"], logits: Float[Array, "rows vocab"], pool: AdapterPool, slots: Int[Array, " rows"],
    num_rows: Int[Array, ""] | None,
) -> Float[Array, "rows vocab"]:  # fmt: skip
    """float32 logits plus each row's adapter."""
    return _add(LM_HEAD, pool, x, logits, slots, jnp.int32(0), num_rows)


def _add(
    leaf: str, pool: AdapterPool, x: Float[Array, "rows in"], out: Float[Array, "rows out"],
    slots: Int[Array, " rows"], layer: Int[Array, ""], num_rows: Int[Array, ""] | None,
) -> Float[Array, "rows out"]:  # fmt: skip
    count = jnp.int32(x.shape[0]) if num_rows is None else num_rows
    parts = pattern(leaf, pool.b.shape[3:])
    return grouped_lora(x, out, *pool.operands(), slots, count, layer=layer, pattern=parts)
