"""Refuses requests that the queue or the KV pool has no room for."""

import dataclasses
import threading

from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.errors import CapacityError, RequestError


class QueueFull(CapacityError):
    """A limit of the waiting queue is reached. limit: name of the option that sets it."""

    def __init__(self, limit: str, message: str):
        super().__init__(message)
        self.limit = limit


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLength:
    """Length of the waiting queue at one moment."""

    queued: int = 0      # waiting request groups minus free rows; negative if rows stay free
    num_tokens: int = 0  # of their prompts

    def plus(self, queued: int, num_tokens: int) -> "QueueLength":
        """The length with `queued` more requests, whose prompts have `num_tokens` tokens. Negative: fewer."""
        return QueueLength(self.queued + queued, self.num_tokens + num_tokens)

    def check(self, options: SchedulingOptions, num_tokens: int) -> None:
        """Raise QueueFull if a request with a prompt of `num_tokens` tokens exceeds a limit of the queue."""
        if self.queued < 0:
            return
        limit = options.max_queued_requests
        if limit is not None and self.queued >= limit:
            message = f"{self.queued} requests wait, max_queued_requests is {limit}: try again later"
            raise QueueFull("max_queued_requests", message)
        limit = options.max_queued_tokens
        if limit is not None and self.queued > 0 and self.num_tokens + num_tokens > limit:
            raise QueueFull(
                "max_queued_tokens",
                f"prompts of {self.num_tokens:,} tokens wait, and with {num_tokens:,} more they would exceed "
                f"max_queued_tokens={limit:,}: try again later",
            )


class AdmissionControl:
    """Checks request groups before they are added."""

    def __init__(self, scheduler: Scheduler, options: SchedulingOptions, max_num_seqs: int):
        self._scheduler = scheduler
        self._options = options
        self._max_num_seqs = max_num_seqs
        self._counting = threading.Lock()
        self._left_waiting = 0  # requests that the last step had no room for

    def note_scheduled(self) -> None:
        """Note that a step was scheduled. Requests that still wait found no room."""
        self._left_waiting = self._scheduler.num_waiting

    def check_capacity(self, request_group: RequestGroup) -> None:
        """Raise CapacityError if the waiting queue is full. For requests that arrive one by one, not for batches.

        If the last step left no request waiting, arrivals take free rows first. Only the rest count towards the limits.
        """
        self.check_length(self.queue_length(), len(request_group.prompt_token_ids))

    @property
    def has_limits(self) -> bool:
        """Whether the queue has a limit."""
        return self._options.max_queued_requests is not None or self._options.max_queued_tokens is not None

    def queue_length(self) -> QueueLength:
        """The length of the queue now, in time that grows with the queue."""
        scheduler = self._scheduler
        free_rows = 0 if self._left_waiting else self._max_num_seqs - len(scheduler.running)
        count, num_tokens = scheduler.num_waiting, scheduler.waiting.num_tokens + scheduler.adapters.num_tokens
        if count < free_rows:
            return QueueLength(count - free_rows, num_tokens)
        # Requests of one group count as one: they may wait for rows while others of the group run.
        groups = len({request.request_id for request in scheduler.all_waiting()})
        return QueueLength(groups - free_rows, num_tokens)

    def has_room(self, length: QueueLength, num_tokens: int) -> bool:
        """Whether `check_length` would raise nothing. Any thread may call it."""
        try:
            length.check(self._options, num_tokens)
        except QueueFull:
            return False
        return True

    def check_length(self, length: QueueLength, num_tokens: int) -> None:
        """Raise CapacityError if a queue of this length has no room for `num_tokens` more. Any thread may call it."""
        try:
            length.check(self._options, num_tokens)
        except QueueFull as error:
            with self._counting:  # threads may refuse at the same time
                self._scheduler.counters.note_rejection(error.limit)
            raise

    def check_fits(self, request_group: RequestGroup) -> None:
        """Raise RequestError if a group's answers do not fit into the KV pool. They would preempt each other."""
        count, manager, strategy = len(request_group.requests), self._scheduler.manager, request_group.strategy
        if count == 1 or (request_group.params.max_tokens is None and not strategy.runs_all_at_once):
            return
        total, prompt = request_group.first.max_total_tokens, len(request_group.prompt_token_ids)
        shared = prompt // manager.block_size * manager.windows.count(None)
        at_once = count if strategy.runs_all_at_once else min(count, self._max_num_seqs)
        need = shared + at_once * (manager.max_blocks(total) - shared)
        if need > manager.pool.num_blocks:
            raise RequestError(
                strategy.count_parameter(request_group.params),
                count,
                f"{count} answers of {total - prompt:,} tokens to a prompt of {prompt:,} tokens need {need:,} blocks "
                f"of KV cache, there are {manager.pool.num_blocks:,}: ask for fewer answers, or a smaller max_tokens",
            )
