"""One request: its tokens, where it stands, and what it holds.

A user's request for several answers is several of these, a `RequestGroup`: each is scheduled by itself.
"""

import dataclasses
import enum
import hashlib
import sys
from typing import cast

import numpy as np

from jpaged.engine.block_pool import BlockName
from jpaged.engine.grammar import GrammarMatcher
from jpaged.engine.reasoning_budget import ReasoningBudget
from jpaged.engine.repetition import RepetitionWatch
from jpaged.engine.sampling_extras import SamplingExtras
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import EngineError, RequestError
from jpaged.outputs import ClassificationOutput, EmbeddingOutput, Logprob, RequestMetrics
from jpaged.params.pooling import PoolingParams
from jpaged.params.repetition_detection import RepetitionDetectionParams
from jpaged.params.sampling import SamplingParams

NO_ROW = -1
NEVER = sys.maxsize


class RequestStatus(enum.Enum):
    """Where a request stands.

    WAITING -> RUNNING -> one of the ends, with PREEMPTED <-> RUNNING in between; an end can come from any of them.
    """

    WAITING = "waiting"        # has never held a row
    RUNNING = "running"        # holds a row and blocks
    PREEMPTED = "preempted"    # gave both back; waits for them, and for tokens still on their way
    STOPPED = "stop"           # end: a stop token
    LENGTH = "length"          # end: max_tokens or max_model_len
    REPETITION = "repetition"  # end: it goes round in circles
    ABORTED = "abort"          # end: by the caller
    FAILED = "error"           # end: the step it was part of failed

    is_end: bool  # whether nothing more happens to the request

    def __init__(self, value: str):
        self.is_end = value in ("stop", "length", "repetition", "abort", "error")


GIVEN_BACK = -1


