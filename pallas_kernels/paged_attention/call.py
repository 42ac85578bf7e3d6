"""AttentionCall: the arguments of paged_attention, in the form that all implementations take."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import KVPages


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "pages", "block_tables", "context_lens", "query_start_loc", "sinks", "alibi_slopes"],
    meta_fields=["scale", "max_query_len", "sliding_window", "logit_softcap"],
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
