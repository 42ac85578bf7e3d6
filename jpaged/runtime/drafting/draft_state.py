"""DraftState: the arrays of a drafter that stay on the device. Each of its programs donates and returns them.

Called by: the programs of this folder; the runner, which owns the state.
Owns: the drafter's KV pages, and what it remembers of each row of the request table.
Never: shards anything. A drafter is small, so every device has all of it and computes the same.

The pages have the target's block ids. A position's KV is in the block that the target's block table names for it. So a
drafter needs no block table and no allocator, and its pool has as many blocks as the target's.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.kv_groups import KVGroups, group_layers
from jpaged.models.spec import DecoderSpec
from jpaged.runtime.kv_format import KVFormat
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import Leaf
from pallas_kernels import KVPages


@dataclasses.dataclass(frozen=True)
class TableColumns:
    """Columns of `DeviceState.blocks` with the block table that the drafter uses."""

    first: int
    width: int  # entries of a block table

    @classmethod
    def of(cls, kv_groups: KVGroups, width: int) -> "TableColumns":
        """The columns of the target's first KV group without a sliding window.

        width: entries of a block table. Raises ModelLoadError if all groups have a window: they free blocks before it,
        and with them the keys of the drafter.
        """
        if None not in kv_groups.windows:
            raise ModelLoadError(
                f"speculative_config: every layer of the model has a sliding window ({kv_groups}), so its block tables "
                "do not keep the keys of a drafter. Use the method ngram or suffix"
            )
        return cls(kv_groups.windows.index(None) * width, width)


# The arrays of a `DraftState` as programs take and return them: page arrays; then tail, hidden and progress, arrays or
# None. An array without elements would not do: on several devices JAX gives such a result another sharding, which the
# next call refuses.
DraftArrays = tuple[tuple[tuple[Leaf, Leaf | None], ...], Any, Any, Any]


@flax.struct.dataclass
class DraftState:
    """KV pages of a drafter, and its memory of each row of the request table."""

    # (data, scales) of each layer's pages. Draft model: entry p is of token p. Head: of token p + 1 and hidden state p
    page_arrays: tuple[tuple[Leaf, Leaf | None], ...]
    # Draft model: int32[rows, 2], (position, token) of the last draft of each row. Its KV is not in the pages, but
    # all KV before it is. If the target accepts all drafts, the next proposal computes it. Head: None
    tail: Leaf | None
    # Head: [rows, hidden_size], the head's output at the row's last absorbed position. Draft model: None
    hidden: Leaf | None
    # Head: int32[rows, 2], (next index, first block). The head has absorbed all indices of a row from the start of the
    # first block to the one before the next index. Attention sees no others. Draft model: None
    progress: Leaf | None
    page_v_dim: int | None = flax.struct.field(pytree_node=False, default=None)  # `KVPages.v_dim`

    @property
    def arrays(self) -> DraftArrays:
        """The arrays as plain tuples, the arguments of programs."""
        return self.page_arrays, self.tail, self.hidden, self.progress


@dataclasses.dataclass(frozen=True)
class DraftSizes:
    """Sizes of the arrays of a `DraftState`."""

    num_blocks: int  # of the target's pool
    block_size: int
    rows: int        # of the request table
    is_head: bool    # a head keeps hidden states; a draft model does not


def as_pages(page_arrays: tuple[tuple[Leaf, Leaf | None], ...], page_v_dim: int | None) -> tuple[KVPages, ...]:
    """KVPages for each layer."""
    return tuple(KVPages(data, scales, page_v_dim) for data, scales in page_arrays)


def page_arrays_of(pages: tuple[KVPages, ...]) -> tuple[tuple[Leaf, Leaf | None], ...]:
    """The arrays of `as_pages`."""
    return tuple((each.data, each.scales) for each in pages)


def draft_state_shapes(
    spec: DecoderSpec, sizes: DraftSizes, *, dtype: np.dtype, kv_format: KVFormat | None = None,
    placement: Placement | None = None,
) -> DraftState:  # fmt: skip
    """A state of ShapeDtypeStructs, to compile with and to count bytes.

    spec: of the drafter. dtype: of its hidden states. kv_format: of its pages; None: pages of `dtype`.
    """
    sharding = None if placement is None else placement.sharding

    def array(dtype: np.dtype | type, *shape: int) -> Any:  # takes the place of a jax.Array in the state
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    pages = [
        (kv_format or KVFormat(dtype)).page_shapes(own, sizes.block_size, num_blocks, sharding)
        for own, num_blocks in _layers(spec, sizes.num_blocks)
    ]
    return DraftState(
        page_arrays=page_arrays_of(tuple(pages)),
        tail=None if sizes.is_head else array(np.int32, sizes.rows, 2),
        hidden=array(dtype, sizes.rows, spec.hidden_size) if sizes.is_head else None,
        progress=array(np.int32, sizes.rows, 2) if sizes.is_head else None,
        page_v_dim=pages[0].v_dim,
    )


def create_draft_state(
    spec: DecoderSpec, sizes: DraftSizes, *, dtype: np.dtype, placement: Placement, kv_format: KVFormat | None = None,
) -> DraftState:  # fmt: skip
    """Allocate a state on the device, filled with zeros. Arguments as in `draft_state_shapes`."""
    one_layer, made = group_layers((None,), spec.max_position), kv_format or KVFormat(dtype)
    pages: list[KVPages] = []
    for own, num_blocks in _layers(spec, sizes.num_blocks):
        pages += made.create_pages(own, one_layer, sizes.block_size, num_blocks, placement.sharding)
    shapes = draft_state_shapes(spec, sizes, dtype=dtype).replace(page_arrays=())
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=placement.sharding), shapes)
    return rest.replace(page_arrays=page_arrays_of(tuple(pages)))


def draft_block_bytes(spec: DecoderSpec, block_size: int, kv_format: KVFormat) -> int:
    """Bytes of one block in all page arrays of a drafter. The memory plan adds them to the target's `block_bytes`."""
    pages = (kv_format.page_shapes(own, block_size) for own, num_blocks in _layers(spec, 2) if num_blocks > 1)
    return sum(_bytes(array) for page in pages for array in (page.data, page.scales) if array is not None)


def _layers(spec: DecoderSpec, num_blocks: int) -> list[tuple[DecoderSpec, int]]:
    """Spec and number of blocks of each layer's pages. A layer that reads another one's KV has a page that is unused.
    """
    return [
        (spec.of_layer(i), num_blocks if spec.kv_of(i).source is None else 1) for i in range(spec.num_layers)
    ]


def draft_table_bytes(spec: DecoderSpec, rows: int, dtype: np.dtype, *, is_head: bool) -> int:
    """Bytes of a drafter's state without its pages. The memory plan adds them to the target's `table_bytes`."""
    shapes = draft_state_shapes(spec, DraftSizes(1, 8, rows, is_head), dtype=dtype)
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(shapes.replace(page_arrays=())))


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
