"""DeviceState: what lives on the device between steps. Donated to every step and given back by it."""

import dataclasses
import enum
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jpaged.engine.step_plan import RowExtras, RowInit, mask_words
from jpaged.kv_groups import KVGroups
from jpaged.models.spec import DecoderSpec
from jpaged.params.sampling import MAX_LOGIT_BIAS
from pallas_kernels import KVPages


class Field(enum.IntEnum):
    """Columns of the request table. Floats and the two halves of the seed are kept as the bits of an int32."""

    LENGTH = 0         # tokens whose KV is in the pages; the next token has this position
    LAST_TOKEN = 1     # id that was sampled last: what a decode computes next
    ROPE_LEN = 2       # length that a rope which depends on it goes by at least
    TEMPERATURE = 3    # float32; 0 = greedy
    TOP_P = 4          # float32
    TOP_K = 5          # 0 = all
    MIN_P = 6          # float32
    SEED_LOW = 7       # uint32
    SEED_HIGH = 8      # uint32
    SAMPLE_INDEX = 9   # which of n parallel samples
    BEAM_TEMPERATURE = 10  # float32; divides the logits that log-probabilities are made of; 0 = not a beam
    TYPICAL_P = 11     # float32
    PRESENCE = 12      # float32
    FREQUENCY = 13     # float32
    REPETITION = 14    # float32
    FLAGS = 15         # of `Flag`
    PROCESSORS = 16    # bit i: the row asks for custom processor i


NUM_FIELDS = len(Field)


class Flag(enum.IntFlag):
    """What of `SamplingState` a row has: what else stands there is left over from others. And what it is told."""

    COUNTS = 1
    BIAS = 2
    MASK = 4
    LOGPROBS = 8


@flax.struct.dataclass
class SamplingState:
    """What rows have beside their fields, where they ask for it: see `Flag`. Only SamplerVariant.FULL reads it."""

    counts: Any    # int32[max_num_seqs, vocab]  twice the times that an id was generated, + 1 where the prompt has it
    masks: Any     # uint32[max_num_seqs, mask_words(vocab)]  bit i % 32 of word i // 32: id i may be sampled
    bias_ids: Any  # int32[max_num_seqs, MAX_LOGIT_BIAS]  those past the vocabulary are padding
    bias: Any      # float32[max_num_seqs, MAX_LOGIT_BIAS]
    custom: Any    # float32[max_num_seqs, parameters of all custom processors]


@flax.struct.dataclass
class DeviceState:
    """KV pages and the request table. A row of the table is one running request's place."""

    pages: tuple[KVPages, ...]  # one an array of `KVGroups`: one a layer where all layers are of one kind
    table: Any                  # int32[max_num_seqs, NUM_FIELDS]
    # int32[max_num_seqs, groups * width]  block tables, one group's behind the other's; entries past a row's end or
    # before its window are stale or 0
    blocks: Any
    hidden: Any                 # [max_num_batched_tokens, hidden_size]  what the layers gave of the last step's tokens
    sampling: SamplingState


@dataclasses.dataclass(frozen=True)
class StateSizes:
    """Sizes of a state's arrays."""

    num_blocks: int
    block_size: int
    rows: int    # of the request table
    width: int   # entries of a block table
    tokens: int  # most of one step
    custom: int = 0  # parameters of all custom logits processors


def state_shapes(
    spec: DecoderSpec, groups: KVGroups, sizes: StateSizes, *, dtype: Any, sharding: Any = None
) -> DeviceState:
    """A state as ShapeDtypeStructs: to compile without taking memory. sharding: a jax Device or Sharding."""

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    rows = sizes.rows
    page = KVPages.shapes(
        sizes.num_blocks, sizes.block_size, spec.num_kv_heads, spec.head_dim, dtype, v_dim=spec.page_v_dim,
        sharding=sharding,
    )  # fmt: skip
    vocab = 0 if spec.pools else spec.vocab_size
    return DeviceState(
        pages=(page,) * groups.num_arrays,
        table=array(np.int32, rows, NUM_FIELDS),
        blocks=array(np.int32, rows, len(groups.windows) * sizes.width),
        hidden=array(dtype, sizes.tokens, spec.hidden_size),
        sampling=SamplingState(
            counts=array(np.int32, rows, vocab),
            masks=array(np.uint32, rows, mask_words(vocab)),
            bias_ids=array(np.int32, rows, MAX_LOGIT_BIAS),
            bias=array(np.float32, rows, MAX_LOGIT_BIAS),
            custom=array(np.float32, rows, sizes.custom),
        ),
    )


def create_state(
    spec: DecoderSpec, groups: KVGroups, sizes: StateSizes, *, dtype: Any, device: Any = None
) -> DeviceState:
    """Empty pages and an empty table on the device (a jax Device or Sharding)."""
    pages = tuple(
        KVPages.create(
            sizes.num_blocks, sizes.block_size, spec.num_kv_heads, spec.head_dim, dtype, v_dim=spec.page_v_dim,
            device=device,
        )
        for _ in range(groups.num_arrays)
    )  # fmt: skip
    rest = state_shapes(spec, groups, sizes, dtype=dtype).replace(pages=())
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=device), rest)
    return rest.replace(pages=pages)


def beside_pages(state: DeviceState) -> int:
    """Bytes of all but the KV pages, of a state or its shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.replace(pages=())))


def formats(state: DeviceState) -> Any:
    """How each array of a state lies in memory, None where it does not say, as `out_shardings` of a program.

    What is donated and comes out as it went in is never copied.
    """
    return jax.tree.map(lambda x: x.format if x.format.layout else None, state)


def row_values(init: RowInit) -> np.ndarray:
    """int32[NUM_FIELDS]: a row's fields as the table holds them."""
    values = np.zeros(NUM_FIELDS, np.int32)
    values[Field.LENGTH] = init.num_computed
    values[Field.ROPE_LEN] = init.rope_len
    values[Field.TOP_K] = init.top_k
    values[Field.SAMPLE_INDEX] = init.sample_index
    values[Field.FLAGS] = _flags(init.extras) | (Flag.LOGPROBS if init.logprobs else 0)
    values[Field.PROCESSORS] = init.processors
    floats = values.view(np.float32)
    floats[Field.TEMPERATURE] = init.temperature
    floats[Field.TOP_P] = init.top_p
    floats[Field.MIN_P] = init.min_p
    floats[Field.BEAM_TEMPERATURE] = init.beam_temperature
    floats[Field.TYPICAL_P] = init.typical_p
    floats[Field.PRESENCE] = init.presence_penalty
    floats[Field.FREQUENCY] = init.frequency_penalty
    floats[Field.REPETITION] = init.repetition_penalty
    unsigned = values.view(np.uint32)
    unsigned[Field.SEED_LOW] = init.seed & 0xFFFFFFFF
    unsigned[Field.SEED_HIGH] = init.seed >> 32
    return values


def _flags(extras: RowExtras | None) -> Flag:
    flags = Flag(0)
    if extras is not None:
        flags |= Flag.COUNTS if extras.token_ids is not None else flags
        flags |= Flag.BIAS if extras.bias is not None else flags
        flags |= Flag.MASK if extras.mask is not None else flags
    return flags
