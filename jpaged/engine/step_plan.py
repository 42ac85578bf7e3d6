"""The contract between the engine and the runner: `StepPlan`, `StepResult`, `Runner`. Host data only.

Called by: the scheduler writes plans; every runner reads them and writes results.
Owns: the types between host and device, and the protocol `Runner`.
Never: imports anything of `engine` or `runtime`.

1. The scheduler builds a `StepPlan`.
2. `Runner.dispatch` packs the plan, starts the step, and returns a handle at once.
3. If the plan waits for masks, the engine calls `Runner.sample` when it knows them.
4. `Runner.collect` waits for the step, and returns its `StepResult`.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jpaged.metrics import ProgramMetrics
from jpaged.params.sampling import NEUTRAL_COLUMNS

HandleT = TypeVar("HandleT")

# Results of a row in place of a token id.
NOTHING_ALLOWED = -1  # no id may be sampled
NOT_FINITE = -2       # the largest logit is NaN or infinite

FROM_DEVICE = -1  # in `DraftPlan.first`
EVERYTHING = -1   # all slots, in a move of kind `BlockMove.DROP` or `DROP_STATE`
NO_ADAPTER = -1   # slot of a request that uses the base model alone


class SamplerVariant(enum.IntEnum):
    """Features of the sampling program. A step uses the largest variant that one of its sampling rows needs."""

    GREEDY = 0    # argmax only
    RANDOM = 1    # temperature, top_k, top_p and min_p
    FULL = 2      # everything, log-probabilities included


def mask_words(vocab_size: int) -> int:
    """Number of 32-bit words of a mask. Bit i % 32 of word i // 32 is set if id i may be sampled."""
    return -(-vocab_size // 32)


def num_guesses(max_drafts: int) -> int:
    """Guesses of a row. A step in flight may take `max_drafts + 1` tokens of them before the row's drafts begin."""
    return 2 * max_drafts + 1


class BlockMove(enum.IntEnum):
    """Kinds of moves before a step."""

    COPY = 0       # block to block: copy on write
    TO_HOST = 1    # block to slot of the host tier
    TO_DEVICE = 2  # slot of the host tier to block
    STATE = 3      # state of recurrent layers, slot to slot: forks and snapshots
    STATE_TO_HOST = 4    # slot of a snapshot to slot of the host tier. Blocks and snapshots have separate host slots
    STATE_TO_DEVICE = 5  # slot of the host tier to slot of a row
    DROP = 6             # host slot of a block whose memory can be freed, or `EVERYTHING`
    DROP_STATE = 7       # host slot of a snapshot whose memory can be freed, or `EVERYTHING`


@dataclasses.dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Slots for the state of recurrent layers."""

    num_rows: int       # rows of the request table, each with the slot of its number
    num_snapshots: int  # slots after them
    interval: int       # blocks of a prompt between two snapshots
    slot_bytes: int = 1   # of a slot. Blocks and snapshots of the host tier share its bytes
    block_bytes: int = 1  # of a block of the KV pool


class TextShape(NamedTuple):
    """Texts that an encoder computes in one step: all are padded to the same length."""

    length: int  # slots of each text, in tokens
    rows: int    # texts


@dataclasses.dataclass(frozen=True, slots=True)
class TransferCosts:
    """Costs that the runner has measured. They decide between moving a block and recomputing its tokens."""

    seconds_per_move: float   # of one block, in one direction
    seconds_per_token: float  # of prompt computation
    seconds_to_begin: float = 0.0  # constant cost of a batch of moves
    seconds_per_state: float = 0.0  # to move a snapshot of recurrent state, in one direction

    def keeping_pays(self, block_size: int) -> bool:
        """Whether moving a block to the host and back takes less time than computing its tokens."""
        return 2 * self.seconds_per_move < block_size * self.seconds_per_token

    def keeping_state_pays(self, num_tokens: int) -> bool:
        """Whether moving a snapshot to the host and back takes less time than computing `num_tokens` tokens."""
        return 2 * self.seconds_per_state < num_tokens * self.seconds_per_token

    def moves_pay(self, num_blocks: int, num_tokens: int, *, with_state: bool = False) -> bool:
        """Whether fetching `num_blocks` blocks from the host takes less time than computing `num_tokens` tokens.

        with_state: a snapshot is fetched, too.
        """
        moving = self.seconds_to_begin + num_blocks * self.seconds_per_move + with_state * self.seconds_per_state
        return moving < num_tokens * self.seconds_per_token


@dataclasses.dataclass(frozen=True, slots=True)
class RowExtras:
    """Sampling state of a row that has no column in the request table. A field is None if the request lacks it."""

    token_ids: np.ndarray | None = None  # int32[N]    known tokens that penalties count: the prompt, then the output
    prompt_len: int = 0                  #             prompt tokens among them
    bias_ids: np.ndarray | None = None   # int32[B]    B <= params.sampling.MAX_LOGIT_BIAS
    bias: np.ndarray | None = None       # float32[B]  added to the logits of bias_ids
    # Return log-probabilities of the first `max_logprobs` bias_ids, instead of the most likely ids.
    scores_bias_ids: bool = False
    mask: np.ndarray | None = None       # uint32[W]   ids that may be sampled; see `mask_words`
    custom: np.ndarray | None = None     # float32[P]  parameters of all custom processors, in their order


@dataclasses.dataclass(frozen=True, slots=True)
class RowMask:
    """A new mask for a row. It stays valid until the next one.

    In a verify step it is the mask of one token of the row, for this step only.
    """

    row: int
    words: np.ndarray  # uint32[W]  see `mask_words`
    token: int = 0     # index of the plan's token whose sample it restricts; only read in a verify step


@dataclasses.dataclass(frozen=True, slots=True)
class RowInit:
    """Complete state of a row whose request starts or continues in it. The host sends it once, the device keeps it."""

    row: int
    num_computed: int       # tokens with KV in the row's blocks; also the position of the next token
    rope_len: int           # a length-dependent rope uses max(rope_len, tokens so far); usually the prompt's length
    blocks: np.ndarray      # int32[B, 3]  (kv_group, index in the block table, block): all blocks that the row holds
    temperature: float      # 0: greedy
    seed: int               # 0 <= seed < 2**64
    sample_index: int = 0   # index of the request among its request group's `n` parallel samples
    # Divides a beam's logits before its log-probabilities are computed. 0: not a beam, log-probabilities of the model.
    beam_temperature: float = 0.0
    columns: Sequence[float] = tuple(NEUTRAL_COLUMNS.values())  # sampling parameters, in the order of `COLUMNS`
    processors: int = 0            # bit i is set if the request uses custom processor i
    logprobs: bool = False         # return log-probabilities of this row's tokens; if False, they are undefined
    sampling_mask: bool = False    # return the ids from which this row's tokens were drawn; False: undefined
    extras: RowExtras | None = None
    adapter_slot: int = NO_ADAPTER


@dataclasses.dataclass(frozen=True, slots=True)
class DraftPlan:
    """Drafts of a verify step. Row i computes its last token and `num_tokens[i] - 1` drafts.

    The plan is made before the host knows the row's last tokens. So a guess has a position, and the device takes the
    guesses after the row's LENGTH. They count only if the guess for the last token's position is the last token.
    """

    guesses: np.ndarray  # int32[R, G]  guessed tokens; -1 is padding. G = `num_guesses(max_drafts)`
    first: np.ndarray    # int32[R]     position of the row's first guess; FROM_DEVICE: drafts of the runner's drafter
    # int32[R]  with recurrent layers: slot for the state at the last block boundary that the row's length reaches in
    # this step; -1: none is wanted. None: the model has no such layers
    snapshots: np.ndarray | None = None

    def after(self, index: int, position: int, last: int, count: int) -> list[int]:
        """Up to `count` drafts of row `index` after its last token, as the device finds them.

        position, last: of the row's last token.
        """
        guesses, start = self.guesses[index].tolist(), position - int(self.first[index])
        if start < -1 or start >= len(guesses) or (start >= 0 and guesses[start] != last):
            return []
        drafts = guesses[start + 1 : start + 1 + count]
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts


@dataclasses.dataclass(frozen=True, slots=True)
class AbsorbPlan:
    """Known tokens whose KV a draft model computes before it proposes. One run of an `absorb` program."""

    rows: np.ndarray        # int32[A]  row of the request table; a row is in it once
    first: np.ndarray       # int32[A]  position of the row's first token
    num_tokens: np.ndarray  # int32[A]
    tokens: np.ndarray      # int32[N]  token ids, concatenated in the order of the rows


@dataclasses.dataclass(frozen=True, slots=True)
class ModelDraftPlan:
    """Input of a draft model in a verify step. R rows, those of the step's plan.

    The draft model runs before the forward pass: first the entries of `absorbs`, in order, then the proposal.
    """

    num_drafts: np.ndarray  # int32[R]  drafts that the model proposes; 0: the row takes no part
    # int32[R]  known tokens that the proposal computes first. They end before LAST_TOKEN. 0 if the row continues
    num_known: np.ndarray
    # bool[R]  the row's step in flight verifies the model's last proposal. Only the device knows the accepted drafts
    continues: np.ndarray
    known: np.ndarray       # int32[sum(num_known)]  token ids, concatenated in the order of the rows
    absorbs: tuple[AbsorbPlan, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class HeadPlan:
    """Input of a draft head after a step's sample program. R rows, those of the step's plan."""

    next_tokens: np.ndarray  # int32[R]  token after a chunk that is not the prompt's last; -1: the row has sampled it
    starts: np.ndarray       # bool[R]   the head has not absorbed the row's step before this one
    # int32[R]  of rows that start: first block of the cached prefix with KV of the head. -1: none, so the head's
    # context starts at the next block boundary
    first_block: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A LoRA adapter to write into a slot on the device."""

    slot: int
    content: Any  # arrays of one slot, as the runner stores them


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """Input of one step, as host arrays.

    R rows of the request table take part, each at most once, in this order:

    1. `num_decodes` decodes. Each computes the token that it sampled last, which only the device may know, and samples
       the next one.
    2. Prompt rows. Each computes a chunk of known tokens, which are in the plan.
    3. Forks. Each computes nothing, and samples from the last hidden state of another row of the plan.

    A verify step has drafts, and only decodes. Each row computes drafts after its last token. It samples at each of
    these tokens, and keeps the samples up to the first that differs from the next draft.
    """

    rows: np.ndarray          # int32[R]  row of the request table
    # int32[R]  tokens that the row computes: 1 for a decode, 0 for a fork, 1 + drafts in a verify step
    num_tokens: np.ndarray
    num_decodes: int
    # bool[R]  the row samples one token, or is pooled: after this step all tokens of its sequence are computed
    samples: np.ndarray
    prompt_tokens: np.ndarray # int32[P]  token ids of the prompt rows, concatenated in the order of the rows
    # int32[U, 4]  (row, kv_group, index in the block table, block): changed entries of block tables
    block_updates: np.ndarray
    # rows whose request starts, resumes or forks in this step; `block_updates` leaves them out
    row_inits: tuple[RowInit, ...] = ()
    sampler: SamplerVariant = SamplerVariant.GREEDY
    # int32[F]  one entry per fork: index in `rows` of the row that it samples from
    forked_from: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    # int32[M, 3]  (BlockMove, from, to): moves before the step, in order. from, to: blocks, or slots
    moves: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3), np.int32))
    # masks that change before this step samples, and are known now; `Runner.sample` adds those known later
    masks: tuple[RowMask, ...] = ()
    # int32[4, S]  prompt tokens to score. scored[0]: index among the step's tokens (decodes first, then prompt_tokens).
    # scored[1]: id of the next token, whose log-probability is requested; of the token itself if the model pools.
    # scored[2]: slot of the request's adapter. scored[3]: row of the request table, to score by the distribution from
    # which the row samples; -1: by the model's own
    scored: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((4, 0), np.int32))
    # masks of scored tokens, in place of their row's; `RowMask.token`: index in `scored`
    score_masks: tuple[RowMask, ...] = ()
    # adapters to write into their slots before the step, in order
    adapter_loads: tuple[AdapterLoad, ...] = ()
    # Some masks depend on tokens in flight, or are computed while the forward program runs (grammars, reasoning
    # budgets). The step does not sample until `Runner.sample` is called with them.
    waits_for_masks: bool = False
    drafts: DraftPlan | None = None  # not None: a verify step
    model_drafts: ModelDraftPlan | None = None  # work of a draft model, before the step
    head: HeadPlan | None = None                # work of a draft head, after the step
    # int32[R]  of an encoder: position of the row's first token of type 1, its length if it has none. Else empty
    type_1_from: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def decodes_only(self) -> bool:
        """Whether every row is a decode. Without drafts, every row then computes one token and samples one."""
        return self.num_decodes == len(self.rows)

    @property
    def total_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decodes if self.decodes_only and self.drafts is None else int(self.num_tokens.sum())

    def first_token(self, index: int) -> int:
        """Index of the first token of row `index` among the step's tokens."""
        return int(self.num_tokens[:index].sum())

    @property
    def num_samples(self) -> int:
        """Rows that sample, or are pooled."""
        return self.num_decodes if self.decodes_only else int(np.count_nonzero(self.samples))


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the tokens in `StepPlan.scored`. `StepResult` describes the fields."""

    logprobs: np.ndarray      # float32[S]
    ranks: np.ndarray         # int32[S]
    top_ids: np.ndarray       # int32[S, K]
    top_logprobs: np.ndarray  # float32[S, K]

    def some(self, entries: slice) -> "Scores":
        """The log-probabilities of some of the tokens."""
        return Scores(*(array[entries] for array in (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)))


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Work of the experts in one step, in pairs of a token and an expert. Sums over the last stage's layers."""

    pairs: int    # on all devices
    busiest: int  # on the device that has most of them in a layer


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Output of one step. Rows are in the order of the plan. The entries of rows that do not sample are undefined.

    After a verify step there is one entry for each token of the step, in place of one for each row (R). A row's samples
    are its first `num_accepted + 1` entries. The others were sampled after a rejected draft.
    """

    token_ids: np.ndarray                   # int32[R]       empty if the model pools
    # Only from SamplerVariant.FULL, else None. float32 values of `logprobs_mode`: by default natural logarithms.
    logprobs: np.ndarray | None = None      # float32[R]     of the sampled token
    ranks: np.ndarray | None = None         # int32[R]       of the sampled token; 1 = most likely
    # int32[R, K]    most likely first, or ids of `RowExtras.scores_bias_ids`; K = max_logprobs
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None  # float32[R, K]
    # Ids from which the token was drawn; see `mask_words`. Only with SamplerVariant.FULL and `returns_sampling_mask`.
    kept_ids: np.ndarray | None = None      # uint32[R, words]
    scores: "Scores | None" = None          #                of the plan's `scored`
    # Only if the model pools: the last token's hidden state after the final norm, or a classifier's scores.
    pooled: np.ndarray | None = None        # float32[R, size]
    pooled_tokens: np.ndarray | None = None # float32[S, size]  the same, for the plan's `scored`
    expert_load: ExpertLoad | None = None   #                only if devices have different experts
    # Experts of each computed token, in layers that have experts. Only of an engine that returns them.
    routed_experts: np.ndarray | None = None  # int16[total_tokens, layers, top_k]
    num_accepted: np.ndarray | None = None  # int32[rows of the plan]  accepted drafts; None: not a verify step


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceDrafter:
    """A drafter on the device, as the engine sees it."""

    is_head: bool       # a draft head, which follows the target's steps; else a draft model
    kv_group: int       # the KV group whose block tables it uses
    max_len: int        # longest sequence that it supports, in tokens
    absorb_tokens: int = 0  # size of the largest `absorb` program, in tokens; draft model only
    absorb_rows: int = 0    # and in rows


@dataclasses.dataclass(frozen=True, slots=True)
class ReplacedLeaves:
    """Counts of an update of the weights."""

    num_leaves: int
    num_by_reference: int  # leaves that are the caller's own arrays
    copied_bytes: int      # of all others


class Runner(Protocol[HandleT]):
    """The device, as the engine sees it: `runtime.runner.ModelRunner`, or `LeaderRunner` for several processes.

    HandleT: the runner's type for a dispatched step. The engine only passes it back.
    """

    num_blocks: int              # blocks of the KV pool: ids 0 .. num_blocks - 1
    block_size: int
    # Sliding window per kv_group: number of keys that a query sees, itself included. None: it sees all keys before it.
    windows: tuple[int | None, ...]
    max_num_seqs: int            # rows of the request table
    max_num_batched_tokens: int  # token budget of a plan
    text_shapes: Sequence[TextShape]  # of an encoder's programs, by length, then by rows; empty: a decoder
    num_stages: int              # pipeline stages, which compute a step one after another
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    logprobs_mode: str           # see `EngineConfig`
    returns_sampling_mask: bool  # `StepResult.kept_ids` are returned to rows that ask for them
    returns_routed_experts: bool # `StepResult.routed_experts` are returned
    # Longer sequences need KV computed with a rope_len above this length (longrope). None: the rope never switches.
    longrope_switch_len: int | None
    host_slots: int                        # slots of the host tier; 0: there is none
    transfer_costs: TransferCosts | None   # measured if there is a host tier

    # Smallest jump worth taking, in forced tokens per running request. A jump makes the step longer for all requests.
    min_jump_per_request: float
    max_drafts: int  # most drafts per row of a verify step; 0: the engine does not speculate
    num_adapter_slots: int  # LoRA adapters that are on the device at a time; 0: requests have none
    recurrent_sizes: RecurrentSizes | None  # slots for recurrent state; None: the model has no recurrent layers

    @property
    def compiles_after_ready(self) -> int:
        """Programs compiled after the engine was ready. Not 0: the program table lacks an entry."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether all programs exist."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until all programs exist. Any thread may call it. Raises EngineError if one cannot be compiled."""
        ...

    def can_run(self, sampler: SamplerVariant, *, scores: bool) -> bool:
        """Whether all programs for a request exist. Any thread may call it. Raises EngineError as `wait_until_ready`.

        sampler: variant that the request needs. scores: the request wants log-probabilities of its prompt.
        """
        ...

    # Rows of each decode program, also of those that do not exist yet; smallest first.
    decode_sizes: Sequence[int]

    @property
    def verify_sizes(self) -> Sequence[int]:
        """Capacity of each verify program that exists, in tokens, smallest first. Empty: no step may have drafts."""
        ...

    def program_metrics(self) -> ProgramMetrics:
        """Number and cost of the compiled programs. Any thread may call it."""
        ...

    def dispatch(self, plan: StepPlan) -> HandleT:
        """Start a step; returns at once. Steps run in the order of dispatch."""
        ...

    def sample(self, handle: HandleT, masks: Sequence[RowMask]) -> HandleT:
        """Sample for a step whose plan waits for masks. masks: the missing masks. Returns a new handle."""
        ...

    def collect(self, handle: HandleT) -> StepResult:
        """Wait for a dispatched step, and return its result."""
        ...

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """The drafter on the device; None: there is none."""
        ...

    def proposed(self, handle: HandleT) -> np.ndarray:
        """Drafts of the drafter on the device for a verify step: int32[R, max_drafts]; -1: no draft.

        Waits for the drafter, which runs before the step.
        """
        ...

    @property
    def kv_layout(self) -> str:
        """Everything that the content of a block depends on, besides its tokens. Empty: blocks cannot be read."""
        ...

    @property
    def block_arrays(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of each array that `read_blocks` returns for a block."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Copies of blocks, as arrays in host memory, after all dispatched steps. Waits for the device."""
        ...

    def write_blocks(
        self, moves: Sequence[tuple[BlockMove, int, int]], blocks: Sequence[int],
        contents: Sequence[tuple[np.ndarray, ...]],
    ) -> None:  # fmt: skip
        """Before the next step, run moves and write contents, as from `read_blocks`, into blocks. Returns at once."""
        ...

    def describe(self, plan: StepPlan) -> str:
        """Name the program of a plan, for a log. Any thread may call it."""
        ...

    def update_params(self, leaves: Iterable[Any]) -> ReplacedLeaves:
        """Replace all weights, leaf by leaf. No step is in flight. leaves: `models.new_leaves.NewLeaf`s.

        If it fails after the first leaf was dropped, `weights_problem` says so until a later call succeeds.
        """
        ...

    def weights_problem(self) -> str | None:
        """Reason why no step can run: the weights are replaced in part, deleted or discarded. None: it can."""
        ...

    def release(self, *, discard: bool = False) -> None:
        """Free the KV pool, and move the weights to the host where that frees device memory. No step is in flight.

        discard: free the weights instead.
        """
        ...

    def restore(self, *, weights: bool, kv_cache: bool) -> None:
        """Allocate again what `release` freed. The KV pool is empty then. Compiles nothing."""
        ...

    def start_profile(self, folder: str) -> None:
        """Profile host and device until `stop_profile`, into a folder. Raises EngineError if a profile is running."""
        ...

    def stop_profile(self) -> None:
        """Write the profile. Raises EngineError if none is running."""
        ...

    def prefix_cacheable(self, prompt_len: int) -> bool:
        """Whether requests with a prompt of this length may share KV. With a dynamic rope, long prompts may not."""
        ...

    def close(self) -> None:
        """Free the device memory."""
        ...
