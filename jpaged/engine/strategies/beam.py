"""Beam search: every live beam is a request, and the host chooses the next token of all beams together.

One step of the search:

1. Each live beam computes all its tokens, returns its candidates, and goes on hold.
2. When the last live beam has returned its candidates, `BeamSearch` chooses the beams that survive.
3. A beam with one heir continues in its own row and blocks. For each further heir, an idle request of the group becomes
   a fork, which shares the beam's blocks. A beam without an heir frees its row and blocks.
4. Each heir gets its new token, and computes it in the next step.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from jpaged.engine.observe.engine_metrics import AnswerEnd
from jpaged.engine.output.answer_text import AnswerText
from jpaged.engine.output.answer_writer import stop_reason
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.strategies.base import (
    CollectedStep,
    Output,
    Strategy,
    StrategyContext,
    request_output,
    returned_ends,
    sampling_error,
)
from jpaged.engine.strategies.beam_search import BeamSearch, BeamStep, Hypothesis
from jpaged.errors import EngineError
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput, WeightVersion
from jpaged.params.sampling import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.request_group import RequestGroup


class BeamStrategy(Strategy):
    """The beams of one search. The request group has one request per beam."""

    runs_all_at_once: ClassVar[bool] = True

    def __init__(self, search: BeamSearch, *, keep_candidates: bool):
        """keep_candidates: keep every step's candidates, for the log-probabilities of the answers."""
        self.search = search
        self._requests: list[Request] = []
        self._beams: list[Request] = []  # live beams, in the order of the search
        # (int32[K] token ids, float32[K] log-probabilities) of each beam that has returned them in this step
        self._candidates: dict[Request, tuple[np.ndarray, np.ndarray]] = {}
        # the same of all steps: (int32[beams, K], float32[beams, K])
        self._history: list[tuple[np.ndarray, np.ndarray]] | None = [] if keep_candidates else None

    def begin(self, request_group: "RequestGroup", context: StrategyContext) -> None:
        """Add the prompt, which is the only live beam at first."""
        self.context = context
        self._requests, self._beams = request_group.requests, [request_group.first]
        context.scheduler.add(request_group.first)

    def take(self, request: Request, collected: CollectedStep, index: int) -> RequestStatus | None:
        """Store a beam's candidates. When all live beams have returned candidates, advance the search."""
        result = collected.result
        if collected.token_ids[index] < 0:
            raise sampling_error(collected.token_ids[index], request.params)
        self.context.counters.generated_tokens += 1
        if result.top_ids is None or result.top_logprobs is None:
            raise EngineError(f"request {request.request_id} is a beam, but the step returned no log-probabilities")
        self._candidates[request] = (result.top_ids[index], result.top_logprobs[index])
        if len(self._candidates) < len(self._beams):
            return None
        metrics = request.metrics
        metrics.last_token_time = collected.now
        if metrics.first_token_time is None:
            metrics.first_token_time = collected.now
        steps = self._advance_search()
        if self.search.is_over:
            return RequestStatus.STOPPED
        self._continue_with(steps, collected.now)
        return None

    def ends(self, request_group: "RequestGroup", output: Output) -> list[AnswerEnd]:
        """Ends of the answers that are returned."""
        return returned_ends(output)

    def output(self, request_group: "RequestGroup") -> RequestOutput:
        """The best answers so far."""
        params, status = request_group.params, request_group.first.schedule.status
        found = self.search.best(params.n)
        completions = [self._completion(request_group, index, each) for index, each in enumerate(found)]
        if not completions and status.is_end:  # it ended before its first step
            changes = request_group.first.output.weight_changes_of(0)
            completions.append(CompletionOutput(
                0, "", [], None, None, finish_reason=status.value, weight_version=changes[-1][1],
                weight_changes=changes,
            ))  # fmt: skip
        return request_output(request_group, completions)

    def ending_with(self, request_group: "RequestGroup", request: Request) -> Sequence[Request]:
        """All beams end together."""
        return request_group.requests

    def scheduled(self, request_group: "RequestGroup") -> Collection[Request]:
        """Live beams, except beams on hold that were preempted: they are not in the waiting queue until `resume`."""
        return [beam for beam in self._beams if beam.schedule.row >= 0 or not beam.schedule.on_hold]

    def note_weights(self, request_group: "RequestGroup", version: WeightVersion) -> None:
        """As for all strategies. A token counts as new if new weights computed the candidates of one or more beams."""
        request_group.first.output.note_weights(self.search.num_tokens, version)

    @staticmethod
    def count_parameter(params: SamplingParams) -> str:
        """Name of the parameter that sets the number of requests."""
        return "beam_width"

    def _advance_search(self) -> list[BeamStep]:
        candidates = [self._candidates[beam] for beam in self._beams]
        token_ids, logprobs = (np.stack(part) for part in zip(*candidates, strict=True))
        self._candidates.clear()
        if self._history is not None:
            self._history.append((token_ids, logprobs))
        return self.search.advance(token_ids, logprobs)

    def _continue_with(self, steps: Sequence[BeamStep], now: float) -> None:
        """Let the surviving beams continue, each with its new token. now: when the tokens arrived."""
        scheduler = self.context.scheduler
        parents = [self._beams[step.parent] for step in steps]
        to_continue = set(parents)  # each continues once in its own row
        idle = [request for request in self._requests if request not in to_continue]
        for request in self._beams:
            if request not in to_continue:
                scheduler.park(request)
        heirs = []
        for parent in parents:
            if parent in to_continue:
                to_continue.discard(parent)
                heirs.append(parent)
            else:
                heir = idle.pop()
                heir.token_ids[:] = parent.token_ids
                scheduler.fork(parent, heir)
                heir.output.last_token_time = now
                heirs.append(heir)
        for heir, step in zip(heirs, steps, strict=True):  # after all forks: they copy their parents' tokens
            heir.token_ids.append(step.token_id)
            scheduler.resume(heir)
        self._beams = heirs

    def _completion(self, request_group: "RequestGroup", index: int, found: Hypothesis) -> CompletionOutput:
        params, first = request_group.params, request_group.first
        token_ids, status = list(found.token_ids), first.schedule.status
        stopped = found.finish_reason == "stop"
        text = self._text(request_group, token_ids, stopped=stopped)
        changes = first.output.weight_changes_of(len(token_ids))
        return CompletionOutput(
            index=index,
            text="" if text is None else text.whole(),
            token_ids=token_ids,
            cumulative_logprob=found.cumulative_logprob,
            logprobs=None if params.logprobs is None else self._logprobs(params, found, params.logprobs),
            finish_reason=found.finish_reason or (status.value if status.is_end else None),
            stop_reason=stop_reason(first, token_ids[-1]) if stopped else None,
            text_offsets=None if text is None else text.offsets,
            special_offsets=None if text is None else text.special_offsets(new=False),
            weight_version=changes[-1][1],
            weight_changes=changes,
        )

    def _text(self, request_group: "RequestGroup", token_ids: list[int], *, stopped: bool) -> AnswerText | None:
        """stopped: the last token ended the answer. It has no text, unless the caller asks for it."""
        params = request_group.params
        text = self.context.writer.new_text(params, request_group.prompt_token_ids)
        if text is not None:
            skips_last = stopped and not params.include_stop_str_in_output
            for token_id in token_ids[:-1] if skips_last else token_ids:
                text.add(token_id)
            if skips_last:
                text.add_without_text(token_ids[-1])
            text.end()
        return text

    def _logprobs(self, params: SamplingParams, found: Hypothesis, count: int) -> list[dict[int, Logprob]]:
        """Log-probabilities at each position, from the beam that proposed the token."""
        entries = []
        steps = zip(found.token_ids, found.logprobs, found.beam_indices, self._history or (), strict=False)
        for token_id, logprob, beam, (ids, values) in steps:
            top_ids, top_logprobs = ids[beam].tolist(), values[beam].tolist()
            rank = top_ids.index(token_id) + 1
            entries.append(
                self.context.writer.entries(params, token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
            )
        return entries