@dataclasses.dataclass(slots=True)
class BlockTable:
    """A request's blocks in one group of layers: block i holds its tokens i * block_size and on."""

    blocks: list[int]  # those before first_held lie behind the group's window: GIVEN_BACK, or never taken
    first_held: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks that it holds, a copy."""
        return self.blocks[self.first_held :]


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One request's state machine.

    Its tokens are the known ones (`token_ids`: the prompt, then every sampled token that has reached the host) and
    `num_in_flight` more that were sampled on the device and are on their way. Of all these the first `num_computed`
    have their KV in the pages, or will by the end of the step that was scheduled last.
    """

    request_id: str                # of its group
    prompt_token_ids: list[int]
    params: SamplingParams         # greedy where the request is to be pooled
    max_total_tokens: int          # prompt and output together; the request ends when it has so many
    eos_token_ids: frozenset[int]  # the model's own ends, none with ignore_eos
    eos_token_id: int | None       # the one of them that is no `stop_reason` of its own
    metrics: RequestMetrics
    prefix_root: bytes = b""       # digest that the names of its blocks grow from; set when it is added
    pooling: PoolingParams | None = None  # the request ends with its prompt: nothing is sampled, a state is pooled
    seed: int = 0                  # 0 <= seed < 2**64; drawn when the request is added, if the caller gave none
    arrival: int = -1              # place in the order of arrival
    priority: int = 0              # lower comes first, where the scheduling policy is "priority"
    index: int = 0                 # which of its group's answers this is
    extras: SamplingExtras | None = None  # what its sampling needs beside numbers
    matcher: GrammarMatcher | None = None  # where it stands in its grammar
    reasoning_budget: ReasoningBudget | None = None  # where it stands in its reasoning, where that is limited
    repetition: RepetitionWatch | None = None
    jumps: bool = False            # tokens that its grammar forces are taken without sampling
    steered: bool = False          # a beam: the host chooses each of its tokens, once it has seen what all beams gave
    followers: list["Request"] = dataclasses.field(default_factory=list)  # fork from this one when its prompt is done
    rank: tuple[float, int] = (0.0, 0)  # place in the policy's order, lowest first; set when it begins to wait
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None

    token_ids: list[int] = dataclasses.field(default_factory=list)
    num_in_flight: int = 0
    num_computed: int = 0
    num_cached_tokens: int = 0     # of the prompt, found in the prefix index when the request first started
    rope_len: int = 0              # length that a rope which depends on it goes by at least: the prompt's, or more
    # where it found no room to start: the blocks there were, and the step from which it looks again even so
    no_room: tuple[int, int] | None = None
    num_scored: int = 0            # tokens of the prompt that are told about, or will be: with prompt_logprobs
    num_lost: int = 0              # computed tokens that the last preemption threw away

    row: int = NO_ROW
    block_tables: list[BlockTable] = dataclasses.field(default_factory=list)  # one a group while it runs, equally long
    num_slots: int = 0             # tokens that its tables have room for
    num_held: int = 0              # blocks that it holds, of all groups
    release_at: int = NEVER        # when so many tokens are computed, a block has fallen behind a window
    block_names: list[BlockName] = dataclasses.field(default_factory=list)  # of its full blocks of known tokens
    num_indexed_blocks: int = 0    # so many blocks of each table have been offered to the prefix index
    decoding: bool = False         # its last token lies in the device's request table: sampled since the row started
    fast_until: int = 0            # decoding is plain until so many tokens are computed: then a block, an end, a window
    tail_shared: bool = False      # the block that its next token goes to may be shared with a fork
    on_hold: bool = False          # a beam that has given its candidates and waits for the others'
    row_is_new: bool = False       # the device's request table does not know yet what its row holds

    sampler: SamplerVariant = dataclasses.field(init=False)  # what it needs of a step that samples for it
    stop_ids: frozenset[int] = dataclasses.field(init=False)  # tokens that end it, the model's and the caller's
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cumulative_logprob: float | None = None
    pooled: EmbeddingOutput | ClassificationOutput | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.rope_len = self.prompt_len
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.prompt_logprobs is not None and self.index == 0:  # of the prompt, which all answers share
            self.prompt_logprobs, self.num_scored = [None], 1
        if self.params.needs_logprobs:
            self.cumulative_logprob = 0.0
        if self.params.repetition_detection is not None:
            self.repetition = RepetitionWatch(cast(RepetitionDetectionParams, self.params.repetition_detection))
        self.sampler = _sampler_need(self.params)
        if self.extras is not None:
            self.sampler = SamplerVariant.FULL
        own = self.params.stop_token_ids
        self.stop_ids = self.eos_token_ids.union(own) if own else self.eos_token_ids

    @property
    def prompt_len(self) -> int:
        """Tokens of the user's prompt."""
        return len(self.prompt_token_ids)

    def make_private(self, secret: bytes) -> None:
        """Have nobody else find its blocks by their names: the name of a chain that only it and its forks know."""
        self.prefix_root = hashlib.sha256(b"private" + secret + self.prefix_root).digest()
        self.block_names = []

    def fork(self, other: "Request") -> None:
        """Have another of the group go on from where this one stands: its tokens and log-probabilities, copied."""
        other.token_ids = list(self.token_ids)
        other.prefix_root, other.rope_len = self.prefix_root, self.rope_len
        other.block_names = list(self.block_names)
        other.num_cached_tokens = self.num_cached_tokens
        other.logprobs = None if self.logprobs is None else list(self.logprobs)
        other.cumulative_logprob = self.cumulative_logprob

    def outgrow(self) -> None:
        """Have all of its KV computed anew with the rope of long sequences, and shared with such only."""
        self.rope_len = len(self.token_ids)
        self.prefix_root = hashlib.sha256(b"outgrown" + self.prefix_root).digest()
        self.block_names = []

    @property
    def computes_all(self) -> bool:
        """Whether it is to start without anybody's KV, whatever there is."""
        if self.prompt_logprobs is not None and self.num_scored < self.prompt_len:
            return True
        # only the first answer of several tells of the prompt: the others take what it has computed
        skips = self.params.skip_reading_prefix_cache if self.index else self.params.skips_prefix_cache
        return self.status is RequestStatus.WAITING and bool(skips)

    def to_score(self, count: int) -> list[tuple[int, int]]:
        """Of its next `count` tokens those whose successor in the prompt is to be told about: (place, successor)."""
        first = self.num_computed
        last = min(first + count, self.prompt_len - 1)
        return [(i - first, self.prompt_token_ids[i + 1]) for i in range(max(first, self.num_scored - 1), last)]

    def mask(self) -> np.ndarray:
        """uint32[words]: what may be sampled behind its known tokens. Raises RequestError where that is nothing."""
        if self.extras is None:
            raise EngineError(f"request {self.request_id} has no mask")
        words = self.extras.mask(self.token_ids, self.num_output_tokens)
        if self.reasoning_budget is not None and (forced := self.reasoning_budget.forced) is not None:
            only = np.zeros_like(words)
            only[forced // 32] = np.uint32(1 << forced % 32)
            return only
        if self.matcher is None:
            return words
        allowed = np.empty_like(words)
        self.matcher.mask_into(allowed)
        allowed &= words
        if not allowed.any():
            raise RequestError("structured_outputs", self.params.structured_outputs, "allows only tokens here that "
                               "others of the request's parameters forbid")  # fmt: skip
        return allowed

    @property
    def num_tokens(self) -> int:
        """Tokens it has, those on their way included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens that have reached the host."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the sampled tokens that have reached the host."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_missing(self) -> int:
        """Tokens still to compute before the next one can be sampled; 0 when every token it may have is on its way."""
        if self.on_hold:
            return 0
        return 0 if self.num_tokens >= self.max_total_tokens else self.num_tokens - self.num_computed


def _sampler_need(params: SamplingParams) -> SamplerVariant:
    """The smallest sampler that does what a request's numbers ask for."""
    if params.needs_logprobs:
        return SamplerVariant.FULL
    if params.greedy:
        return SamplerVariant.GREEDY
    return SamplerVariant.FULL if params.typical_p < 1 else SamplerVariant.RANDOM
