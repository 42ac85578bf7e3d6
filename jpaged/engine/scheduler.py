"""Which requests run in a step, and how many tokens each of them advances by.

There is no prefill phase and no decode phase: a request has tokens whose KV is missing, and a step computes some of
them within a budget. One call of `schedule`:

1. Decodes: every running request whose last token was sampled advances by that one token, oldest first.
2. Prompts under way: each takes its missing tokens, or as many as the budget leaves (a chunk).
3. New requests, first come first served, while there are rows, blocks and budget.
4. When a request finds no free block, the youngest running one gives all of its blocks back and starts again later
   (preemption by recompute). The oldest never does, and alone it always fits, so the engine always moves on.

Short prompts do not wait for long ones. A prompt is long if a whole step cannot compute it. One long prompt is under
way at a time, so that the next one finds in the prefix index what the two share; while others wait it leaves them a
quarter of the budget. Short ones may also pass a long one that waits for its turn, as long as they take neither the row
nor the blocks it needs.

A model whose rope depends on the length of the sequence (longrope) needs other KV once a sequence has outgrown the
length it was trained for: the request is preempted there, and all its tokens are computed anew.

A plan is made before the tokens of the step before it are known: a decode's token lies in the device's request table,
and `Request.num_in_flight` counts what is on its way.
"""

import dataclasses
import itertools
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from jpaged.engine.kv_cache_manager import KVCacheManager, Prefix
from jpaged.engine.request import NEVER, NO_ROW, Request, RequestStatus
from jpaged.engine.step_plan import RowInit, SamplerVariant, StepPlan
from jpaged.errors import EngineError

