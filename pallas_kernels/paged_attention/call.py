"""AttentionCall: the arguments of paged_attention, as all implementations take them. StaticParameters: for kernels."""

import dataclasses
import functools
from typing import Any, Self

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "pages", "block_tables", "context_lens", "query_start_loc", "sinks", "alibi_slopes"],
    meta_fields=["scale", "max_query_len", "sliding_window", "logit_softcap", "key_dim"],
)
@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """A call of `paged_attention`, whose docstring explains the arguments. They are checked, and not empty."""

    q: Float[Array, "tokens q_heads head_dim"]
    pages: KVPages
    block_tables: Int[Array, "rows width"]  # int32, as all index arrays
    context_lens: Int[Array, " rows"]
    query_start_loc: Int[Array, " rows_plus_1"]
    scale: float                            # static, as all numbers
    max_query_len: int
    sliding_window: int | None = None
    logit_softcap: float | None = None
    sinks: Float[Array, " q_heads"] | None = None
    alibi_slopes: Float[Array, " q_heads"] | None = None
    key_dim: int | None = None

    @property
    def q_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.pages.num_kv_heads

    @property
    def table_keys(self) -> int:
        """Largest number of keys of a row: all that its block table holds."""
        return self.block_tables.shape[1] * self.pages.block_size

    @property
    def v_dim(self) -> int:
        """Numbers per head of the result."""
        return self.pages.v_dim or self.q.shape[2]


@dataclasses.dataclass(frozen=True)
class StaticParameters:
    """Static parameters of a call, for the code of kernels. A kernel adds its own as a subclass."""

    scale: float
    q_per_kv: int
    head_dim: int
    block_size: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    has_slopes: bool

    @classmethod
    def of(cls, call: AttentionCall, **own: Any) -> Self:
        """The parameters of a call. own: the fields that the subclass adds."""
        return cls(
            scale=call.scale, q_per_kv=call.q_per_kv, head_dim=call.q.shape[2], block_size=call.pages.block_size,
            window=call.sliding_window, softcap=call.logit_softcap, has_sinks=call.sinks is not None,
            has_slopes=call.alibi_slopes is not None, **own,
        )  # fmt: skip
