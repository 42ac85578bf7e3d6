"""State of an engine at one moment, as plain data: the owners of each block, the running and the waiting requests.

It contains no prompts, texts or token ids: requests are named by their ids. `jpaged.engine.observe.inspect` makes it.
"""

import dataclasses

from jpaged.outputs import EngineStats


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOwner:
    """One entry of a request's block table."""

    request_id: str
    sample: int  # index of the parallel sample in its request
    group: int   # index of the KV group: a request has one block table per KV group
    index: int   # index in the block table; the block's first token has position index * block_size


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """A physical block.

    A block with an owner is *used*. A free block in the prefix index is *cached*. Any other block is *empty*.
    """

    block: int
    ref_count: int
    owners: tuple[BlockOwner, ...]  # length is ref_count; any other length is a bug
    prefix_hash: str | None         # SHA-256 in hexadecimal, for a full block in the prefix index
    last_use: int | None            # last step in which the block had an owner; None: never
    tokens: int                     # slots with KV, including the slots that the running step writes


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request, or one of its parallel samples, in the request table or in the queue."""

    request_id: str
    sample: int
    status: str            # prefill or decode in the request table; waiting or preempted in the queue
    row: int | None        # in the request table; None in the queue
    priority: int
    prompt_tokens: int
    output_tokens: int     # sampled so far
    computed_tokens: int   # tokens of prompt and output with KV; 0 in the queue
    cached_tokens: int     # prompt tokens found in the prefix index at the start
    num_blocks: int        # owned blocks, shared ones included
    preemptions: int
    age_seconds: float     # since the request arrived
    adapter: str | None = None  # name of the LoRA adapter; None: the base model alone


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Totals of the KV pool. used_blocks + cached_blocks + empty_blocks = num_blocks."""

    num_blocks: int
    block_size: int     # tokens per block
    num_groups: int     # KV groups: block tables per request
    used_blocks: int    # blocks with an owner
    shared_blocks: int  # blocks with more than one owner
    cached_blocks: int  # free blocks in the prefix index: a prompt with the same prefix reuses them
    empty_blocks: int   # free blocks without reusable KV
    references: int     # entries of all block tables: the number of used blocks if none were shared
    used_tokens: int    # filled slots of used blocks


@dataclasses.dataclass(frozen=True, slots=True)
class StepSnapshot:
    """A step that the device has finished. It computed decodes + prompt_tokens + drafts tokens."""

    index: int            # steps finished before this one
    rows: int             # rows of the request table that took part
    decodes: int          # rows that computed their last sampled token
    prompt_tokens: int    # tokens of chunks of prompts
    seconds: float        # from its dispatch or the previous step's end, whichever is later, to its result
    age_seconds: float    # since its result
    drafts: int = 0       # drafts that it checked, with speculative decoding


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of an engine between two steps: the KV pool, all its blocks, the request table and the queue."""

    step: int                              # steps scheduled so far; `last_use` counts the same steps
    pool: PoolSnapshot
    blocks: tuple[BlockSnapshot, ...]      # blocks[i].block == i
    running: tuple[RequestSnapshot, ...]   # in order of arrival
    waiting: tuple[RequestSnapshot, ...]   # in the order in which they will start
    max_num_seqs: int                      # rows of the request table
    max_num_batched_tokens: int            # token budget of a step
    stats: EngineStats
    last_steps: tuple[StepSnapshot, ...]   # up to 256 finished steps, oldest first
    weight_version: int | str = 0          # `CompletionOutput.weight_version` of the next token
    engine: int = 0                        # index of this engine, with data_parallel_size
    num_engines: int = 1
