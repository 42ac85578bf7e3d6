"""DeviceState: the arrays that stay on the device between steps. Each step donates and returns them."""

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Int

from jpaged.engine.step_plan import RowExtras, RowInit, mask_words
from jpaged.kv_groups import KVGroups
from jpaged.models.spec import DecoderSpec
from jpaged.params.sampling import COLUMNS, MAX_LOGIT_BIAS, NUMBERS
from jpaged.runtime.kv_format import KVFormat
from jpaged.runtime.placement import Placement
from pallas_kernels import KVPages
from pallas_kernels.kv_pages import page_format, zeros_of

if TYPE_CHECKING:
    Leaf = jax.Array
else:
    Leaf = Any  # JAX also builds these classes of shapes, formats or None


class Field(enum.IntEnum):
    """Columns of the request table, besides `COLUMNS`. Floats and the seed's halves are stored as bits of an int32."""

    LENGTH = 0             # tokens whose KV is in the pages; also the position of the next token
    LAST_TOKEN = 1         # id of the last sampled token: the input of the next decode
    ROPE_LEN = 2           # minimum sequence length for a rope that depends on the length
    TEMPERATURE = 3        # float32; 0 = greedy
    SEED_LOW = 7           # uint32
    SEED_HIGH = 8          # uint32
    SAMPLE_INDEX = 9       # index of this sample among the n of a request group
    BEAM_TEMPERATURE = 10  # float32; divides the logits before log-probabilities are computed; 0 = not a beam
    FLAGS = 15             # bits of `Flag`, and the slot of the row's adapter from ADAPTER_BIT on
    PROCESSORS = 16        # bit i: custom logits processor i applies


NUM_FIELDS = len({*Field, *COLUMNS.values()})


class Flag(enum.IntFlag):
    """Bit flags of a row. COUNTS, BIAS and MASK name valid fields of `SamplingState`. Other fields may be stale."""

    COUNTS = 1
    BIAS = 2
    MASK = 4
    LOGPROBS = 8  # the row wants log-probabilities
    BIAS_SCORES = 16  # log-probabilities are of its first `bias_ids`, not of the most likely ids
    SAMPLING_MASK = 32  # the row wants the ids from which its token was drawn


# FLAGS holds 1 + the slot of the row's adapter from this bit on; 0: the base model alone. A column of its own would
# change the programs of engines without adapters.
ADAPTER_BIT = 8


@flax.struct.dataclass
class SamplingState:
    """Extras of all rows: sampling state outside the request table. Only SamplerVariant.FULL reads it.

    A row's `Flag`s name its valid fields.
    """

    counts: Leaf    # int32[max_num_seqs, vocab]  2 * (times generated) + (1 if the prompt has the id)
    masks: Leaf     # uint32[max_num_seqs, mask_words(vocab)]  bit i % 32 of word i // 32: id i may be sampled
    bias_ids: Leaf  # int32[max_num_seqs, MAX_LOGIT_BIAS]  ids >= vocab are padding
    bias: Leaf      # float32[max_num_seqs, MAX_LOGIT_BIAS]
    custom: Leaf    # float32[max_num_seqs, parameters of all custom logits processors]


@flax.struct.dataclass
class DeviceState:
    """KV pages, recurrent state, the request table and the extras. A running request owns one row of the table."""

    # (data, scales) of each of `pages`: building a call's results takes 1 us for 32 tuples, 32 us for 32 KVPages
    page_arrays: tuple[tuple[Leaf, Leaf | None], ...]
    table: Leaf                 # int32[max_num_seqs, NUM_FIELDS]
    # int32[max_num_seqs, kv_groups * width]  block tables by KV group; stale or 0 past a row's end or before its window
    blocks: Leaf
    hidden: Leaf  # [state_tokens, hidden_size]  hidden states of the last step's tokens, before final norm
    # int32[2, program_rows]  rows of the last step that sample or pool: (row, index in `hidden`); padding is -1
    output_rows: Leaf
    # for each recurrent layer, its arrays [state_slots, ...] (`Recurrence.state_shapes`). Slot i < max_num_seqs is of
    # row i, the others are snapshots
    recurrent: tuple[tuple[Leaf, ...], ...]
    # of the last verify step: int32[program_rows] with the length of each row before it, then the inputs of recurrent
    # layers, each array of `Recurrence.input_shapes` as [layers, verify_tokens, ...]. Empty: there are no verify steps
    state_inputs: tuple[Leaf, ...]
    sampling: SamplingState
    page_v_dim: int | None = flax.struct.field(pytree_node=False, default=None)  # `KVPages.v_dim`

    @property
    def pages(self) -> tuple[KVPages, ...]:
        """KVPages for each page array of `KVGroups`. With one KV group there is one per layer."""
        return tuple(KVPages(data, scales, self.page_v_dim) for data, scales in self.page_arrays)

    def with_pages(self, pages: Iterable[KVPages]) -> "DeviceState":
        """A state with these pages, and all other arrays of this state."""
        return self.replace(page_arrays=tuple((each.data, each.scales) for each in pages))


