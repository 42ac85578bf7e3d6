"""The interface of a strategy.

1. `begin` hands the request group's first requests to the scheduler.
2. `take_scores` stores the prompt's log-probabilities or vectors from a collected step.
3. `take` then turns the result of one row into tokens, candidates or a vector, and counts the tokens. It returns the
   end state if the row's request has ended.
4. `output` builds the output of the request group so far.

The engine's loop treats all request groups alike. The differences between sampling, beam search and pooling are here.
"""

import abc
import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jpaged.engine.observe.engine_metrics import AnswerEnd
from jpaged.engine.observe.engine_stats import EngineCounters
from jpaged.engine.output.answer_writer import AnswerWriter
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduler_state import ScheduledStep
from jpaged.engine.step_plan import NOTHING_ALLOWED, StepResult
from jpaged.errors import EngineError, JPagedError, LogitsError, RequestError
from jpaged.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput, WeightVersion
from jpaged.params.sampling import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.request_group import RequestGroup

Output = RequestOutput | PoolingRequestOutput[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step that the runner has finished."""

    step: ScheduledStep
    result: StepResult
    token_ids: list[int]  # `result.token_ids` as Python integers
    began: float          # time of dispatch, or the end of the previous step if that is later; `time.monotonic()`
    now: float            # time of collection

    def samples(self, index: int) -> range:
        """Indices in `result` of the samples of row `index`: one, or after a verify step one more than accepted."""
        if self.result.num_accepted is None:
            return range(index, index + 1)
        first = self.step.plan.first_token(index)
        return range(first, first + int(self.result.num_accepted[index]) + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class StrategyContext:
    """Parts of the engine that a strategy calls."""

    writer: AnswerWriter
    scheduler: Scheduler
    counters: EngineCounters
    jump_forward: bool           # append tokens that a grammar forces without sampling them
    min_jump_per_request: float  # see `Runner`
    stream_interval: int = 1     # of requests without one


class Strategy(abc.ABC):
    """Turns the results of one request group's rows into its answer. One object per request group."""

    runs_all_at_once: ClassVar[bool] = False  # the requests advance together, so all must fit into the KV pool

    context: StrategyContext  # set by `begin`

    def begin(self, request_group: "RequestGroup", context: StrategyContext) -> None:
        """Add the first requests to the scheduler. The others fork from the first one when the prompt is computed.

        A strategy with a grammar waits for it here, and raises the grammar compiler's error.
        """
        self.context = context
        context.scheduler.add(request_group.first, followers=request_group.requests[1:])

    @abc.abstractmethod
    def take(self, request: Request, collected: CollectedStep, index: int) -> RequestStatus | None:
        """Process the result of row `index`. Returns the end state of the request if it has ended."""

    def take_scores(self, request: Request, result: StepResult, entries: slice) -> None:
        """Append the log-probabilities of the next prompt tokens. entries: their indices in the step's scores."""
        if result.scores is None:
            raise EngineError(f"request {request.request_id}: the step returned no scores")
        self.context.writer.append_prompt_logprobs(request, result.scores, entries)

    def ends(self, request_group: "RequestGroup", output: Output) -> list[AnswerEnd]:
        """Ends of the answers of a request group that has ended. output: its final output."""
        return [AnswerEnd(r.schedule.status.value, r.num_output_tokens) for r in request_group.requests]

    @abc.abstractmethod
    def output(self, request_group: "RequestGroup") -> Output:
        """The output so far; the final one if all requests have ended."""

    def ending_with(self, request_group: "RequestGroup", request: Request) -> Sequence[Request]:
        """Requests that end when this one ends."""
        return (request,)

    def is_due(self, request: Request) -> bool:
        """Whether a streaming request group emits an output now that this request has a new token."""
        return True

    def scheduled(self, request_group: "RequestGroup") -> Collection[Request]:
        """Requests that run or wait at the moment. For integrity checks."""
        followers = request_group.first.schedule.followers
        return [r for r in request_group.requests if not r.schedule.status.is_end and r not in followers]

    def note_weights(self, request_group: "RequestGroup", version: WeightVersion) -> None:
        """Note that new weights compute all tokens that have not arrived yet. No step is in flight."""
        for request in request_group.requests:
            if not request.schedule.status.is_end:
                request.output.note_weights(request.num_output_tokens, version)

    @staticmethod
    def count_parameter(params: SamplingParams) -> str:
        """Name of the parameter that sets the number of requests."""
        return "n" if params.best_of is None else "best_of"


def returned_ends(output: Output) -> list[AnswerEnd]:
    """Ends of the answers of a final output. Without an answer, it counts as one aborted answer."""
    answers = output.outputs if isinstance(output, RequestOutput) else []
    return [AnswerEnd(a.finish_reason or "abort", len(a.token_ids)) for a in answers] or [AnswerEnd("abort", 0)]


def sampling_error(token_id: int, params: SamplingParams) -> JPagedError:
    """Return the error of a request whose row got NOT_FINITE or NOTHING_ALLOWED in place of a token."""
    if params.logits_processors:
        accepted = "leave no token to sample: logits that are not finite, or all -inf"
        return RequestError("logits_processors", params.logits_processors, accepted)
    if token_id == NOTHING_ALLOWED:
        return RequestError("allowed_token_ids", params.allowed_token_ids, "leaves no token to sample")
    return LogitsError()


def request_output(request_group: "RequestGroup", completions: list[CompletionOutput]) -> RequestOutput:
    """The output of a request group that generates."""
    first = request_group.first
    prompt_logprobs = first.output.prompt_logprobs
    return RequestOutput(  # in the order of the fields: keywords take 0.3 us more, for every row and step
        request_group.request_id,
        request_group.prompt,
        request_group.prompt_token_ids,
        completions,
        request_group.has_ended,
        request_group.metrics,
        first.schedule.num_cached_tokens,
        None if prompt_logprobs is None else list(prompt_logprobs),
    )
