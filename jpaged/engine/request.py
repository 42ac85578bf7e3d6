"""One request: a sequence of tokens, its limits, and three records of state.

Called by: the input processor makes requests, all of `engine` reads them.
Owns: the known tokens of one sequence, and its three records.
Never: advances by itself.

Each record has one owner:

| Record | Contents | Later written by |
|---|---|---|
| `Request.kv` | block tables, block names | `KVCacheManager`, `BlockNamer` |
| `Request.schedule` | status, row, progress | `Scheduler` and its parts |
| `Request.output` | text, log-probabilities, stop reason | the output processor, the strategies |

`AnswerWriter` appends to `Request.token_ids`. A beam search replaces the token ids of its beams.

An API call with n=4 makes four requests, which form one `RequestGroup`. Each request is scheduled on its own.
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.grammar import GrammarMatcher
from jpaged.engine.kv_cache.block_table import KVState
from jpaged.engine.output.answer_text import AnswerText
from jpaged.engine.output.reasoning_budget import ReasoningBudget
from jpaged.engine.output.repetition import RepetitionWatch
from jpaged.engine.output.routed_experts import RoutedTokens
from jpaged.engine.output.scored_text import ScoredText
from jpaged.engine.sampling_extras import SamplingExtras
from jpaged.engine.step_plan import SamplerVariant, Scores
from jpaged.errors import EngineError, RequestError
from jpaged.outputs import Logprob, RequestMetrics, WeightVersion
from jpaged.params.repetition_detection import RepetitionDetectionParams
from jpaged.params.sampling import FULL_FILTERS, NEUTRAL_COLUMNS, SamplingParams

NO_ROW = -1


class RequestStatus(enum.Enum):
    """State of a request.

    WAITING -> RUNNING -> an end state, with PREEMPTED <-> RUNNING in between. Every state can change to an end state.
    """

    WAITING = "waiting"        # has never run, or is an idle beam
    RUNNING = "running"        # owns a row and blocks
    PREEMPTED = "preempted"    # has no row and no blocks: waits to run again, and for its tokens in flight
    STOPPED = "stop"           # end: a stop token, a stop string, or the end of a grammar or beam search
    LENGTH = "length"          # end: max_tokens or max_model_len
    REPETITION = "repetition"  # end: the last tokens repeat one pattern
    ABORTED = "abort"          # end: aborted by the caller
    FAILED = "error"           # end: a step or the request's output failed

    is_end: bool

    def __init__(self, value: str):
        self.is_end = value in ("stop", "length", "repetition", "abort", "error")


@dataclasses.dataclass(slots=True, eq=False)
class ScheduleState:
    """Progress of one request. The scheduler and its parts write it."""

    # First the fields that every step reads for every row: they share a cache line.
    num_computed: int = 0          # tokens whose KV is in the pages, or will be at the end of the last planned step
    # A decode changes nothing but counters while num_computed is below this. At this value it needs a block, frees
    # one, switches its rope, or reaches its last token. 0 while the request does not decode.
    next_boundary: int = 0
    num_in_flight: int = 0         # tokens that were sampled on the device and have not reached the host
    # Drafts in flight. `num_computed` and `num_in_flight` count them as accepted, until the host knows better.
    num_drafts_in_flight: int = 0
    row: int = NO_ROW
    status: RequestStatus = RequestStatus.WAITING
    decoding: bool = False         # the last token is in the device's request table: sampled since the row started
    row_is_new: bool = False       # the device's request table does not know this row's content yet
    rank: tuple[float, int] = (0.0, 0)  # order of the scheduling policy, lowest first
    micro_batch: int = 0           # the pipeline turn in which this request decodes: 0 <= micro_batch < num_stages
    passed_on: bool = False        # its turn came, and its micro-batch was larger than its share
    mask_pending: bool = False     # the row's mask on the device forbids end tokens, because of `min_tokens`
    on_hold: bool = False          # a beam that waits until the other beams have their candidates
    num_scored: int = 0            # prompt tokens whose log-probabilities or vectors were scheduled, if requested
    num_routed: int = 0            # leading tokens that the request computed itself, if it returns their experts
    num_lost: int = 0              # computed tokens that the last preemption discarded
    num_cached_tokens: int = 0     # prompt tokens found in the prefix index when the request first started
    refused_with: int = -1         # free blocks when the request last failed to start
    retry_step: int = 0            # step from which it tries again, even if no more blocks are free
    followers: list["Request"] = dataclasses.field(default_factory=list)  # fork from this one when its prompt ends


@dataclasses.dataclass(slots=True, eq=False)
class OutputState:
    """Answer of one request so far. Its token ids are at the end of `Request.token_ids`."""

    logprobs: list[dict[int, Logprob]] | None = None                # None: not requested
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None: not requested
    scores: list[Scores] | None = None                              # of each step's tokens; None: nothing is scored
    scored_text: ScoredText | None = None  # None: all tokens to score have the same mask
    cumulative_logprob: float | None = None                         # None: not requested
    repetition: RepetitionWatch | None = None
    reasoning_budget: ReasoningBudget | None = None
    matcher: GrammarMatcher | None = None  # position in the grammar
    jumps: bool = False                    # append forced tokens without sampling them
    kept_ids: list[np.ndarray] | None = None  # int32 ids from which each token was drawn; None: not requested
    routed: RoutedTokens | None = None     # experts of the tokens; None: not requested
    text: AnswerText | None = None         # None: no tokenizer, or not requested
    is_bare: bool = False                  # only the end tokens and the length end the answer, and it has no text
    num_emitted: int = 0                   # output tokens in the outputs that the caller has
    end_emitted: bool = False              # the caller has the finish reason
    stop_reason: int | str | None = None
    # (number of output tokens before the change, version of the weights since then); set when the request is added
    weight_changes: tuple[tuple[int, WeightVersion], ...] = ((0, 0),)
    # When the last token arrived, in `time.monotonic()`; 0 before the first one. `EngineMetrics` sets it steps later.
    last_token_time: float = 0.0

    def note_weights(self, num_tokens: int, version: WeightVersion) -> None:
        """Note that new weights compute the tokens from output token `num_tokens` on."""
        before = tuple(change for change in self.weight_changes if change[0] < num_tokens)
        self.weight_changes = (*before, (num_tokens, version))

    def weight_changes_of(self, num_tokens: int) -> tuple[tuple[int, WeightVersion], ...]:
        """The changes that the first `num_tokens` output tokens show. Without a token: the present weights."""
        changes = self.weight_changes
        return changes if changes[-1][0] < num_tokens or not changes[-1][0] else changes_within(changes, num_tokens)


def changes_within(
    changes: tuple[tuple[int, WeightVersion], ...], num_tokens: int
) -> tuple[tuple[int, WeightVersion], ...]:
    """The changes of the weights that an answer of `num_tokens` tokens shows."""
    return tuple(change for change in changes if change[0] < max(num_tokens, 1))


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One sequence that the scheduler runs.

    The sequence is the known tokens, `token_ids`, and then `schedule.num_in_flight` tokens that have not reached the
    host. The KV of its first `schedule.num_computed` tokens is computed or planned. Both numbers are upper bounds while
    drafts are in flight.
    """

    request_id: str                # of the request group
    prompt_token_ids: list[int]
    params: SamplingParams         # greedy if the request is pooled
    max_total_tokens: int          # the request ends with this many tokens, prompt included
    eos_token_ids: frozenset[int]  # the model's end tokens; empty with ignore_eos
    eos_token_id: int | None       # the main end token, not reported as a stop_reason
    metrics: RequestMetrics
    index: int = 0                 # index of the answer in its request group
    priority: int = 0              # lower starts first with scheduling_policy="priority"
    seed: int = 0                  # 0 <= seed < 2**64; set by `admit`
    arrival: int = -1              # position in the order of arrival; set by `admit`
    is_beam: bool = False          # the host chooses the next token, from the candidates of all beams
    pools_tokens: bool = False     # the answer has a vector for each token of the prompt
    type_1_from: int | None = None # position of the first token of type 1, in a pair of texts; None: it has none
    # The prompt is a text to score, from this token on (at least 1). None: the request generates, or is pooled.
    score_from: int | None = None
    scores_processed: bool = False # score by the distribution from which `params` samples, not by the model's own
    prediction_token_ids: tuple[int, ...] = ()  # expected answer, whose tokens may become drafts; empty: none
    extras: SamplingExtras | None = None  # sampling state that has no column in the request table
    adapter: LoadedAdapter | None = None  # LoRA adapter; set by `admit`. None: the base model alone

    token_ids: list[int] = dataclasses.field(init=False)     # known tokens: the prompt, then the output
    sampler: SamplerVariant = dataclasses.field(init=False)  # smallest sampler that a step needs for this request
    stop_ids: frozenset[int] = dataclasses.field(init=False) # end tokens of the model and stop_token_ids
    kv: KVState = dataclasses.field(default_factory=KVState)
    schedule: ScheduleState = dataclasses.field(default_factory=ScheduleState)
    output: OutputState = dataclasses.field(default_factory=OutputState)

    def __post_init__(self) -> None:
        params, output = self.params, self.output
        self.token_ids = list(self.prompt_token_ids)
        self.kv.rope_len = self.prompt_len
        self.sampler = SamplerVariant.FULL if self.extras is not None else _smallest_sampler(params)
        own = params.stop_token_ids
        self.stop_ids = self.eos_token_ids.union(own) if own else self.eos_token_ids
        if params.logprobs is not None:
            output.logprobs = []
        if self.score_from is not None:
            output.scores, self.schedule.num_scored = [], self.score_from
            self.sampler = SamplerVariant.GREEDY  # one token, which is dropped
        elif params.prompt_logprobs is not None and self.index == 0:  # all requests of a group have the same prompt
            output.prompt_logprobs, self.schedule.num_scored = [None], 1
        if params.needs_logprobs:
            output.cumulative_logprob = 0.0
        if params.return_sampling_mask:
            output.kept_ids = []
        if params.repetition_detection is not None:
            output.repetition = RepetitionWatch(cast(RepetitionDetectionParams, params.repetition_detection))

    def admit(self, *, seed: int, arrival: int, adapter: LoadedAdapter | None = None) -> None:
        """Set what only the engine knows when the request is added."""
        self.seed, self.arrival, self.adapter = seed, arrival, adapter

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, tokens in flight included."""
        return len(self.token_ids) + self.schedule.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that have reached the host."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled. 0 if the request has all its tokens, or is on hold."""
        if self.schedule.on_hold or self.num_tokens >= self.max_total_tokens:
            return 0
        return self.num_tokens - self.schedule.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has log-probabilities, or a vector, for each token of the prompt."""
        return self.pools_tokens or self.output.prompt_logprobs is not None or self.score_from is not None

    @property
    def max_cached_tokens(self) -> int:
        """Maximum tokens from the prefix cache: not the last one, and none whose hidden state is scored."""
        known, schedule = len(self.token_ids) - 1, self.schedule
        if self.params.return_routed_experts and not self.index and schedule.num_routed < self.prompt_len:
            return min(known, schedule.num_routed)  # the experts of other tokens are not known
        return known if self.score_from is None else min(known, schedule.num_scored - 1)

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether the request starts without any cached KV."""
        if self.score_from is not None:
            return False
        if self.scores_prompt and self.schedule.num_scored < self.prompt_len:
            return True  # log-probabilities and vectors of a token need its hidden state
        # Only request 0 of a group scores the prompt. The others may use the KV that it has computed.
        skips = self.params.skip_reading_prefix_cache if self.index else self.params.skips_prefix_cache
        return self.schedule.status is RequestStatus.WAITING and bool(skips)

    def mask(self) -> np.ndarray:
        """uint32[words]: ids that may follow the known tokens. Raises RequestError if there are none."""
        output = self.output
        return self.mask_after(self.token_ids, self.num_output_tokens, output.matcher, output.reasoning_budget)

    def draft_masks(self, drafts: Sequence[int], text_of: Callable[[int], bytes]) -> list[np.ndarray]:
        """Masks of the token after the known tokens, and of the tokens after each draft that is allowed.

        The matcher accepts the drafts, and is rolled back. text_of: bytes of a token. Raises as `mask`.
        """
        if self.extras is None:
            raise EngineError(f"request {self.request_id} has no mask")
        matcher, budget = self.output.matcher, copy.copy(self.output.reasoning_budget)
        tail = self.token_ids[max(len(self.token_ids) - self.extras.lookback, 0) :]
        masks, accepted = [], 0
        try:
            for count, draft in enumerate([*drafts, -1]):
                try:
                    masks.append(self.mask_after(tail, self.num_output_tokens + count, matcher, budget))
                except RequestError:
                    if not count:
                        raise
                    masks.append(np.zeros_like(masks[0]))  # the request ends if it comes here: see `sampling_error`
                if draft < 0 or not masks[-1][draft // 32] >> np.uint32(draft % 32) & 1 or draft in self.stop_ids:
                    break
                if matcher is not None:
                    if not matcher.accept(draft):
                        break
                    accepted += 1
                    if matcher.is_finished:
                        break
                if budget is not None:
                    budget.append(draft, text_of(draft))
                tail.append(draft)
        finally:
            if matcher is not None:
                matcher.rollback(accepted)
        return masks

    def mask_after(
        self,
        token_ids: Sequence[int],
        num_output_tokens: int,
        matcher: GrammarMatcher | None,
        budget: ReasoningBudget | None,
    ) -> np.ndarray:
        """`mask` after the last of `token_ids`, with the state of `matcher` and of `budget` there."""
        if self.extras is None:
            raise EngineError(f"request {self.request_id} has no mask")
        words = self.extras.mask(token_ids, num_output_tokens)
        only = None
        if budget is not None and (forced := budget.forced) is not None:
            only = np.zeros_like(words)
            only[forced // 32] = np.uint32(1 << forced % 32)
        if matcher is None:
            return words if only is None else only
        allowed = np.empty_like(words)
        matcher.mask_into(allowed)
        if only is not None and (allowed & only).any():  # otherwise inside a character, which the end tag must follow
            return only
        allowed &= words
        if not allowed.any():
            raise RequestError("structured_outputs", self.params.structured_outputs, "allows only tokens here that "
                               "other parameters of the request forbid")  # fmt: skip
        return allowed


def _smallest_sampler(params: SamplingParams) -> SamplerVariant:
    """The smallest sampler that supports these parameters."""
    if params.needs_logprobs or params.return_sampling_mask:
        return SamplerVariant.FULL
    if params.greedy:
        return SamplerVariant.GREEDY
    needs_full = any(getattr(params, name) != NEUTRAL_COLUMNS[name] for name in FULL_FILTERS)
    return SamplerVariant.FULL if needs_full else SamplerVariant.RANDOM