SHORT_PROMPT_SHARE = 4   # a prompt that does not fit into a step leaves 1 / this of the budget to others
LOOK_PAST = 32           # waiting requests looked at behind a long one, in search of short ones
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, and the requests its rows belong to."""

    plan: StepPlan
    requests: tuple[Request, ...]  # in the plan's order


@dataclasses.dataclass(slots=True)
class SchedulerCounters:
    """What has happened since the start or the last reset."""

    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    waste_sum: float = 0.0  # of each step's share of slots that hold no token


class _Draft:
    """A step in the making: nothing of it is final until it is committed, so a preempted row can leave it again."""

    def __init__(self, budget: int):
        self.budget = budget
        self.num_tokens: dict[Request, int] = {}
        self.first_new_block: dict[Request, int] = {}  # length of the block tables before the step
        self.starts: set[Request] = set()

    def add(self, request: Request, count: int) -> None:
        self.num_tokens[request] = self.num_tokens.get(request, 0) + count
        self.budget -= count

    def drop(self, request: Request) -> None:
        self.budget += self.num_tokens.pop(request, 0)
        self.starts.discard(request)


class Scheduler:
    """Owns the waiting queue, the running requests, their rows and, through the manager, their blocks."""

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        prefix_cacheable: Callable[[int], bool],
        outgrown_after: int | None = None,
    ):
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.counters = SchedulerCounters()
        self.waiting: OrderedDict[Request, None] = OrderedDict()  # in the order they will start
        self.running: list[Request] = []                          # in the order of arrival
        self._vocab_size = vocab_size
        self._prefix_cacheable = prefix_cacheable
        self._outgrown_after = NEVER if outgrown_after is None else outgrown_after
        self._num_rows = max_num_seqs
        self._free_rows = list(reversed(range(max_num_seqs)))

    def add(self, request: Request) -> None:
        """Put a new request at the end of the waiting queue."""
        if request.prompt_len > self._outgrown_after:
            request.outgrow()
        self.waiting[request] = None

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request in whatever state it is. Its blocks are free at once: the device runs steps in order."""
        if request.status is RequestStatus.RUNNING:
            self._leave_row(request)
        else:
            del self.waiting[request]
        request.status = status

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step; None when there is nothing to compute until tokens on their way arrive."""
        self.manager.pool.step += 1
        draft = _Draft(self.max_num_batched_tokens)
        self._schedule_decodes(draft)
        self._schedule_prompts(draft)
        return self._commit(draft) if draft.num_tokens else None

    def check_integrity(self) -> None:
        """Raise EngineError unless rows, blocks and queues agree with each other. For tests, and when idle."""
        self.manager.check_integrity(self.running)
        rows = [request.row for request in self.running]
        if sorted(rows + self._free_rows) != list(range(self._num_rows)):
            raise EngineError(f"rows in use {sorted(rows)}, free {sorted(self._free_rows)}")
        if sorted(self.running, key=_arrival) != self.running:
            raise EngineError("running requests are not in the order of arrival")
        for request in self.running:
            if request.status is not RequestStatus.RUNNING or request in self.waiting:
                raise EngineError(f"request {request.request_id} runs, but is {request.status.value}")
        for request in self.waiting:
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.row != NO_ROW:
                raise EngineError(f"request {request.request_id} waits, but is {request.status.value}")

    # -- decodes ------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, draft: _Draft) -> None:
        for request in tuple(self.running):
            if draft.budget == 0:
                return
            if request.status is RequestStatus.RUNNING and request.decoding and request.num_missing:
                if request.num_computed == self._outgrown_after >= request.rope_len:
                    self._preempt(request, draft)
                elif request.num_computed < request.num_slots:
                    draft.add(request, 1)  # the usual case: its last block has room
                else:
                    self._advance(request, 1, draft)

    # -- prompts ------------------------------------------------------------------------------------------------

    def _schedule_prompts(self, draft: _Draft) -> None:
        under_way = [request for request in self.running if not request.decoding]
        long: Request | None = None
        for position, request in enumerate(under_way):
            if draft.budget == 0 or request.status is not RequestStatus.RUNNING:
                continue
            count = min(request.num_missing, draft.budget)
            if long is None and count < request.num_missing:
                long = request
                count = self._long_share(draft, others=position + 1 < len(under_way) or bool(self.waiting))
            self._advance(request, count, draft)
        long = self._start_waiting(long, draft)
        if long is not None and long in draft.num_tokens:
            done = draft.num_tokens[long]
            room = self.manager.slots_within_reach(long) - long.num_computed - done
            left = min(long.num_missing - done, draft.budget, room)
            if left > 0:
                self._advance(long, left, draft)

    def _start_waiting(self, long: Request | None, draft: _Draft) -> Request | None:
        """Start requests from the head of the queue; returns the long prompt that is under way afterwards, if any."""
        while self.waiting and self._free_rows and draft.budget:
            request = next(iter(self.waiting))
            prefix = self._startable(request, held_back=0)
            if prefix is None:
                break
            missing = self._missing_after(request, prefix)
            if missing <= self.max_num_batched_tokens:
                self._start(request, prefix, min(missing, draft.budget), draft)
            elif long is None:
                long = request
                self._start(request, prefix, self._long_share(draft, others=len(self.waiting) > 1), draft)
            else:
                self._start_short_ones_behind(request, draft)
                break
        return long

    def _start_short_ones_behind(self, head: Request, draft: _Draft) -> None:
        """Start short prompts that wait behind a long one, as long as they take neither its row nor its blocks."""
        held_back = self.manager.most_blocks(len(head.token_ids))
        for request in tuple(itertools.islice(self.waiting, 1, 1 + LOOK_PAST)):
            if len(self._free_rows) < 2 or draft.budget == 0:
                return
            if len(request.token_ids) > self.max_num_batched_tokens:
                continue
            prefix = self._startable(request, held_back)
            if prefix is not None:
                missing = self._missing_after(request, prefix)
                self._start(request, prefix, min(missing, draft.budget), draft)

    def _missing_after(self, request: Request, prefix: Prefix) -> int:
        return len(request.token_ids) - prefix.num_blocks * self.manager.block_size

    def _startable(self, request: Request, held_back: int) -> Prefix | None:
        """The shared blocks a waiting request can start with; None while it cannot start.

        It starts only when all its known tokens fit beside what running prompts still need, and beside one block of
        each group for each running request: otherwise it would soon be preempted, and its prompt computed for nothing.
        """
        if request.num_in_flight:
            return None  # preempted with tokens on their way: they belong to what it starts from
        if len(request.token_ids) > self._outgrown_after >= request.rope_len:
            request.outgrow()
        prefix = self.manager.find_prefix(request) if self._shares(request) else self.manager.no_prefix
        if not self.running:
            return prefix
        promised = sum(
            max(self.manager.most_blocks(len(other.token_ids)) - other.num_held, 0)
            for other in self.running
            if not other.decoding
        )
        headroom = held_back + promised + len(self.running) * self.manager.num_groups
        fits = self.manager.can_start(prefix, len(request.token_ids), headroom)
        return prefix if fits else None

    def _start(self, request: Request, prefix: Prefix, count: int, draft: _Draft) -> None:
        """Give a waiting request a row, and let it advance by `count` tokens."""
        del self.waiting[request]
        self.manager.start(request, prefix)
        if request.status is RequestStatus.PREEMPTED:
            self.counters.recomputed_tokens += max(request.num_lost - request.num_computed, 0)
            request.num_lost = 0
        else:
            request.num_cached_tokens = request.num_computed
            request.metrics.first_scheduled_time = time.monotonic()
            self.counters.prompt_tokens += request.prompt_len
            self.counters.prefix_hit_tokens += request.num_computed
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        insort(self.running, request, key=_arrival)
        draft.starts.add(request)
        self._advance(request, count, draft)

    def _long_share(self, draft: _Draft, others: bool) -> int:
        """Tokens that a prompt too long for this step may take, when others wait or not."""
        return draft.budget - (draft.budget // SHORT_PROMPT_SHARE if others else 0)

    def _shares(self, request: Request) -> bool:
        return self._prefix_cacheable(request.prompt_len)

    # -- blocks and rows ----------------------------------------------------------------------------------------

    def _advance(self, request: Request, count: int, draft: _Draft) -> None:
        """Enter up to `count` more tokens of a running request into the step, as many as it can get blocks for."""
        done = request.num_computed + draft.num_tokens.get(request, 0)
        while self.manager.slots_within_reach(request) <= done:
            youngest = self.running[-1]
            self._preempt(youngest, draft)
            if youngest is request:
                return
        count = min(count, self.manager.slots_within_reach(request) - done)
        draft.first_new_block.setdefault(request, request.num_slots // self.manager.block_size)
        self.manager.grow(request, done + count)
        draft.add(request, count)

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Take row and blocks from a running request and put it first in the queue."""
        draft.drop(request)
        request.num_lost = request.num_computed
        self._leave_row(request)
        request.status = RequestStatus.PREEMPTED
        request.metrics.preemptions += 1
        self.counters.preemptions += 1
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)

    def _leave_row(self, request: Request) -> None:
        """Give back row and blocks; what is full and known stays findable until its block is used again."""
        if self._shares(request):
            self.manager.index_computed(request)
        self.manager.release(request)
        del self.running[bisect_left(self.running, request.arrival, key=_arrival)]
        self._free_rows.append(request.row)
        request.row = NO_ROW
        request.decoding = False

    # -- the plan -----------------------------------------------------------------------------------------------

    def _commit(self, draft: _Draft) -> ScheduledStep:
        """Turn the draft into a plan, and count its tokens as computed and its samples as on their way."""
        decodes = [request for request in draft.num_tokens if request.decoding]
        others = [request for request in draft.num_tokens if not request.decoding]
        requests = (*decodes, *others)
        num_tokens = [draft.num_tokens[request] for request in requests]
        samples, prompt_tokens, updates, inits = [], [], [], []
        sampler = SamplerVariant.GREEDY
        for request, count in zip(requests, num_tokens, strict=True):
            end = request.num_computed + count
            if not request.decoding:
                prompt_tokens += request.token_ids[request.num_computed : end]
            if request in draft.starts:
                inits.append(self._row_init(request))
            elif request in draft.first_new_block:
                first = draft.first_new_block[request]
                for group, table in enumerate(request.block_tables):
                    new = enumerate(table.blocks[first:], first)
                    updates += [(request.row, group, index, block) for index, block in new]
            samples.append(end == request.num_tokens)
            if samples[-1]:
                sampler = max(sampler, request.sampler)
                request.num_in_flight += 1
                request.decoding = True
            request.num_computed = end
            if self._shares(request):
                self.manager.index_computed(request)
            if end >= request.release_at:
                self.manager.release_behind_windows(request)
        self._count_step()
        plan = StepPlan(
            rows=np.array([request.row for request in requests], np.int32),
            num_tokens=np.array(num_tokens, np.int32),
            num_decodes=len(decodes),
            samples=np.array(samples, bool),
            prompt_tokens=np.array(prompt_tokens, np.int32),
            block_updates=np.array(updates, np.int32).reshape(-1, 4),
            row_inits=tuple(inits),
            sampler=sampler,
        )
        return ScheduledStep(plan, requests)

    def _row_init(self, request: Request) -> RowInit:
        params = request.params
        blocks = [
            (group, index, block)
            for group, table in enumerate(request.block_tables)
            for index, block in enumerate(table.held, table.first_held)
        ]
        return RowInit(
            row=request.row,
            num_computed=request.num_computed,
            rope_len=request.rope_len,
            blocks=np.array(blocks, np.int32).reshape(-1, 3),
            temperature=0.0 if params.greedy else params.temperature,
            top_p=1.0 if params.greedy else max(params.top_p, SMALLEST_FLOAT32),
            top_k=0 if params.greedy or params.top_k >= self._vocab_size else params.top_k,
            min_p=0.0 if params.greedy else params.min_p,
            seed=request.seed,
        )

    def _count_step(self) -> None:
        allocated = sum(request.num_held for request in self.running) * self.manager.block_size
        empty = sum(request.num_slots - request.num_computed for request in self.running) * self.manager.num_groups
        self.counters.steps += 1
        self.counters.waste_sum += empty / allocated if allocated else 0


def _arrival(request: Request) -> int:
    return request.arrival
