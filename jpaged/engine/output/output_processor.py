"""Turns the results of steps into outputs of request groups.

Called by: `Engine`, for new requests, collected steps, aborts and failed steps.
Owns: the live request groups.
Never: lets the error of one request group end another.

1. `add` registers a request group, and lets its strategy begin.
2. `process` hands each row's result to the strategy of its request group, and ends requests. It returns outputs of
   request groups that ended, or that stream a new token.
3. `late_masks` computes masks that depend on the tokens of the step just processed.
"""

import logging
import time
from collections.abc import Callable, Iterable

import numpy as np

from jpaged.engine.observe.engine_metrics import EngineMetrics
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduling.scheduler_state import ScheduledStep
from jpaged.engine.step_plan import FROM_DEVICE, RowMask, StepPlan
from jpaged.engine.strategies import CollectedStep, Output, StrategyContext
from jpaged.errors import EngineError, LogitsError, RequestError
from jpaged.outputs import WeightVersion

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Owns the live request groups."""

    def __init__(self, context: StrategyContext, metrics: EngineMetrics | None = None):
        """metrics: receives times of tokens and ends of requests; None: they are not collected."""
        self.request_groups: dict[str, RequestGroup] = {}  # by request id
        self._context = context
        self._scheduler = context.scheduler
        self._counters = context.counters
        self._metrics = metrics

    def add(self, request_group: RequestGroup) -> None:
        """Register a request group and let it begin. Raises the grammar compiler's error."""
        request_group.strategy.begin(request_group, self._context)
        self.request_groups[request_group.request_id] = request_group

    def process(self, collected: CollectedStep) -> list[Output]:
        """Return outputs of the request groups that ended with this step, or that stream a new token."""
        request_groups = self.request_groups
        if collected.result.routed_experts is not None:
            _take_routed(collected, collected.result.routed_experts)
        taken = []  # requests that have a new token
        news: dict[RequestGroup, None] = dict.fromkeys(self._take_scores(collected))  # an ordered set
        for index, request in self._scheduler.results(collected.step, collected.result.num_accepted):
            request_group = request_groups[request.request_id]
            strategy = request_group.strategy
            try:
                end = strategy.take(request, collected, index)
            except Exception as error:  # the other requests continue
                self._note_failure(request, error)
                end = RequestStatus.FAILED
            else:
                taken.append(request)
            if end is not None:
                self._finish(strategy.ending_with(request_group, request), end)
                news[request_group] = None
            elif request_group.streams and strategy.is_due(request):
                if (sink := request_group.sink) is not None:  # its only request, which runs
                    sink.add(request_group)
                else:
                    news[request_group] = None
        if self._metrics is not None and collected.token_ids:  # a model that pools has no tokens
            self._metrics.note_tokens(collected.now, taken)
        outputs = []
        for request_group in news:
            if request_group.has_ended:
                outputs.append(self._final_output(request_group))
            elif request_group.streams:
                outputs.append(request_group.strategy.output(request_group))
        return outputs

    def late_masks(
        self, step: ScheduledStep, proposed: Callable[[], np.ndarray]
    ) -> tuple[list[RowMask], list[Output]]:
        """Masks for a dispatched step, now that the tokens that they depend on have arrived.

        proposed: returns `Runner.proposed` of the step.
        Also returns final outputs of request groups that end because their grammar allows no token or is too slow.
        """
        masks: list[RowMask] = []
        ended = []
        for index, (request, samples) in enumerate(zip(step.requests, step.plan.samples.tolist(), strict=True)):
            extras, schedule = request.extras, request.schedule
            if not samples or extras is None or schedule.row < 0 or request in step.discarded:
                continue
            if request.score_from is not None:
                continue  # the token that it samples is dropped
            if not extras.follows_tokens and not schedule.mask_pending:
                continue
            try:
                masks += self._masks_of(request, step.plan, index, proposed)
            except Exception as error:  # the other requests continue
                request_group = self.request_groups[request.request_id]
                self._note_failure(request, error)
                self._scheduler.finish(request, RequestStatus.FAILED)
                if request_group.has_ended:
                    ended.append(request_group)
        return masks, [self._final_output(request_group) for request_group in ended]

    def _masks_of(
        self, request: Request, plan: StepPlan, index: int, proposed: Callable[[], np.ndarray]
    ) -> list[RowMask]:
        """Masks of one row of a plan, now that all tokens before the step are known. index: of the row."""
        schedule, extras = request.schedule, request.extras
        if plan.drafts is None:
            if extras is not None:
                schedule.mask_pending = request.num_output_tokens < extras.min_tokens
            return [RowMask(schedule.row, request.mask())]
        first, count = plan.first_token(index), int(plan.num_tokens[index])
        if plan.drafts.first[index] == FROM_DEVICE:
            drafts = [draft for draft in proposed()[index, : count - 1].tolist() if draft >= 0] if count > 1 else []
        else:
            drafts = plan.drafts.after(index, len(request.token_ids) - 1, request.token_ids[-1], count - 1)
        masks = request.draft_masks(drafts, self._context.writer.token_bytes)
        return [RowMask(schedule.row, mask, first + i) for i, mask in enumerate(masks)]

    def end(self, request_group: RequestGroup, status: RequestStatus) -> Output:
        """End all requests of a group that have not ended. Returns its final output."""
        self._finish((r for r in request_group.requests if not r.schedule.status.is_end), status)
        return self._final_output(request_group)

    def stop(self, request_group: RequestGroup, index: int, num_tokens: int) -> Output | None:
        """End one answer, whose text has ended after `num_tokens` tokens. Tokens after these do not count.

        Returns the final output if no answer is left. An answer that has ended is left as it is.
        """
        request = request_group.requests[index]
        if request.schedule.status.is_end:
            return None
        self._finish(request_group.strategy.ending_with(request_group, request), RequestStatus.STOPPED)
        surplus = max(request.num_output_tokens - num_tokens, 0)
        del request.token_ids[len(request.token_ids) - surplus :]
        self._counters.generated_tokens -= surplus
        return self._final_output(request_group) if request_group.has_ended else None

    def fail_touched(self) -> tuple[str, ...]:
        """End request groups that run or have tokens in flight: a failed step may affect them. Returns their ids."""
        touched = [
            request_group
            for request_group in self.request_groups.values()
            if any(r.schedule.row >= 0 or r.schedule.num_in_flight for r in request_group.requests)
        ]
        for request_group in touched:
            self.end(request_group, RequestStatus.FAILED)
        return tuple(request_group.request_id for request_group in touched)

    def note_weights(self, version: WeightVersion) -> None:
        """Note in all live requests that new weights compute the tokens from now on. No step is in flight."""
        for request_group in self.request_groups.values():
            request_group.strategy.note_weights(request_group, version)

    def fail_all(self) -> tuple[str, ...]:
        """End all request groups, also those that wait. Returns their ids."""
        live = list(self.request_groups.values())
        for request_group in live:
            self.end(request_group, RequestStatus.FAILED)
        return tuple(request_group.request_id for request_group in live)

    def live_requests(self) -> Iterable[Request]:
        """All requests of all live request groups."""
        return (request for request_group in self.request_groups.values() for request in request_group.requests)

    def check_idle(self) -> None:
        """Raise EngineError if blocks are held though no request is left."""
        if not self.request_groups and self._scheduler.manager.pool.num_used:
            raise EngineError(f"no request is left, but {self._scheduler.manager.pool.num_used} blocks are held")

    def check_integrity(self) -> None:
        """Raise EngineError unless the scheduler knows exactly the requests that should run or wait."""
        known = {*self._scheduler.running, *self._scheduler.all_waiting()}
        live = {r for each in self.request_groups.values() for r in each.strategy.scheduled(each)}
        if known != live:
            raise EngineError(f"{len(known)} requests are scheduled, {len(live)} live")

    def _take_scores(self, collected: CollectedStep) -> list[RequestGroup]:
        """Hand scores of prompt tokens to the requests that asked for them. Returns request groups that failed."""
        first, failed = 0, []
        for request, count in collected.step.scored:
            if not request.schedule.status.is_end:
                request_group = self.request_groups[request.request_id]
                try:
                    request_group.strategy.take_scores(request, collected.result, slice(first, first + count))
                except Exception as error:  # the other requests continue
                    self._note_failure(request, error)
                    self._finish(request_group.requests, RequestStatus.FAILED)
                    failed.append(request_group)
            first += count
        return failed

    def _finish(self, requests: Iterable[Request], status: RequestStatus) -> None:
        for request in requests:
            self._scheduler.finish(request, status)

    def _final_output(self, request_group: RequestGroup) -> Output:
        """Return the last output of a request group that has ended, and forget the group."""
        del self.request_groups[request_group.request_id]
        self._scheduler.note_group_ended(request_group.request_id)
        self._counters.finished_requests += 1
        request_group.metrics.finished_time = time.monotonic()
        strategy = request_group.strategy
        try:
            output = strategy.output(request_group)
        except Exception as error:  # the end of a text could not be decoded
            for request in request_group.requests:
                self._note_failure(request, error)
                self._scheduler.finish(request, RequestStatus.FAILED)
            output = strategy.output(request_group)
        if self._metrics is not None:
            self._metrics.note_end(request_group, strategy.ends(request_group, output))
        return output

    def _note_failure(self, request: Request, error: Exception) -> None:
        self._counters.corrupted_requests += isinstance(error, LogitsError)
        _log_failure(request, error)


