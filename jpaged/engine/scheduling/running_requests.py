"""Running requests and the rows of the request table that they own."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from operator import attrgetter

from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.request import NO_ROW, Request, RequestStatus
from jpaged.engine.scheduling.waiting_queue import WaitingQueue
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import EngineError

_rank = attrgetter("schedule.rank")  # as a sort key faster than a function


class RunningRequests:
    """Requests that own a row and blocks, in the order of the scheduling policy."""

    def __init__(self, manager: KVCacheManager, waiting: WaitingQueue, num_rows: int):
        self.requests: list[Request] = []
        self.free_rows = list(reversed(range(num_rows)))
        self.on_leave: Callable[[Request], None] = lambda request: None  # called when a request loses its row
        self._manager = manager
        self._waiting = waiting
        self._num_rows = num_rows
        self._num_decoding = [0] * len(SamplerVariant)  # decoding requests, by the sampler that they need

    def enter(self, request: Request) -> None:
        """Give a request a free row."""
        schedule = request.schedule
        schedule.status = RequestStatus.RUNNING
        schedule.row = self.free_rows.pop()
        schedule.row_is_new = True
        self._waiting.rank(request)
        insort(self.requests, request, key=_rank)

    def leave(self, request: Request) -> None:
        """Free a request's row and blocks. Its full blocks can be found by name until they are allocated again."""
        schedule = request.schedule
        self.stop_decoding(request)
        self.on_leave(request)
        self._manager.names.index_computed(request)
        self._manager.release(request)
        del self.requests[bisect_left(self.requests, schedule.rank, key=_rank)]
        self.free_rows.append(schedule.row)
        schedule.row = NO_ROW
        schedule.row_is_new = False
        schedule.num_computed = schedule.num_drafts_in_flight = 0

    def start_decoding(self, request: Request) -> None:
        """Note that the request's last token is in the device's request table from now on."""
        request.schedule.decoding = True
        self._num_decoding[request.sampler] += 1

    def stop_decoding(self, request: Request) -> None:
        """Note that the request continues with known tokens, or leaves its row."""
        if request.schedule.decoding:
            request.schedule.decoding = False
            request.schedule.next_boundary = 0
            self._num_decoding[request.sampler] -= 1

    def sampler_for(self, decodes: Sequence[Request]) -> SamplerVariant:
        """The smallest sampler that supports these decodes. Reads each request only if they may differ."""
        variants = [variant for variant in SamplerVariant if self._num_decoding[variant]]
        if len(variants) == 1 and decodes:
            return variants[0]
        return max((request.sampler for request in decodes), default=SamplerVariant.GREEDY)

    def check(self) -> None:
        """Raise EngineError unless rows, states and counts agree."""
        rows = [request.schedule.row for request in self.requests]
        if sorted(rows + self.free_rows) != list(range(self._num_rows)):
            raise EngineError(f"rows in use {sorted(rows)}, free {sorted(self.free_rows)}")
        decoding = [0] * len(SamplerVariant)
        for request in self.requests:
            schedule = request.schedule
            decoding[request.sampler] += schedule.decoding
            if schedule.next_boundary and not schedule.decoding:
                raise EngineError(f"request {request.request_id} has a next boundary, but does not decode")
            if schedule.status is not RequestStatus.RUNNING or request in self._waiting:
                raise EngineError(f"request {request.request_id} runs, but is {schedule.status.value}")
        if decoding != self._num_decoding:
            raise EngineError(f"requests that decode, by sampler: {decoding}, counted {self._num_decoding}")
        if sorted(self.requests, key=_rank) != self.requests:
            raise EngineError("running requests are not in the policy's order")
