"""Refuses requests that the queue or the KV pool has no room for."""

from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.errors import CapacityError, RequestError


class AdmissionControl:
    """Checks request groups before they are added."""

    def __init__(self, scheduler: Scheduler, options: SchedulingOptions, max_num_seqs: int):
        self._scheduler = scheduler
        self._options = options
        self._max_num_seqs = max_num_seqs
        self._left_waiting = 0  # requests that the last step had no room for

    def note_scheduled(self) -> None:
        """A step was scheduled. Requests that still wait found no room."""
        self._left_waiting = len(self._scheduler.waiting)

    def check_capacity(self, request_group: RequestGroup) -> None:
        """Raise CapacityError if the waiting queue is full. For requests that arrive one by one, not for batches.

        If no request waited after the last step, new arrivals take the free rows first. Only the rest count towards the
        limits.
        """
        waiting, options = self._scheduler.waiting, self._options
        free_rows = 0 if self._left_waiting else self._max_num_seqs - len(self._scheduler.running)
        if len(waiting) < free_rows:
            return
        # Requests of one group count as one: they may wait for rows while others of the group run.
        limit, queued = options.max_queued_requests, len({request.request_id for request in waiting}) - free_rows
        if limit is not None and queued >= limit:
            raise CapacityError(f"{queued} requests wait, max_queued_requests is {limit}: try again later")
        limit, tokens = options.max_queued_tokens, len(request_group.prompt_token_ids)
        if limit is not None and queued > 0 and waiting.num_tokens + tokens > limit:
            raise CapacityError(
                f"prompts of {waiting.num_tokens:,} tokens wait, and with {tokens:,} more they would exceed "
                f"max_queued_tokens={limit:,}: try again later"
            )

    def check_fits(self, request_group: RequestGroup) -> None:
        """Raise RequestError if the answers of a request group do not fit into the KV pool at the same time.

        They would preempt each other all the time.
        """
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
