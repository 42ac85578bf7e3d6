"""Sampling: every request of the group produces one answer. Greedy decoding is sampling at temperature 0.

The first request computes the prompt. The others fork from it, and then all run independently.

Jump-forward: when a grammar leaves no choice about the next tokens, these forced tokens are appended without sampling
them. The next step computes them like a chunk of a prompt.
"""

from typing import TYPE_CHECKING

from jpaged.engine.observe.engine_metrics import AnswerEnd
from jpaged.engine.output.routed_experts import RoutedTokens
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.step_plan import NOTHING_ALLOWED
from jpaged.engine.strategies.base import (
    CollectedStep,
    Output,
    Strategy,
    StrategyContext,
    request_output,
    returned_ends,
    sampling_error,
)
from jpaged.outputs import CompletionOutput, RequestOutput, SamplingMask
from jpaged.params.sampling import RequestOutputKind

if TYPE_CHECKING:
    from jpaged.engine.request_group import RequestGroup


class SampleStrategy(Strategy):
    """`n` samples of one prompt."""

    def begin(self, request_group: "RequestGroup", context: StrategyContext) -> None:
        """Prepare texts and grammars, and add the first request to the scheduler."""
        params = request_group.params
        grammar = None if request_group.grammar is None else request_group.grammar.result()
        for request in request_group.requests:
            output = request.output
            output.text = context.writer.new_text(params, request.prompt_token_ids)
            if params.return_routed_experts:
                output.routed = RoutedTokens(request_group.first.output.routed if request.index else None)
            if grammar is not None:
                output.matcher = grammar.matcher()
                output.jumps = context.jump_forward and not params.samples_forced_tokens
            enders = (output.text, output.matcher, output.repetition, output.reasoning_budget)
            output.is_bare = all(each is None for each in enders)
        super().begin(request_group, context)

    def take(self, request: Request, collected: CollectedStep, index: int) -> RequestStatus | None:
        """Append the sampled tokens, and forced tokens after them. Raises an error if no token could be sampled."""
        end = None
        if collected.result.num_accepted is None:
            end = self._append(request, collected, index)
        else:
            for sample in collected.samples(index):
                end = self._append(request, collected, sample)
                if end is not None:  # what was sampled after the end is dropped
                    break
        if end is None and request.output.jumps:
            end = self._jump(request, collected.now)
        return end

    def _append(self, request: Request, collected: CollectedStep, sample: int) -> RequestStatus | None:
        """Append one sampled token. sample: its index in the result."""
        token_id, context = collected.token_ids[sample], self.context
        if token_id < 0:
            if token_id == NOTHING_ALLOWED and request.output.matcher is not None:
                request.mask()  # raises the grammar's own error
            raise sampling_error(token_id, request.params)
        context.counters.generated_tokens += 1
        if request.output.cumulative_logprob is not None:
            context.writer.append_logprobs(request, token_id, collected.result, sample)
        if request.output.kept_ids is not None:
            context.writer.append_kept_ids(request, collected.result, sample)
        return context.writer.append(request, token_id, collected.now)

    def is_due(self, request: Request) -> bool:
        """Whether `stream_interval` tokens are new. The first token is always due."""
        interval = request.params.stream_interval or self.context.stream_interval
        emitted = request.output.num_emitted
        return interval == 1 or emitted == 0 or request.num_output_tokens - emitted >= interval

    def output(self, request_group: "RequestGroup") -> RequestOutput:
        """All answers so far. With output_kind DELTA: their new parts, and only the answers that have any.

        The text of a failed request is not flushed: text that was held back is missing.
        """
        return request_output(request_group, self._completions(request_group))

    def _completions(self, request_group: "RequestGroup") -> list[CompletionOutput]:
        delta = request_group.params.output_kind is RequestOutputKind.DELTA
        for request in request_group.requests:  # before anything counts as emitted, because it may fail
            if request.schedule.status.is_end:
                _end_text(request)
        return [
            _completion(request, delta=delta)
            for request in request_group.requests
            if not delta or _has_news(request)
        ]

    def _jump(self, request: Request, now: float) -> RequestStatus | None:
        """Append the tokens that the grammar forces. Returns the end state if one of them ends the request."""
        context, matcher = self.context, request.output.matcher
        forced = [] if matcher is None else matcher.forced_tokens()
        # One forced token is sampled just as fast. More of them pay if the longer step costs less than they save.
        min_jump = context.min_jump_per_request * len(context.scheduler.running)
        if len(forced) < 2 or len(forced) - 1 <= min_jump or not context.scheduler.may_discard(request):
            return None
        # Before the request ends, too: drafts in flight at the places of forced tokens must not count as their KV.
        context.scheduler.discard_in_flight(request)
        for token_id in forced:
            context.counters.generated_tokens += 1
            end = context.writer.append(request, token_id, now)
            if end is not None:
                return end
        return None


class BestOfStrategy(SampleStrategy):
    """The `n` most likely of `best_of` samples, chosen when all samples have ended."""

    def ends(self, request_group: "RequestGroup", output: Output) -> list[AnswerEnd]:
        """Ends of the answers that are returned."""
        return returned_ends(output)

    def _completions(self, request_group: "RequestGroup") -> list[CompletionOutput]:
        for request in request_group.requests:
            _end_text(request)
        completions = [_completion(request, delta=False) for request in request_group.requests]
        failed = RequestStatus.FAILED.value
        completions.sort(key=lambda each: (each.finish_reason == failed, -(each.cumulative_logprob or 0.0)))
        completions = completions[: request_group.params.n]
        for index, completion in enumerate(completions):
            completion.index = index
        return completions


def _end_text(request: Request) -> None:
    """Flush the text of a request that has ended."""
    status, text = request.schedule.status, request.output.text
    if text is not None and status.is_end and status is not RequestStatus.FAILED:
        text.end()


def _has_news(request: Request) -> bool:
    """Whether the caller lacks tokens, or the finish reason."""
    output = request.output
    if output.num_emitted < len(request.token_ids) - len(request.prompt_token_ids):
        return True
    return request.schedule.status.is_end and not output.end_emitted


def _completion(request: Request, *, delta: bool) -> CompletionOutput:
    output, status, token_ids = request.output, request.schedule.status, request.token_ids
    prompt_len = len(request.prompt_token_ids)
    first = output.num_emitted if delta else 0
    output.num_emitted, output.end_emitted = len(token_ids) - prompt_len, status.is_end
    text, logprobs = output.text, output.logprobs
    changes = output.weight_changes_of(output.num_emitted)
    return CompletionOutput(  # in the order of the fields: keywords take 0.2 us more, for every row and step
        request.index,
        "" if text is None else text.new() if delta else text.whole(),
        token_ids[prompt_len + first :],
        output.cumulative_logprob,
        None if logprobs is None else logprobs[first:],
        status.value if status.is_end else None,
        output.stop_reason,
        None if text is None or text.offsets is None else text.offsets[first:],
        None,
        changes[-1][1],
        changes,
        None if output.kept_ids is None else SamplingMask(output.kept_ids[first:]),
        output.routed.array(len(token_ids) - 1) if output.routed and status.is_end else None,
        None if text is None else text.special_offsets(new=delta),
    )