@dataclasses.dataclass(frozen=True)
class StateSizes:
    """Sizes of the arrays of a `DeviceState`."""

    num_blocks: int
    block_size: int
    rows: int        # of the request table
    width: int       # entries of a block table
    tokens: int      # capacity of `hidden`
    program_rows: int  # maximum rows of a program
    custom: int = 0  # parameters of all custom logits processors
    snapshots: int = 0  # slots of recurrent layers, besides one for each row
    verify_tokens: int = 0  # most tokens of a verify program; 0: there is none
    samples: bool = True  # False: not the last pipeline stage; `hidden` and the extras are empty


def state_shapes(
    spec: DecoderSpec, kv_groups: KVGroups, sizes: StateSizes, *, dtype: np.dtype, kv_format: KVFormat | None = None,
    placement: Placement | None = None,
) -> DeviceState:  # fmt: skip
    """A state of ShapeDtypeStructs, to compile with and to count bytes.

    dtype: of hidden states. kv_format: of pages; None: pages of `dtype`.
    """
    sharding = None if placement is None else placement.sharding
    of_pages = None if placement is None else placement.of_pages(latent=spec.latent is not None)

    def array(dtype: np.dtype | type, *shape: int) -> Any:  # takes the place of a jax.Array in the state
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    rows = sizes.rows
    page = (kv_format or KVFormat(dtype)).page_shapes(spec, sizes.block_size, sizes.num_blocks, of_pages)
    vocab = 0 if spec.pools or not sizes.samples else spec.vocab_size
    return DeviceState(
        page_arrays=((page.data, page.scales),) * kv_groups.num_arrays,
        page_v_dim=page.v_dim,
        table=array(np.int32, rows, NUM_FIELDS),
        blocks=array(np.int32, rows, len(kv_groups.windows) * sizes.width),
        hidden=array(dtype, sizes.tokens if sizes.samples else 0, spec.hidden_size),
        output_rows=array(np.int32, 2, sizes.program_rows),
        recurrent=_recurrent_shapes(spec, sizes, dtype, placement),
        state_inputs=_input_shapes(spec, sizes, dtype, array(np.int32, sizes.program_rows), placement),
        sampling=SamplingState(
            counts=array(np.int32, rows, vocab),
            masks=array(np.uint32, rows, mask_words(vocab)),
            bias_ids=array(np.int32, rows, MAX_LOGIT_BIAS),
            bias=array(np.float32, rows, MAX_LOGIT_BIAS),
            custom=array(np.float32, rows, sizes.custom),
        ),
    )


def _recurrent_shapes(
    spec: DecoderSpec, sizes: StateSizes, dtype: np.dtype, placement: Placement | None
) -> tuple[tuple[Any, ...], ...]:
    """`DeviceState.recurrent`: one slot for each row of the request table and for each snapshot.

    Arrays are row-major, as pages are: for a v5e, XLA would copy states with heads of 64 in every step.
    """
    recurrence = spec.recurrence
    if recurrence is None:
        return ()
    lead = (sizes.rows + sizes.snapshots,)
    kinds = [recurrence.of_layer(layer) for layer, has_state in enumerate(spec.recurrent) if has_state]
    return tuple(
        tuple(
            _row_major(_of_heads(each, lead, axis, placement))
            for each, axis in zip(kind.state_shapes(dtype), kind.state_axes, strict=True)
        )
        for kind in kinds
    )


