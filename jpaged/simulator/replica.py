"""Replica: one simulated engine, the real scheduler and KV manager under a clock. All that touches these two is here.

`turn` is what `Engine.step` is, with a cost model in the place of the device:
1. the scheduler makes plan N, while step N-1 runs;
2. step N begins when N-1 ends, and takes as long as the cost model says;
3. the clock goes to the end of step N-1, whose tokens arrive.
The host takes no time of its own: it works while the device does, and the measured steps that a cost model is fitted
to are as long as the slower of the two.

A request is one answer: there are no samples and beams beside it, so nothing is forked, and no step has a row that only
samples from another's prompt, or a block to copy on the device.

Token ids only have to tell blocks apart: a prefix's tokens are all one number, a request's own tokens another, up to
the first that it generates. Names of blocks are chains, so what comes after that may be the same for all.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jpaged.engine.block_pool import prefix_root
from jpaged.engine.block_table import KVState
from jpaged.engine.kv_cache_manager import KVCacheManager
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.scheduler_state import ScheduledStep, SchedulerLimits
from jpaged.engine.scheduling_options import SchedulingOptions
from jpaged.engine.step_plan import TransferCosts
from jpaged.errors import EngineError, RequestError
from jpaged.outputs import RequestMetrics
from jpaged.params.sampling import SamplingParams
from jpaged.simulator.cost import CostModel
from jpaged.simulator.load import Arrival
from jpaged.simulator.records import Records
from jpaged.simulator.step_load import EngineShape, LoadMeter

# Ids of each kind begin here; all are below 2**31.
LATER_TOKENS, OWN_TOKENS, PREFIX_TOKENS = 0, 1, 2**30
NO_TIME = -1.0
_GREEDY = SamplingParams(temperature=0, max_tokens=1)  # the scheduler goes by max_total_tokens
_NO_EOS: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True, eq=False)
class SimulatedRequest(Request):
    """A request whose end is known."""

    final_length: int = 0          # tokens, prompt included, at which it ends; at most max_total_tokens
    token: int = 0                 # the id of its own prompt tokens and of the first that it generates
    arrived: float = 0.0
    ended: bool = False
    last_token_time: float = NO_TIME  # while no row of the replica's table keeps it
    last_row: int = -1                # where it sampled last
    due: int = -1                     # the step that it is to be looked at in, whether it ends


@dataclasses.dataclass(frozen=True, slots=True)
class _StepInFlight:
    step: ScheduledStep
    rows: np.ndarray  # intp[R], the plan's
    seconds: float
    end: float


class Replica:
    """An engine of a given shape that serves simulated requests, and writes down what happens to them."""

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
        """max_tokens: what requests are allowed beyond their prompt (the scheduler does not know that they end
        earlier); None: exactly what they generate. Raises RequestError where the pool is too small for one request."""
        self.now = 0.0  # when the host turns next
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
            raise RequestError("num_blocks", shape.num_blocks, f"{wants}: give more, or a smaller --max-model-len")
        limits = SchedulerLimits(shape.max_num_seqs, shape.max_num_batched_tokens, vocab_size=2**31)
        self.scheduler = Scheduler(self.manager, limits, scheduling, clock=lambda: self.now)
        self._prefix_caching = prefix_caching
        self._cost = cost
        self._records = records
        self._shape = shape
        self._max_tokens = max_tokens
        self._root = prefix_root()
        self._in_flight: _StepInFlight | None = None
        # By row: for whom it sampled last, and when.
        self._last_times = np.full(shape.max_num_seqs, NO_TIME)
        self._owners: list[SimulatedRequest | None] = [None] * shape.max_num_seqs
        self._takes = 0                                       # steps whose tokens have arrived
        self._last_take = NO_TIME                             # when those of the last one did
        self._due: dict[int, list[SimulatedRequest]] = {}     # by number of the step: who may end in it
        self._extra_rows = False                              # the step that runs has rows of ended requests

    @property
    def next_turn(self) -> float:
        """When the host has something to do; infinity while it is idle."""
        return self.now if self.load or self._in_flight is not None else math.inf

    @property
    def host_blocks(self) -> int:
        """Blocks that the host tier has room for; 0 where there is none, because moving them would not pay."""
        tier = self.manager.pool.host_tier
        return 0 if tier is None else tier.num_slots

    def refuses(self, arrival: Arrival) -> bool:
        """Whether the queue is full for a request, as `Engine.add` has it."""
        waiting, limits = self.scheduler.waiting, self._scheduling
        if limits.max_queued_requests is not None and len(waiting) >= limits.max_queued_requests:
            return True
        most = limits.max_queued_tokens
        return most is not None and len(waiting) > 0 and waiting.num_tokens + arrival.prompt_tokens > most

    def add(self, arrival: Arrival, number: int, time: float) -> None:
        """Put a request into the queue that arrived at `time`. number: of all arrivals."""
        if not self.load and self._in_flight is None:
            self.now = max(self.now, time)
        self.load += 1
        self.scheduler.add(self._request(arrival, number, time))

    def turn(self) -> list[float]:
        """One turn; the times at which requests ended in it."""
        now, before = self.now, self._in_flight
        step = self.scheduler.schedule()
        self._in_flight = None
        if step is not None:
            rows = step.plan.rows.astype(np.intp)  # numpy indexes with these three times as fast
            load = self._meter.measure(step.plan, rows)
            seconds = self._cost.seconds(load)
            computed = step.plan.num_decodes + len(step.plan.prompt_tokens)
            self._records.note_step(computed, seconds, beyond=self._cost.goes_beyond(load))
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
        # The one loop over all sampled tokens: 128 million times in a large run, so all else is done by row, in bulk.
        self.scheduler.note_arrived(requests)
        for request in requests:
            request.token_ids.append(LATER_TOKENS)
        if self._extra_rows:  # of requests that were found finished while this step ran
            rows = rows[[not request.ended for request in requests]]
        last_times = self._last_times[rows]
        self._last_times[rows] = now
        if (last_times == self._last_take).all():  # mostly: all had a token in the step before
            if len(rows):
                self._records.inter_token.add(now - self._last_take, len(rows))
        else:
            self._records.inter_token.add_many(now - last_times)
        return len(rows)

    def _due_now(self) -> list[SimulatedRequest]:
        """Requests whose last token has arrived in this step."""
        ends = []
        for request in self._due.pop(self._takes, ()):
            if request.due == self._takes and not request.ended:
                request.due = -1
                if len(request.token_ids) == request.final_length:
                    ends.append(request)
                else:  # it missed steps
                    self._expect(request)
        return ends

    def _expect(self, request: SimulatedRequest) -> None:
        """Look at a decoding request again in the first step that it can end in: it gets one token a step at most."""
        request.due = self._takes + request.final_length - len(request.token_ids)
        self._due.setdefault(request.due, []).append(request)

    def _take_prompts(self, plan: Any, requests: Any, now: float, finished: list[SimulatedRequest]) -> int:
        """Tokens of rows that computed the end of their known tokens: of new requests and of preempted ones."""
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
        """Make a row the request's; when it sampled last, wherever it was then."""
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
