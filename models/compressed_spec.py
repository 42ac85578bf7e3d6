"""DeepSeek V4's attention and hyper-connections, as parts of a `DecoderSpec`. `compressed.py` computes them.

Every layer attends to the last `window` tokens. Most layers also attend to *entries*: one vector for `ratio` tokens,
which stands for the tokens of a finished chunk of the sequence. A layer keeps a request's last inputs of the entries as
a state of fixed size (`Recurrence`), and the finished entries in the KV pages.
"""

import dataclasses
import enum
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.typing import DTypeLike

from jpaged.models.recurrent_spec import MakeLeaf, Recurrence


class Entries(enum.Enum):
    """Entries of a layer. Values are those of Transformers' `layer_types`."""

    NONE = "sliding_attention"
    SPARSE = "compressed_sparse_attention"  # an indexer chooses some. Neighbouring chunks overlap
    HEAVY = "heavily_compressed_attention"  # a query attends to all that are finished


@dataclasses.dataclass(frozen=True)
class HyperConnections:
    """Several streams of hidden states, mixed before and after each block (arXiv:2512.24880; DeepSeek V4)."""

    streams: int
    iterations: int              # of Sinkhorn-Knopp, which makes the mixing matrix doubly stochastic
    eps: float

    def leaves(self, hidden: int) -> dict[str, Any]:
        """float32 parameters of one layer: streams, their offset, and factors, for attention and the experts."""
        n = self.streams
        sizes = {"fn": ((2 + n) * n, n * hidden), "base": ((2 + n) * n,), "scale": (3,)}
        return {f"hc_{block}_{name}": _wide(size) for block in ("attn", "ffn") for name, size in sizes.items()}

    def last_leaves(self, hidden: int) -> dict[str, Any]:
        """float32 parameters of the sum of the streams after the last layer."""
        n = self.streams
        return {"hc_head_fn": _wide((n, n * hidden)), "hc_head_base": _wide((n,)), "hc_head_scale": _wide((1,))}


@dataclasses.dataclass(frozen=True)
class Compressed(Recurrence):
    """Attention of DeepSeek V4: a window, and entries. It has one KV head, whose keys are its values."""

    scans: ClassVar[bool] = False
    state_leaves: ClassVar[tuple[str, ...]] = ()
    entries: tuple[Entries, ...]  # by layer. In the result of `of_layer`, of that layer only
    ratios: tuple[int, int]      # tokens of an entry: SPARSE, HEAVY
    heads: int
    head_dim: int
    rope_dim: int                # last dimensions of queries, keys and entries, rotated in pairs (2i, 2i + 1)
    window: int                  # keys of tokens that a query sees, its own included
    q_rank: int                  # width of the compressed queries
    out_groups: int              # groups of neighbouring heads that have an output matrix each
    out_rank: int                # outputs of that matrix
    index_heads: int
    index_dim: int
    top_k: int                   # entries that the indexer chooses

    def of_layer(self, layer: int) -> Self:
        """One layer's attention. Equal for layers with the same entries."""
        return dataclasses.replace(self, entries=(self.entries[layer],), layers=(True,))

    @property
    def kind(self) -> Entries:
        """Entries of the layer. Only of `of_layer`."""
        (kind,) = self.entries
        return kind

    @property
    def ratio(self) -> int:
        """Tokens of an entry. Only of `of_layer`."""
        return self.ratios[self.kind is Entries.HEAVY]

    @property
    def span(self) -> int:
        """Tokens that an entry is computed from: its own chunk, and in a SPARSE layer the chunk before. Of a layer."""
        return self.ratio * (1 + (self.kind is Entries.SPARSE))

    @property
    def series(self) -> int:
        """Vectors of a token that entries are computed from: for the next chunk's, and for its own. Of a layer."""
        return 1 + (self.kind is Entries.SPARSE)

    @property
    def input_size(self) -> int:
        """Numbers that a token adds to the state: values and gates of entries, and of the indexer's. Of a layer."""
        return 2 * self.series * (self.head_dim + (self.index_dim if self.kind is Entries.SPARSE else 0))

    @property
    def inner_size(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    def entries_per_block(self, block_size: int) -> int:
        """Places for entries in a block of `block_size` tokens."""
        return max(1, block_size // min(self.ratios))

    def lines(self, block_size: int) -> int:
        """Vectors in a page: keys of `block_size` tokens, then entries, then the indexer's keys of entries."""
        return block_size + 2 * self.entries_per_block(block_size)

    def state_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Inputs of the last `span` tokens. Token p is at index p % span. Of a layer."""
        if self.kind is Entries.NONE:
            return ()
        return (jax.ShapeDtypeStruct((self.span, self.input_size), np.dtype(dtype)),)

    @property
    def state_axes(self) -> tuple[int | None, ...]:
        """Every device has all of a state. Of a layer."""
        return () if self.kind is Entries.NONE else (None,)

    def input_shapes(self, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Nothing: no step checks drafts."""
        return ()

    def leaves(self, hidden: int, leaf: MakeLeaf) -> dict[str, Any]:
        """Parameters of one layer's attention. Only of `of_layer`."""
        group = self.inner_size // self.out_groups
        tree = {
            "q_a": leaf(self.q_rank, hidden),
            "query_norm": leaf(self.q_rank),
            "q_b": leaf(self.heads, self.head_dim, self.q_rank),
            "kv": leaf(self.head_dim, hidden),
            "kv_norm": leaf(self.head_dim),
            "o_a": leaf(self.out_groups, self.out_rank, group),
            "o": leaf(hidden, self.out_groups * self.out_rank),
            "sinks": leaf(self.heads),
        }
        if self.kind is Entries.NONE:
            return tree
        tree |= self._entry_leaves("entry", self.head_dim, hidden, leaf)
        if self.kind is Entries.SPARSE:
            tree |= self._entry_leaves("index", self.index_dim, hidden, leaf)
            tree["index_q"] = leaf(self.index_heads, self.index_dim, self.q_rank)
            tree["index_weights"] = leaf(self.index_heads, hidden)
        return tree

    def _entry_leaves(self, name: str, width: int, hidden: int, leaf: MakeLeaf) -> dict[str, Any]:
        """Leaves of the entries, or of the indexer's keys."""
        return {
            f"{name}_kv": leaf(self.series * width, hidden),
            f"{name}_gate": leaf(self.series * width, hidden),
            f"{name}_bias": _wide((self.ratio, self.series * width)),
            f"{name}_norm": leaf(width),
        }


def _wide(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A float32 leaf; its name is in `spec.FLOAT32_LEAVES` too."""
    return jax.ShapeDtypeStruct(shape, np.dtype(np.float32))
