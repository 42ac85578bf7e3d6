"""What an engine holds at one moment, as plain data: who owns which block, who runs, who waits.

There are no prompts, texts or token ids in it: requests go by their ids. Made by `jpaged.engine.inspect`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOwner:
    """One entry of a request's block table."""

    request_id: str
    sample: int  # which of the request's parallel samples
    group: int   # of layers: a request has a block table in each
    index: int   # place in that table: the block holds tokens index * block_size and on


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """A physical block.

    It is *used* while somebody owns it, *cached* if it is free and still has what its prefix hash says, else *empty*.
    """

    block: int
    ref_count: int
    owners: tuple[BlockOwner, ...]  # as many as ref_count says, or the books are wrong
    prefix_hash: str | None         # of a full block that the prefix index knows: its SHA-256 in hexadecimal
    last_use: int | None            # the engine's last step for an owner: the latest while it is used; None = never
    tokens: int                     # slots whose KV is there, or will be by the end of the step that runs


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request, or one of its parallel samples, in the table or in the queue."""

    request_id: str
    sample: int
    status: str            # in the table prefill or decode, in the queue waiting or preempted
    row: int | None        # of the request table; None in the queue
    priority: int
    prompt_tokens: int
    output_tokens: int     # sampled so far
    computed_tokens: int   # of these, tokens whose KV is there; 0 in the queue
    cached_tokens: int     # of the prompt, found in the prefix cache at the start
    num_blocks: int        # that it owns, shared ones included
    preemptions: int
    age_seconds: float     # since it arrived: of a request with status waiting, how long it waits


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The KV pool in figures. used + cached + empty = num_blocks."""

    num_blocks: int
    block_size: int     # tokens in a block
    num_groups: int     # block tables a request has
    used_blocks: int    # somebody owns them
    shared_blocks: int  # of these, blocks with more than one owner
    cached_blocks: int  # free, and found by a prompt that begins alike
    empty_blocks: int   # free, with nothing in them that is of use
    references: int     # entries of all block tables: what would be used without sharing
    used_tokens: int    # filled slots of used blocks


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine between two steps: its pool, every block of it, the request table, and the queue."""

    step: int                              # steps scheduled so far: the clock of `last_use`
    pool: PoolSnapshot
    blocks: tuple[BlockSnapshot, ...]      # all of them; blocks[i].block == i
    running: tuple[RequestSnapshot, ...]   # in the order of arrival
    waiting: tuple[RequestSnapshot, ...]   # in the order in which they will start
