"""Latent attention and its indexer, as parts of a `DecoderSpec`. `latent.py` and `indexer.py` compute them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Sparse attention: a query attends to the `top_k` tokens with the best scores (DeepSeek-V3.2, GLM-5).

    A token's score is computed from a small key. See `models.indexer`.
    """

    heads: int                   # of the indexer's queries; a token has one key
    head_dim: int
    top_k: int
    interleaved: bool = False    # rope pairs dimensions 2i and 2i + 1, not i and i + half
    # per layer: True = it has an indexer, False = it takes the tokens of the layer before; () = all have one (GLM-5.2)
    layers: tuple[bool, ...] = ()

    def is_in(self, layer: int) -> bool:
        """True if the layer has an indexer."""
        return not self.layers or self.layers[layer]


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434). The spec has one KV head.

    The KV cache has one vector per token: the latent vector, the rotated part of the key, and the indexer's key.
    """

    q_rank: int | None           # width of the compressed queries; None: queries come from the hidden state directly
    kv_rank: int                 # width of the latent vector that is cached per token for keys and values
    nope_dim: int                # per head: dimensions of queries and keys without rotary embedding
    rope_dim: int                # per head: dimensions of queries and keys with rotary embedding
    v_dim: int                   # per head: dimensions of the values
    interleaved: bool = True     # rope pairs dimensions 2i and 2i + 1, not i and i + half
    indexer: Indexer | None = None  # chooses the tokens that a query attends to; None: all

    @property
    def key_dim(self) -> int:
        """Width of the keys of attention: the latent vector and the rotated part."""
        return self.kv_rank + self.rope_dim

    @property
    def width(self) -> int:
        """Width of the vector that is cached per token."""
        return self.key_dim + (0 if self.indexer is None else self.indexer.head_dim)
