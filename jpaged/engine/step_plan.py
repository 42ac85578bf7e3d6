"""StepPlan: what one step computes. Made by the scheduler, packed and run by the runner; host data only."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class SamplerVariant(enum.IntEnum):
    """What the sampler of a step must be able to do; the largest need of any row that samples. A program each."""

    GREEDY = 0    # argmax only
    RANDOM = 1    # temperature, top_k, top_p and min_p
    FULL = 2      # everything


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask of ids: bit i % 32 of word i // 32 says whether id i may be sampled."""
    return -(-vocab_size // 32)


class BlockMove(enum.IntEnum):
    """What is done to a block's content before a step."""

    COPY = 0       # from a block to a block: copy-on-write
    TO_HOST = 1    # from a block to a slot of the host tier
    TO_DEVICE = 2  # from a slot of the host tier to a block


@dataclasses.dataclass(frozen=True, slots=True)
class TransferCosts:
    """What the runner has measured, for the choice between moving a block's content and computing it again."""

    seconds_per_move: float   # of a block, one way
    seconds_per_token: float  # of a prompt
    seconds_to_begin: float = 0.0  # of any number of moves at once

    def keeping_pays(self, block_size: int) -> bool:
        """Whether moving a block to the host and back takes less time than computing its tokens."""
        return 2 * self.seconds_per_move < block_size * self.seconds_per_token

    def moves_pay(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether fetching so many blocks from the host takes less time than computing their tokens."""
        moving = self.seconds_to_begin + num_blocks * self.seconds_per_move
        return moving < num_tokens * self.seconds_per_token


@dataclasses.dataclass(frozen=True, slots=True)
class RowExtras:
    """What a row has that its fields have no room for; each None where the request does not ask for it."""

    # known tokens that penalties count: the prompt's, and behind it the output's
    token_ids: np.ndarray | None = None  # int32[N]
    prompt_len: int = 0
    bias_ids: np.ndarray | None = None   # int32[B]; B <= sampling_params.MAX_LOGIT_BIAS
    bias: np.ndarray | None = None       # float32[B]  added to the logits
    mask: np.ndarray | None = None       # uint32[W]   bit i % 32 of word i // 32: id i may be sampled
    custom: np.ndarray | None = None     # float32[P]  parameters of all custom processors, in their order


@dataclasses.dataclass(frozen=True, slots=True)
class RowMask:
    """Which ids a row may sample from now on."""

    row: int
    words: np.ndarray  # uint32[W], as of RowExtras


@dataclasses.dataclass(frozen=True, slots=True)
class RowInit:
    """The state of a table row whose request (re)starts: sent once, kept on the device from then on."""

    row: int
    num_computed: int       # tokens whose KV is already there (a prefix hit); the next token has this position
    rope_len: int           # length that a rope which depends on it goes by at least: the prompt's, usually
    blocks: np.ndarray      # int32[B, 3]  (group, index in its block table, physical block): all the row holds now
    temperature: float      # 0 = greedy
    top_p: float            # (0, 1]
    top_k: int              # 0 = all
    min_p: float            # [0, 1]
    seed: int               # 0 <= seed < 2**64
    sample_index: int = 0   # which of `n` parallel samples this is
    beam_temperature: float = 0.0  # divides the logits that log-probabilities are made of; 0 = no beam: the model's own
    typical_p: float = 1.0         # (0, 1]
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    processors: int = 0            # bit i: custom processor i is asked for
    logprobs: bool = False         # its tokens' log-probabilities are told; without, what comes for them is nothing
    extras: RowExtras | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step computes. Rows are distinct; decodes come first."""

    rows: np.ndarray          # int32[R]     row of the request table
    num_tokens: np.ndarray    # int32[R]     tokens this row advances by; 1 for a decode; 0 for a fork, last of all
    num_decodes: int          #              the first so many rows take their one token from the table (last sampled)
    samples: np.ndarray       # bool[R]      the row reaches the end of its known tokens, so it samples one more
    prompt_tokens: np.ndarray # int32[P]     known ids for rows num_decodes.. in order; P = their num_tokens summed
    # int32[U, 4]  (row, group, index in its block table of that group, physical block): of rows that run on
    block_updates: np.ndarray
    row_inits: tuple[RowInit, ...] = ()  # rows that (re)start in this step; their blocks are not in block_updates
    sampler: SamplerVariant = SamplerVariant.GREEDY
    # int32[F]  of each fork, at the end of `rows`: the place in `rows` of the one whose last token it samples from
    forked_from: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    # int32[M, 3]  (BlockMove, from, to): done before the step, in this order
    moves: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3), np.int32))
    masks: tuple[RowMask, ...] = ()  # that change in this step
    # int32[2, S]  tokens whose successor is known and is to be told about: their place among the step's tokens, and the
    # successor's id
    scored: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((2, 0), np.int32))
    # What may be sampled follows from tokens that are on their way: nothing is, until `Runner.sample` is called.
    waits_for_masks: bool = False

    @property
    def total_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.num_tokens.sum())


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """What there is to say of known tokens; fields as of StepResult."""

    logprobs: np.ndarray      # float32[S]
    ranks: np.ndarray         # int32[S]
    top_ids: np.ndarray       # int32[S, K]
    top_logprobs: np.ndarray  # float32[S, K]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, row by row in the plan's order; rows that do not sample hold garbage."""

    token_ids: np.ndarray                # int32[R]; of a step that pools: none
    # Only from SamplerVariant.FULL, else None. Natural logarithms of the model's own distribution (raw, float32).
    logprobs: np.ndarray | None = None      # float32[R]     of the sampled token
    ranks: np.ndarray | None = None         # int32[R]       1 = most likely
    top_ids: np.ndarray | None = None       # int32[R, K]    most likely first; K = max_logprobs
    top_logprobs: np.ndarray | None = None  # float32[R, K]
    # Of a plan's `scored`: float32[S], int32[S], int32[S, K], float32[S, K], as the four above
    scores: "Scores | None" = None
    # Only from a step that pools: of each row's last token, its hidden state after the final norm, or its scores.
    pooled: np.ndarray | None = None        # float32[R, size]