def _row_major(one: Any) -> Any:
    """The array with the layout of pages, if it has a place."""
    form = None if one.sharding is None else page_format(one.sharding, len(one.shape))
    return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=form)


def _input_shapes(
    spec: DecoderSpec, sizes: StateSizes, dtype: np.dtype, lengths: Any, placement: Placement | None
) -> tuple[Any, ...]:
    """`DeviceState.state_inputs`."""
    recurrence = spec.recurrence
    if recurrence is None or not sizes.verify_tokens:
        return ()
    lead, arrays = (sum(spec.recurrent), sizes.verify_tokens), recurrence.input_shapes(dtype)
    inputs = (_of_heads(each, lead, axis, placement) for each, axis in zip(arrays, recurrence.input_axes, strict=True))
    return lengths, *inputs


def _of_heads(one: jax.ShapeDtypeStruct, lead: tuple[int, ...], axis: int | None, placement: Placement | None) -> Any:
    """An array with `lead` before the axes of `one`. axis: of `one`, which devices share; None: none."""
    shape = jax.ShapeDtypeStruct((*lead, *one.shape), one.dtype)
    return shape if placement is None else placement.split(shape, None if axis is None else axis + len(lead))


def create_state(
    spec: DecoderSpec, kv_groups: KVGroups, sizes: StateSizes, *, dtype: np.dtype, placement: Placement,
    kv_format: KVFormat | None = None,
) -> DeviceState:  # fmt: skip
    """Allocate a state on the device, filled with zeros. Arguments as in `state_shapes`."""
    pages = (kv_format or KVFormat(dtype)).create_pages(
        spec, kv_groups, sizes.block_size, sizes.num_blocks, placement.of_pages(latent=spec.latent is not None)
    )
    rest = state_shapes(spec, kv_groups, sizes, dtype=dtype, placement=placement).with_pages(())
    return jax.tree.map(zeros_of, rest).with_pages(pages)


def bytes_without_pages(state: DeviceState) -> int:
    """Bytes of all arrays except the KV pages, of a state or its shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.with_pages(())))


def formats(state: DeviceState) -> DeviceState:
    """Memory layouts of a state's arrays; None: unspecified. As `out_shardings` they avoid copies of donated arrays."""
    return jax.tree.map(lambda x: x.format if x.format.layout else None, state)


def adapter_slots(fields: Int[Array, "rows num_fields"]) -> Int[Array, " rows"]:
    """Slot of the adapter of each row of the request table; NO_ADAPTER: the base model alone."""
    return (fields[:, Field.FLAGS] >> ADAPTER_BIT) - 1


def row_values(init: RowInit) -> np.ndarray:
    """int32[NUM_FIELDS]: the fields of a row, as the request table stores them."""
    values = np.zeros(NUM_FIELDS, np.int32)
    values[Field.LENGTH] = init.num_computed
    values[Field.ROPE_LEN] = init.rope_len
    values[Field.SAMPLE_INDEX] = init.sample_index
    values[Field.FLAGS] = _flags(init.extras) | (Flag.LOGPROBS if init.logprobs else 0)
    values[Field.FLAGS] |= Flag.SAMPLING_MASK if init.sampling_mask else 0
    values[Field.FLAGS] |= 1 + init.adapter_slot << ADAPTER_BIT
    values[Field.PROCESSORS] = init.processors
    floats = values.view(np.float32)
    floats[Field.TEMPERATURE] = init.temperature
    floats[Field.BEAM_TEMPERATURE] = init.beam_temperature
    for (name, column), value in zip(COLUMNS.items(), init.columns, strict=True):
        (floats if name in NUMBERS else values)[column] = value
    unsigned = values.view(np.uint32)
    unsigned[Field.SEED_LOW] = init.seed & 0xFFFFFFFF
    unsigned[Field.SEED_HIGH] = init.seed >> 32
    return values


def _flags(extras: RowExtras | None) -> Flag:
    flags = Flag(0)
    if extras is not None:
        flags |= Flag.COUNTS if extras.token_ids is not None else flags
        flags |= Flag.BIAS if extras.bias is not None else flags
        flags |= Flag.BIAS_SCORES if extras.scores_bias_ids else flags
        flags |= Flag.MASK if extras.mask is not None else flags
    return flags
