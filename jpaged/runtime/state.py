"""DeviceState: what lives on the device between steps. Donated to every step and given back by it."""

import enum
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jpaged.engine.step_plan import RowInit
from jpaged.kv_groups import KVGroups
from jpaged.models.spec import DecoderSpec
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


NUM_FIELDS = len(Field)


@flax.struct.dataclass
class DeviceState:
    """KV pages and the request table. A row of the table is one running request's place."""

    pages: tuple[KVPages, ...]  # one an array of `KVGroups`: one a layer where all layers are of one kind
    table: Any                  # int32[max_num_seqs, NUM_FIELDS]
    # int32[max_num_seqs, groups * width]  block tables, one group's behind the other's; entries past a row's end or
    # before its window are stale or 0
    blocks: Any
    hidden: Any                 # [max_num_batched_tokens, hidden_size]  what the layers gave of the last step's tokens


def create_state(
    spec: DecoderSpec, groups: KVGroups, *, num_blocks: int, block_size: int, rows: int, width: int, tokens: int,
    dtype: Any, device: Any = None,
) -> DeviceState:  # fmt: skip
    """Empty pages and an empty table on the device (a jax Device or Sharding).

    width: entries of a block table. tokens: most of one step.
    """
    pages = tuple(
        KVPages.create(
            num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype, v_dim=spec.page_v_dim, device=device
        )
        for _ in range(groups.num_arrays)
    )
    return DeviceState(
        pages=pages,
        table=jnp.zeros((rows, NUM_FIELDS), jnp.int32, device=device),
        blocks=jnp.zeros((rows, len(groups.windows) * width), jnp.int32, device=device),
        hidden=jnp.zeros((tokens, spec.hidden_size), dtype, device=device),
    )


def state_shapes(
    spec: DecoderSpec, groups: KVGroups, *, num_blocks: int, block_size: int, rows: int, width: int, tokens: int,
    dtype: Any, sharding: Any = None,
) -> DeviceState:  # fmt: skip
    """The same as ShapeDtypeStructs: to compile without taking memory."""
    page = KVPages.shapes(
        num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype, v_dim=spec.page_v_dim, sharding=sharding
    )
    return DeviceState(
        pages=(page,) * groups.num_arrays,
        table=jax.ShapeDtypeStruct((rows, NUM_FIELDS), np.dtype(np.int32), sharding=sharding),
        blocks=jax.ShapeDtypeStruct((rows, len(groups.windows) * width), np.dtype(np.int32), sharding=sharding),
        hidden=jax.ShapeDtypeStruct((tokens, spec.hidden_size), np.dtype(dtype), sharding=sharding),
    )


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
    floats = values.view(np.float32)
    floats[Field.TEMPERATURE] = init.temperature
    floats[Field.TOP_P] = init.top_p
    floats[Field.MIN_P] = init.min_p
    floats[Field.BEAM_TEMPERATURE] = init.beam_temperature
    unsigned = values.view(np.uint32)
    unsigned[Field.SEED_LOW] = init.seed & 0xFFFFFFFF
    unsigned[Field.SEED_HIGH] = init.seed >> 32
    return values