def _take_routed(collected: CollectedStep, routed: np.ndarray) -> None:
    """Hand the experts of a step's tokens to their requests. Rejected drafts have none."""
    plan, accepted = collected.step.plan, collected.result.num_accepted
    starts = {init.row: init.num_computed for init in plan.row_inits}
    counts = plan.num_tokens if accepted is None else accepted + 1
    firsts = np.cumsum(plan.num_tokens) - plan.num_tokens
    columns = (plan.rows.tolist(), firsts.tolist(), counts.tolist())
    for request, row, first, count in zip(collected.step.requests, *columns, strict=True):
        if request.output.routed is not None:
            request.output.routed.append(routed[first : first + count], starts.get(row))


def _log_failure(request: Request, error: Exception) -> None:
    about = {"request_id": request.request_id}
    if isinstance(error, RequestError):  # the caller's grammar or logits processor: report it as the stop reason
        request.output.stop_reason = error.accepted
        logger.warning("request %s ends: %s", request.request_id, error, extra=about)
    elif isinstance(error, LogitsError):
        request.output.stop_reason = error.message
        logger.error("request %s ends: %s", request.request_id, error, extra=about)
    else:
        what = "request %s ends: its output could not be processed"
        logger.error(what, request.request_id, exc_info=error, extra=about)