class Runner(Protocol):
    """The device, as the engine sees it. `runtime.runner.ModelRunner` is the real one."""

    num_blocks: int              # blocks of the KV pool; ids 0 .. num_blocks - 1 are all usable
    block_size: int
    # Groups of layers, each with its own block tables over the one pool: how far the group's layers see, the token
    # itself included; None = to the beginning. What lies before that may have been given to another.
    windows: tuple[int | None, ...]
    max_num_seqs: int            # rows of the request table
    max_num_batched_tokens: int  # most tokens in one plan
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    # A sequence that grows beyond so many tokens is computed anew, with a rope_len beyond it (longrope); None = never.
    longrope_switch_len: int | None
    host_slots: int                        # blocks that the host tier has room for; 0 = there is none
    transfer_costs: TransferCosts | None   # there where host_slots are

    # What a jump over forced tokens costs all: of so many for each running request it must be longer.
    min_jump_per_request: float

    @property
    def compiles_after_ready(self) -> int:
        """Programs compiled after ready: 0, or something is wrong."""
        ...

    def dispatch(self, plan: StepPlan) -> Any:
        """Start a step; returns at once with a handle for collect. Steps run in the order of dispatch."""
        ...

    def sample(self, handle: Any, masks: Sequence[RowMask]) -> Any:
        """Sample for a step whose plan waits for masks: these are the ones that were not known. A new handle."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a dispatched step and fetch what it gave."""
        ...

    def prefix_cacheable(self, prompt_len: int) -> bool:
        """Whether KV of a prompt of this length may be shared (not beyond a dynamic-rope model's first range)."""
        ...

    def close(self) -> None:
        """Give the device memory back."""
        ...
