"""LoRA adapters: which matrices of a decoder they may change, and the arrays that hold them.

An adapter adds scale * B (A x) to the result of a matmul W x, with A [rank, in] and B [out, rank] (arXiv:2106.09685).
Every matrix has a pool of adapters on the device, a fixed number of slots. A token names its slot, so one program serves
any mix of adapters.

A fused matrix has several parts, each with its own A: qkv has q, k and v, and gate_up has gate and up.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jpaged.models.spec import DecoderSpec, WeightLayout

# (part, width): the next `width` outputs of a matrix belong to this part. The pattern repeats until all outputs have one
Pattern = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class AdapterTarget:
    """A matrix of the decoder that adapters may change, with its size in all layers that have it."""

    leaf: str                # name in `spec.param_shapes`
    layers: tuple[int, ...]  # layers that have it, in order; (0,) if it belongs to no layer
    inputs: int
    outputs: int             # of one expert, if it has experts
    pattern: Pattern
    experts: int = 1         # matrices per layer

    @property
    def num_parts(self) -> int:
        """Number of matrices A per slot."""
        return 1 + max(part for part, _ in self.pattern)

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

    matrices: Mapping[str, AdapterMatrix]  # by leaf
    num_tensors: int                       # tensors that were read

    @property
    def rank(self) -> int:
        """The largest rank of all its matrices."""
        return max((int(matrix.ranks.max()) for matrix in self.matrices.values()), default=0)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self.matrices.values())


def adapter_targets(spec: DecoderSpec, layout: WeightLayout = WeightLayout()) -> tuple[AdapterTarget, ...]:
    """The matrices of a model that adapters may change: attention, feed-forward networks, experts, embedding, lm_head.

    Not with latent attention: its projections are read in several ways.
    """
    hidden, head_dim, every = spec.hidden_size, spec.head_dim, tuple(range(spec.num_layers))
    embed = spec.embed_size or hidden
    found: list[AdapterTarget] = []

    def add(leaf: str, layers: tuple[int, ...], inputs: int, *pattern: int, repeats: int = 1, experts: int = 1) -> None:
        if layers:
            outputs = repeats * sum(pattern)
            found.append(AdapterTarget(leaf, layers, inputs, outputs, tuple(enumerate(pattern)), experts))

    heads, kv_heads = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    if spec.latent is None:
        if layout.split_qkv:
            for name, outputs in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                add(name, every, hidden, outputs)
        else:
            group = spec.q_per_kv * head_dim
            add("qkv", every, hidden, group, head_dim, head_dim, repeats=spec.num_kv_heads)
        add("o", every, heads, hidden)
    sparse = tuple(layer for layer in every if spec.is_sparse(layer))
    dense = tuple(layer for layer in every if layer not in sparse)
    inter = spec.intermediate_size
    if not spec.gated:
        add("up", dense, hidden, inter)
    elif layout.split_gate_up:
        add("gate", dense, hidden, inter)
        add("up", dense, hidden, inter)
    else:
        add("gate_up", dense, hidden, inter, inter)
    add("down", dense, inter, hidden)
    if spec.experts is not None:
        e = spec.experts
        add("expert_gate_up", sparse, hidden, e.intermediate_size, e.intermediate_size, experts=e.num)
        add("expert_down", sparse, e.intermediate_size, hidden, experts=e.num)
        if e.shared_size:
            add("shared_gate_up", sparse, hidden, e.shared_size, e.shared_size)
            add("shared_down", sparse, e.shared_size, hidden)
    add("embed", (0,), spec.vocab_size, embed)
    if not spec.pools:
        add("lm_head", (0,), embed, spec.vocab_size)
    return tuple(found)
