"""Replica: one simulated engine, with the real scheduler and KV manager. Only this module of the simulator calls them.

`turn` corresponds to `Engine.step`, with a cost model instead of the device:
1. The scheduler makes plan N while step N-1 runs.
2. Step N starts when step N-1 ends. The cost model gives its duration.
3. The clock moves to the end of step N-1, and its tokens arrive.
Host time is not added. The host works while the device computes, and the measured steps of a cost model take the longer
of the two times. A request has one sample and no beams, so there are no forks, and no blocks are copied on the device.

Token ids only have to distinguish blocks. All tokens of a prefix have one id. A request's own prompt tokens and its
first generated token have another. Later tokens have the same id in all requests, because block hashes are chained.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jpaged.engine.kv_cache.block_pool import prefix_root
from jpaged.engine.kv_cache.block_table import KVState
from jpaged.engine.kv_cache.kv_cache_manager import KVCacheManager
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.scheduler_state import ScheduledStep, SchedulerLimits
from jpaged.engine.scheduling.scheduling_options import SchedulingOptions
from jpaged.engine.step_plan import TransferCosts
from jpaged.errors import EngineError, RequestError
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import SamplingParams
from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import Arrival
from jpaged.simulator.records import Records
from jpaged.simulator.step_load import EngineShape, LoadMeter

# First token id of each kind; all ids are below 2**31.
LATER_TOKENS, OWN_TOKENS, PREFIX_TOKENS = 0, 1, 2**30
NO_TIME = -1.0
_GREEDY = SamplingParams(temperature=0, max_tokens=1)  # the scheduler reads Request.max_total_tokens instead
_NO_EOS: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True, eq=False)
class SimulatedRequest(Request):
    """A request whose final length is known."""

    final_length: int = 0          # tokens at its end, prompt included; at most max_total_tokens
    token: int = 0                 # id of its own prompt tokens and of its first generated token
    arrived: float = 0.0           # seconds
    ended: bool = False
    last_token_time: float = NO_TIME  # valid while `Replica._last_times` has no row for it
    last_row: int = -1                # row of its last sampled token
    due: int = -1                     # number of the step after which `_due_now` checks if it has ended


@dataclasses.dataclass(frozen=True, slots=True)
class _StepInFlight:
    step: ScheduledStep
    rows: np.ndarray  # intp[R], the plan's rows
    seconds: float
    end: float


class Replica:
    """A simulated engine that serves simulated requests and records statistics."""

    def __init__(
        self,
        shape: EngineShape,
        cost: CostModel,
        records: Records,
        *,
        prefix_caching: bool = True,
        max_tokens: int | None = None,
        scheduling: SchedulingOptions | None = None,
        host_blocks: int = 0,
    ):
        """Make an idle replica. Raises RequestError if the pool is too small for one request.

        max_tokens: output limit for the scheduler; requests may end earlier. None: each request's output length.
        """
        self.now = 0.0  # time of the next turn
        self.load = 0   # requests that wait or run
        self._meter = LoadMeter(shape)
        self._scheduling = scheduling = scheduling or SchedulingOptions()
        whole = self._meter.whole_step()
        self.manager = KVCacheManager(
            shape.num_blocks, shape.block_size, shape.windows, max_chunk=shape.max_num_batched_tokens,
            host_slots=host_blocks,
            transfer_costs=TransferCosts(cost.per_moved_block, cost.seconds(whole) / whole.tokens),
        )  # fmt: skip
        need = self.manager.max_blocks(shape.max_model_len)
        if need > shape.num_blocks:
            wants = f"one request of max_model_len={shape.max_model_len} needs {need}"
            raise RequestError("num_blocks", shape.num_blocks, f"{wants}: use more, or a smaller --max-model-len")
        limits = SchedulerLimits(shape.max_num_seqs, shape.max_num_batched_tokens, vocab_size=2**31)
        self.scheduler = Scheduler(self.manager, limits, scheduling, clock=lambda: self.now)
        self._prefix_caching = prefix_caching
        self._cost = cost
        self._records = records
        self._shape = shape
        self._max_tokens = max_tokens
        self._root = prefix_root()
        self._in_flight: _StepInFlight | None = None
        # By row: time of the last token sampled in it, and its request.
        self._last_times = np.full(shape.max_num_seqs, NO_TIME)
        self._owners: list[SimulatedRequest | None] = [None] * shape.max_num_seqs
        self._takes = 0                                       # number of steps whose tokens have arrived
        self._last_take = NO_TIME                             # time at which the last step's tokens arrived
        self._due: dict[int, list[SimulatedRequest]] = {}     # number of a step -> requests that may end in it
        self._extra_rows = False                              # the step in flight has rows of ended requests

    @property
    def next_turn(self) -> float:
        """Time of the next turn; infinity while the replica is idle."""
        return self.now if self.load or self._in_flight is not None else math.inf

    @property
    def host_blocks(self) -> int:
        """Capacity of the host tier in blocks; 0 if there is none, or if moving blocks would not pay."""
        tier = self.manager.pool.host_tier
        return 0 if tier is None else tier.num_slots

    def refuses(self, arrival: Arrival) -> bool:
        """Return True if the queue has no room for a request. Same rule as `Engine`'s queue limits."""
        waiting, limits = self.scheduler.waiting, self._scheduling
        if limits.max_queued_requests is not None and len(waiting) >= limits.max_queued_requests:
            return True
        most = limits.max_queued_tokens
        return most is not None and len(waiting) > 0 and waiting.num_tokens + arrival.prompt_tokens > most

    def add(self, arrival: Arrival, number: int, time: float) -> None:
        """Queue a request that arrived at `time`. number: its index among all arrivals."""
        if not self.load and self._in_flight is None:
            self.now = max(self.now, time)
        self.load += 1
        self.scheduler.add(self._request(arrival, number, time))

    def turn(self) -> list[float]:
        """Run one turn. Returns the end times of requests that ended in it."""
        now, before = self.now, self._in_flight
        step = self.scheduler.schedule()
        self._in_flight = None
        if step is not None:
            rows = step.plan.rows.astype(np.intp)  # indexing with intp is three times as fast
            load = self._meter.measure(step.plan, rows)
            seconds = self._cost.seconds(load)
            computed = step.plan.num_decodes + len(step.plan.prompt_tokens)
            between = self._cost.seconds_between_devices(load)
            self._records.note_step(computed, seconds, between, beyond=self._cost.goes_beyond(load))
            begin = now if before is None else before.end
            self._in_flight = _StepInFlight(step, rows, seconds, begin + seconds)
            if step.plan.row_inits:
                self._note_starts(step, now)
        if before is not None:
            self.now = before.end
            return self._take(before, now)
        if step is None:
            raise EngineError(f"{self.load} simulated requests wait and none can be scheduled")
        return []

    def _request(self, arrival: Arrival, number: int, time: float) -> SimulatedRequest:
        own = OWN_TOKENS + number % (PREFIX_TOKENS - OWN_TOKENS)
        shared = arrival.prefix_tokens
        prompt = [own] * (arrival.prompt_tokens - shared)
        if shared:
            prompt = [PREFIX_TOKENS + arrival.prefix_id % PREFIX_TOKENS] * shared + prompt
        final = arrival.prompt_tokens + arrival.output_tokens
        longest = final
        if self._max_tokens is not None:
            longest = min(max(arrival.prompt_tokens + self._max_tokens, final), self._shape.max_model_len)
        request = SimulatedRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            params=_GREEDY,
            max_total_tokens=longest,
            eos_token_ids=_NO_EOS,
            eos_token_id=None,
            kv=KVState(self._root),
            metrics=RequestMetrics(arrival_time=time),
            arrival=number,
            final_length=final,
            token=own,
            arrived=time,
            priority=arrival.priority,
        )
        if not self._prefix_caching:
            request.kv.make_private(number.to_bytes(8, "little"))
        return request

    def _note_starts(self, step: ScheduledStep, now: float) -> None:
        requests: Any = step.requests
        starting = {init.row for init in step.plan.row_inits}
        first = step.plan.num_decodes
        for row, request in zip(step.plan.rows[first:].tolist(), requests[first:], strict=True):
            if row in starting and not request.metrics.preemptions:
                self._records.note_start(request, now)

    # -- tokens arrive ------------------------------------------------------------------------------------------

    def _take(self, done: _StepInFlight, since: float) -> list[float]:
        plan, now = done.step.plan, self.now
        requests: Any = done.step.requests
        decodes = plan.num_decodes
        self._takes += 1
        self.scheduler.note_seconds(done.step, done.seconds)
        sampled = self._take_decodes(done.rows[:decodes], requests[:decodes], now) if decodes else 0
        finished = self._due_now()
        if decodes < len(requests):
            sampled += self._take_prompts(plan, requests, now, finished)
        self._last_take, self._extra_rows = now, False
        scheduler, pool = self.scheduler, self.manager.pool
        self._records.note_tokens(
            since, now, running=len(scheduler.running), waiting=len(scheduler.waiting),
            kv_use=pool.num_used / pool.num_blocks, prompt_tokens=len(plan.prompt_tokens), output_tokens=sampled,
        )  # fmt: skip
        for request in finished:
            self._finish(request, now)
        return [now] * len(finished)

    def _take_decodes(self, rows: np.ndarray, requests: Any, now: float) -> int:
        # Only this loop and `note_arrived` visit every sampled token, 128 million in a large run. The rest is numpy.
        self.scheduler.note_arrived(requests)
        for request in requests:
            request.token_ids.append(LATER_TOKENS)
        if self._extra_rows:  # rows of requests that ended while this step ran
            rows = rows[[not request.ended for request in requests]]
        last_times = self._last_times[rows]
        self._last_times[rows] = now
        if (last_times == self._last_take).all():  # usual case: every row had a token in the step before
            if len(rows):
                self._records.inter_token.add(now - self._last_take, len(rows))
        else:
            self._records.inter_token.add_many(now - last_times)
        return len(rows)

    def _due_now(self) -> list[SimulatedRequest]:
        """Decoding requests whose last token arrived in this step."""
        ends = []
        for request in self._due.pop(self._takes, ()):
            if request.due == self._takes and not request.ended:
                request.due = -1
                if len(request.token_ids) == request.final_length:
                    ends.append(request)
                else:  # it did not run in every step
                    self._expect(request)
        return ends

    def _expect(self, request: SimulatedRequest) -> None:
        """Check a decoding request again after the first step in which it can end, at one token a step."""
        request.due = self._takes + request.final_length - len(request.token_ids)
        self._due.setdefault(request.due, []).append(request)

    def _take_prompts(self, plan: Any, requests: Any, now: float, finished: list[SimulatedRequest]) -> int:
        """Add sampled tokens of rows that finished their prompt, or finished recomputing after a preemption."""
        decodes, sampled = plan.num_decodes, 0
        samples = plan.samples[decodes:].tolist()
        for row, request, ends in zip(plan.rows[decodes:].tolist(), requests[decodes:], samples, strict=True):
            if not ends:
                continue
            self.scheduler.note_arrived((request,))
            if request.ended:
                continue
            sampled += 1
            first = len(request.token_ids) == request.prompt_len
            request.token_ids.append(request.token if first else LATER_TOKENS)
            last = self._move_to(request, row)
            if first:
                self._records.first_token.add(now - request.arrived)
            else:
                self._records.inter_token.add(now - last)
            self._last_times[row] = now
            if len(request.token_ids) == request.final_length:
                finished.append(request)
            else:
                self._expect(request)
        return sampled

    def _move_to(self, request: SimulatedRequest, row: int) -> float:
        """Assign a row to a request. Returns the time of the request's last token, from any row."""
        owner = self._owners[row]
        if owner is request:
            return float(self._last_times[row])
        if owner is not None and not owner.ended:
            owner.last_token_time = float(self._last_times[row])
        if request.last_row >= 0 and self._owners[request.last_row] is request:
            request.last_token_time = float(self._last_times[request.last_row])
            self._owners[request.last_row] = None
        request.last_row = row
        self._owners[row] = request
        return request.last_token_time

    def _finish(self, request: SimulatedRequest, now: float) -> None:
        request.ended = True
        stopped = request.final_length < request.max_total_tokens
        self.scheduler.finish(request, RequestStatus.STOPPED if stopped else RequestStatus.LENGTH)
        self._extra_rows |= request.schedule.num_in_flight > 0
        self.load -= 1
        if self._owners[request.last_row] is request:
            self._owners[request.last_row] = None
        self._records.note_finish(request, now)
