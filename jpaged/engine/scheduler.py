"""Which requests run in a step, and how many tokens each of them advances by.

There is no prefill phase and no decode phase: a request has tokens whose KV is missing, and a step computes some of
them within a budget. One call of `schedule`:

1. Decodes: every running request whose last token was sampled advances by that one token.
2. Prompts under way: each takes its missing tokens, or as many as the budget leaves (a chunk).
3. New requests, in the order of the policy (`waiting_queue`), while there are rows, blocks and budget.
4. When a request finds no free block, the running one that is last in the policy's order gives all of its blocks back
   and starts again later (preemption). The oldest never does, and alone it always fits, so the engine always moves on.

What a preempted request gave back is found again by its name as far as nobody took it; with a host tier, as far as the
tier has it. The rest is computed again.

Short prompts do not wait for long ones. A prompt is long if a whole step cannot compute it. Of these
`max_num_partial_prefills` are under way at a time, so that the next one finds in the prefix index what the two share;
while others wait they leave these a quarter of the budget. Short ones may also pass a long one that waits for its turn,
as long as they take neither the row nor the blocks it needs. Decodes wait for nobody: they have their tokens in every
step, and `target_step_ms` bounds what prompts may add to it.

A model whose rope depends on the length of the sequence (longrope) needs other KV once a sequence has outgrown the
length it was trained for: the request is preempted there, and all its tokens are computed anew.

A plan is made before the tokens of the step before it are known: a decode's token lies in the device's request table,
and `Request.num_in_flight` counts what is on its way. Only of a beam it must be known: the host chooses it.
"""

import array
import dataclasses
import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from jpaged.engine.kv_cache_manager import KVCacheManager
from jpaged.engine.prefix_finder import Prefix
from jpaged.engine.block_table import NEVER
from jpaged.engine.request import NO_ROW, Request, RequestStatus
from jpaged.engine.step_draft import StepDraft, row_init
from jpaged.engine.step_pace import StepPace
from jpaged.engine.step_plan import BlockMove, RowInit, RowMask, SamplerVariant, StepPlan
from jpaged.engine.waiting_queue import WaitingQueue
from jpaged.errors import EngineError

# Steps until a request that found no room looks for its prefix again, though there is no more room: it may have grown.
# Looking 40,000 cached tokens up takes 3 ms, in every step that it waits.
LOOK_AGAIN = 16
SHORT_PROMPT_SHARE = 4   # a prompt that does not fit into a step leaves 1 / this of the budget to others
LOOK_PAST = 32           # waiting requests looked at behind a long one, in search of short ones

_NO_MOVES = np.zeros((0, 3), np.int32)
_rank, _arrival = attrgetter("schedule.rank"), attrgetter("arrival")  # as keys of sorted lists faster than functions


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, and the requests its rows belong to."""

    plan: StepPlan
    requests: tuple[Request, ...]  # in the plan's order
    scored: tuple[tuple[Request, int], ...] = ()  # of whom how many of the plan's `scored` are, in its order


@dataclasses.dataclass(slots=True)
class SchedulerCounters:
    """What has happened since the start or the last reset."""

    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    copied_blocks: int = 0
    blocks_to_host: int = 0
    blocks_to_device: int = 0
    waste_sum: float = 0.0  # of each step's share of slots that hold no token


class Scheduler:
    """Owns the waiting queue, the running requests, their rows and, through the manager, their blocks."""

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        outgrown_after: int | None = None,
        policy: str = "fcfs",
        max_num_partial_prefills: int = 1,
        target_step_ms: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """policy: a name in `waiting_queue.POLICIES`. clock: seconds, the same as of the requests' arrival times."""
        if max_num_batched_tokens < max_num_seqs:
            raise EngineError(f"max_num_batched_tokens={max_num_batched_tokens}: every one of {max_num_seqs} rows must "
                              "find room for its token in a step")  # fmt: skip
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []  # in the policy's order
        target = None if target_step_ms is None else target_step_ms / 1000
        self.pace = StepPace(target, least=manager.block_size)
        self._vocab_size = vocab_size
        self._outgrown_after = NEVER if outgrown_after is None else outgrown_after
        self._max_partial = max_num_partial_prefills
        self._clock = clock
        self._num_rows = max_num_seqs
        self._num_decoding = [0] * len(SamplerVariant)  # running requests that decode, by what they need of the sampler
        self._ones, self._trues = np.ones(max_num_seqs, np.int32), np.ones(max_num_seqs, bool)
        self._free_rows = list(reversed(range(max_num_seqs)))

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue."""
        if request.prompt_len > self._outgrown_after:
            self.manager.switch_to_long_rope(request)
        self.waiting.add(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request in whatever state it is. Its blocks are free at once: the device runs steps in order."""
        self.park(request)
        request.schedule.status = status

    def park(self, request: Request) -> None:
        """Take everything from a request: it neither runs nor waits, until it is added or made a fork."""
        if request.schedule.status is RequestStatus.RUNNING:
            self._leave_row(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.schedule.status = RequestStatus.WAITING

    def fork(self, request: Request, other: Request) -> None:
        """Have a parked request go on from where one of its group stands, with its blocks; or with its tokens only.

        The latter where that one has no blocks itself, or no row is free: then it waits for its turn.
        """
        self.manager.inherit_names(other, request)
        other.schedule.num_cached_tokens = request.schedule.num_cached_tokens
        other.schedule.num_computed = other.schedule.num_lost = 0
        if request.schedule.status is RequestStatus.RUNNING and self._free_rows:
            self.manager.fork(request, other)
            other.schedule.num_computed = request.schedule.num_computed
            self._enter_row(other)
        else:
            other.schedule.status = RequestStatus.PREEMPTED
            self.waiting.add(other)

    def release_hold(self, request: Request) -> None:
        """Let a beam go on whose next token is known."""
        request.schedule.on_hold = False
        if request.schedule.status is RequestStatus.PREEMPTED and request not in self.waiting:
            self.waiting.add(request)

    def take_known(self, request: Request) -> None:
        """Have a request that decodes go on from known tokens: what a step samples for it meanwhile is not used."""
        if request.schedule.decoding:
            request.schedule.decoding = False
            self._num_decoding[request.sampler] -= 1

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step; None when there is nothing to compute until tokens on their way arrive."""
        self.manager.pool.step += 1
        draft = StepDraft(self.max_num_batched_tokens)
        self._schedule_decodes(draft)
        draft.budget = self.pace.limit(draft.budget)
        self._schedule_prompts(draft)
        while not draft and self._all_on_hold():
            self._preempt(self.running[-1], draft)  # beams that wait for one of theirs, which finds no room
            self._schedule_prompts(draft)
        return self._commit(draft) if draft else None

    def check_integrity(self) -> None:
        """Raise EngineError unless rows, blocks and queues agree with each other. For tests, and when idle."""
        self.manager.check_integrity(self.running)
        rows = [request.schedule.row for request in self.running]
        if sorted(rows + self._free_rows) != list(range(self._num_rows)):
            raise EngineError(f"rows in use {sorted(rows)}, free {sorted(self._free_rows)}")
        decoding = [sum(r.schedule.decoding and r.sampler == variant for r in self.running) for variant in SamplerVariant]
        if decoding != self._num_decoding:
            raise EngineError(f"requests that decode, by sampler: {decoding}, counted {self._num_decoding}")
        if sorted(self.running, key=_rank) != self.running or sorted(self.waiting, key=_rank) != list(self.waiting):
            raise EngineError("requests are not in the policy's order")
        for request in self.running:
            if request.schedule.status is not RequestStatus.RUNNING or request in self.waiting:
                raise EngineError(f"request {request.request_id} runs, but is {request.schedule.status.value}")
        for request in self.waiting:
            if request.schedule.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.schedule.row != NO_ROW:
                raise EngineError(f"request {request.request_id} waits, but is {request.schedule.status.value}")

    # -- decodes ------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, draft: StepDraft) -> None:
        """Nearly all of them are plain: no block begins or ends, so that nothing but counters changes."""
        decodes, under_way, boundary = draft.decodes, draft.under_way, []
        for request in self.running:
            if not request.schedule.decoding:
                under_way.append(request)
            elif (computed := request.schedule.num_computed) < request.schedule.next_boundary:
                request.schedule.num_computed = computed + 1
                request.schedule.num_in_flight += 1
                decodes.append(request)
            else:
                boundary.append(request)
        draft.budget -= len(decodes)
        draft.updates = self.manager.next_blocks([r for r in boundary if self._needs_only_a_block(r)])
        for request in boundary:
            if request.schedule.status is RequestStatus.RUNNING and request.num_missing:
                self._decode_at_boundary(request, draft)

    def _needs_only_a_block(self, request: Request) -> bool:
        computed = request.schedule.num_computed
        return (
            computed == request.kv.num_slots
            and not request.kv.tail_shared
            and not computed == self._outgrown_after >= request.kv.rope_len
            and request.num_missing > 0
        )

    def _decode_at_boundary(self, request: Request, draft: StepDraft) -> None:
        computed = request.schedule.num_computed
        if computed == self._outgrown_after >= request.kv.rope_len:
            self._preempt(request, draft)
            return
        if (computed == request.kv.num_slots or request.kv.tail_shared) and not self._grow(request, computed, 1, draft):
            return
        request.schedule.num_computed = computed + 1
        request.schedule.num_in_flight += 1
        draft.decodes.append(request)
        draft.boundary.append(request)
        draft.budget -= 1

    # -- prompts ------------------------------------------------------------------------------------------------

    def _schedule_prompts(self, draft: StepDraft) -> None:
        under_way = [r for r in draft.under_way if r.schedule.status is RequestStatus.RUNNING and r.num_missing]
        for request in under_way:
            if len(request.token_ids) > self._outgrown_after >= request.kv.rope_len:  # a beam whose next token is beyond
                self._preempt(request, draft)
        under_way = [r for r in under_way if r.schedule.status is RequestStatus.RUNNING]
        long: list[Request] = []
        if under_way:
            long = [r for r in under_way if r.num_missing > draft.budget][: self._max_partial]
            self._advance_under_way(under_way, long, draft)
            long = [r for r in long if r.schedule.status is RequestStatus.RUNNING]
        if self.waiting and self._free_rows and draft.budget:
            self._start_waiting(long, draft)
        for request in long:
            if request in draft.num_tokens:
                done = request.schedule.num_computed + draft.num_tokens[request]
                left = min(request.num_tokens - done, draft.budget, self.manager.slots_within_reach(request) - done)
                if left > 0:
                    self._advance(request, left, draft)

    def _advance_under_way(self, under_way: list[Request], long: list[Request], draft: StepDraft) -> None:
        share = 0
        for position, request in enumerate(under_way):
            if draft.budget == 0 or request.schedule.status is not RequestStatus.RUNNING:
                continue
            count = min(request.num_missing, draft.budget)
            if request in long:
                others = position + 1 < len(under_way) or bool(self.waiting)
                share = share or self._long_share(draft, others=others, count=len(long))
                count = min(share, count)
            self._advance(request, count, draft)
        # Only now: nobody who has a part in this step is preempted any more, so what is named will be computed.
        for request in under_way:
            if request in draft.num_tokens:
                self.manager.index_computed(request, request.schedule.num_computed + draft.num_tokens[request])

    def _start_waiting(self, long: list[Request], draft: StepDraft) -> None:
        """Start requests from the head of the queue; `long` gets the long prompts among them."""
        while self.waiting and self._free_rows and draft.budget:
            request = self.waiting.head()
            prefix = self._startable(request, draft, held_back=0)
            if prefix is None:
                break
            missing = self._missing_after(request, prefix)
            if missing <= self.max_num_batched_tokens:
                self._start(request, prefix, min(missing, draft.budget), draft)
            elif len(long) < self._max_partial:
                long.append(request)
                others = len(self.waiting) > 1
                self._start(request, prefix, min(missing, self._long_share(draft, others=others, count=1)), draft)
            else:
                self._start_short_ones_behind(request, draft)
                break

    def _start_short_ones_behind(self, head: Request, draft: StepDraft) -> None:
        """Start short prompts that wait behind a long one, as long as they take neither its row nor its blocks."""
        held_back = self.manager.max_blocks(len(head.token_ids))
        for request in self.waiting.behind_head(LOOK_PAST):
            if len(self._free_rows) < 2 or draft.budget == 0:
                return
            if len(request.token_ids) > self.max_num_batched_tokens:
                continue
            prefix = self._startable(request, draft, held_back)
            if prefix is not None:
                missing = self._missing_after(request, prefix)
                self._start(request, prefix, min(missing, draft.budget), draft)

    def _missing_after(self, request: Request, prefix: Prefix) -> int:
        return len(request.token_ids) - prefix.num_blocks * self.manager.block_size

    def _startable(self, request: Request, draft: StepDraft, held_back: int) -> Prefix | None:
        """The shared blocks a waiting request can start with; None while it cannot start.

        It starts only when all its known tokens fit beside what running prompts still need, and beside one block of
        each group for each running request: otherwise it would soon be preempted, and its prompt computed for nothing.
        """
        if request.schedule.num_in_flight:
            return None  # preempted with tokens on their way: they belong to what it starts from
        if len(request.token_ids) > self._outgrown_after >= request.kv.rope_len:
            self.manager.switch_to_long_rope(request)
        manager = self.manager
        if not self.running:
            return manager.find_prefix(request)
        promised = sum(
            max(manager.max_blocks(len(other.token_ids)) - other.kv.num_held, 0)
            for other in draft.under_way
            if other.schedule.status is RequestStatus.RUNNING
        )
        headroom = held_back + promised + len(self.running) * manager.num_kv_groups
        room, step = manager.pool.num_free - headroom, manager.pool.step
        if room <= 0:
            return None  # whatever it shares: at least its last token needs a block
        if room <= request.schedule.refused_with and step < request.schedule.retry_step:
            return None
        prefix = manager.find_prefix(request)
        fits = manager.can_start(prefix, len(request.token_ids), headroom)
        if not fits:
            request.schedule.refused_with, request.schedule.retry_step = room, step + LOOK_AGAIN
        return prefix if fits else None

    def _start(self, request: Request, prefix: Prefix, count: int, draft: StepDraft) -> None:
        """Give a waiting request a row, and let it advance by `count` tokens."""
        self.waiting.remove(request)
        request.schedule.num_computed = self.manager.start(request, prefix)
        if request.schedule.status is RequestStatus.PREEMPTED:
            self.counters.recomputed_tokens += max(request.schedule.num_lost - request.schedule.num_computed, 0)
            request.schedule.num_lost = 0
        else:
            request.schedule.num_cached_tokens = request.schedule.num_computed
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = self._clock()
            if request.index == 0:  # further answers have the same prompt
                self.counters.prompt_tokens += request.prompt_len
                self.counters.prefix_hit_tokens += request.schedule.num_computed
        self._enter_row(request)
        draft.under_way.append(request)
        self._advance(request, count, draft)
        self.manager.index_computed(request, request.schedule.num_computed + draft.num_tokens[request])

    def _long_share(self, draft: StepDraft, *, others: bool, count: int) -> int:
        """Tokens that each of so many prompts too long for this step may take, when others wait or not."""
        share = draft.budget - (draft.budget // SHORT_PROMPT_SHARE if others else 0)
        return max(share // count, 1)

    # -- blocks and rows ----------------------------------------------------------------------------------------

    def _advance(self, request: Request, count: int, draft: StepDraft) -> None:
        """Enter up to `count` more known tokens of a request into the step, as many as it can get blocks for."""
        count = self._grow(request, request.schedule.num_computed + draft.num_tokens.get(request, 0), count, draft)
        if count:
            draft.add(request, count)

    def _grow(self, request: Request, done: int, count: int, draft: StepDraft) -> int:
        """Give a running request room for up to `count` tokens behind `done`; for how many, 0 if it was preempted."""
        manager = self.manager
        while (reach := manager.slots_within_reach(request)) <= done:
            victim = self._victim()
            self._preempt(victim, draft)
            if victim is request:
                return 0
        count = min(count, reach - done)
        changes = manager.unshare_tail(request) if request.kv.tail_shared else []
        first = request.kv.num_slots // manager.block_size
        if manager.grow(request, done + count) and not request.schedule.row_is_new:
            for group, table in enumerate(request.kv.block_tables):
                changes += [(group, index, block) for index, block in enumerate(table.blocks[first:], first)]
        if not request.schedule.row_is_new:
            draft.updates += [(request.schedule.row, *change) for change in changes]
        return count

    def _victim(self) -> Request:
        """Who gives way: the last in the policy's order, but never the oldest while there is another."""
        last = self.running[-1]
        if len(self.running) > 1 and last is min(self.running, key=_arrival):
            return self.running[-2]
        return last

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        """Take row and blocks from a running request and put it back into the queue."""
        draft.drop(request)
        request.schedule.num_lost = request.schedule.num_computed
        self._leave_row(request)
        request.schedule.status = RequestStatus.PREEMPTED
        request.metrics.preemptions += 1
        self.counters.preemptions += 1
        if not request.schedule.on_hold:
            self.waiting.add(request)

    def _all_on_hold(self) -> bool:
        """Whether nothing will happen by itself: what waits finds no room, and what runs waits for that."""
        if not self.waiting or not self.running:
            return False
        return all(r.schedule.on_hold and not r.schedule.num_in_flight for r in self.running) and not any(
            r.schedule.num_in_flight for r in self.waiting
        )

    def _enter_row(self, request: Request) -> None:
        request.schedule.status = RequestStatus.RUNNING
        request.schedule.row = self._free_rows.pop()
        request.schedule.row_is_new = True
        self.waiting.rank(request)
        insort(self.running, request, key=_rank)

    def _leave_row(self, request: Request) -> None:
        """Give back row and blocks; what is full and known stays findable until its block is used again."""
        self.manager.index_computed(request)
        self.manager.release(request)
        request.schedule.num_computed = 0
        del self.running[bisect_left(self.running, request.schedule.rank, key=_rank)]
        self._free_rows.append(request.schedule.row)
        self._num_decoding[request.sampler] -= request.schedule.decoding
        request.schedule.row = NO_ROW
        request.schedule.decoding = request.schedule.row_is_new = False

    # -- the plan -----------------------------------------------------------------------------------------------

    def _commit(self, draft: StepDraft) -> ScheduledStep:
        """Turn the draft into a plan, and count its tokens as computed and its samples as on their way."""
        rows = [request.schedule.row for request in draft.decodes]
        num_decodes = len(rows)
        self.manager.num_empty -= num_decodes  # as `advance`, for all at once
        for request in draft.boundary:
            self._pass_boundary(request)
        num_tokens, samples = [], []  # of the others
        sampler = self._largest_sampler(draft)
        requests = draft.decodes
        prompt_tokens: list[int] = []
        scored: list[tuple[int, int]] = []
        scorers: list[tuple[Request, int]] = []
        inits: list[RowInit] = []
        forks: list[tuple[Request, int]] = []
        if draft.num_tokens:
            for request, count in draft.num_tokens.items():
                end = request.schedule.num_computed + count
                if request.output.prompt_logprobs is not None:
                    first, told = num_decodes + len(prompt_tokens), _to_score(request, count)
                    scored += [(first + place, successor) for place, successor in told]
                    request.schedule.num_scored += len(told)
                    if told:
                        scorers.append((request, len(told)))
                prompt_tokens += request.token_ids[request.schedule.num_computed : end]
                if request.schedule.row_is_new:
                    inits.append(row_init(request, self._vocab_size))
                    request.schedule.row_is_new = False
                samples.append(end == request.num_tokens)
                if samples[-1]:
                    sampler = max(sampler, request.sampler)
                    self._note_sampled(request)
                    forks += [(follower, len(rows)) for follower in request.schedule.followers]
                rows.append(request.schedule.row)
                num_tokens.append(count)
                request.schedule.num_computed += count
                self.manager.num_empty -= count
                self.manager.index_computed(request)
                self._pass_boundary(request)
            requests = requests + list(draft.num_tokens)
        forked_from = []
        for follower, place in forks:
            if self._follow(requests[place], follower):
                inits.append(row_init(follower, self._vocab_size))
                follower.schedule.row_is_new = False
                rows.append(follower.schedule.row)
                num_tokens.append(0)
                samples.append(True)
                requests.append(follower)
                forked_from.append(place)
        self._count_step()
        masks, waits = self._masks(requests, num_decodes, samples) if sampler is SamplerVariant.FULL else ((), False)
        plan = StepPlan(
            rows=_int32(rows),
            num_tokens=_behind(self._ones, num_decodes, num_tokens),
            num_decodes=num_decodes,
            samples=_behind(self._trues, num_decodes, samples),
            prompt_tokens=_int32(prompt_tokens),
            block_updates=_int32(itertools.chain.from_iterable(draft.updates)).reshape(-1, 4),
            row_inits=tuple(inits),
            sampler=sampler,
            forked_from=_int32(forked_from),
            moves=self._moves(),
            masks=masks,
            scored=_int32(itertools.chain.from_iterable(scored)).reshape(-1, 2).T,
            waits_for_masks=waits,
        )
        return ScheduledStep(plan, tuple(requests), tuple(scorers))

    def _masks(
        self, requests: Sequence[Request], num_decodes: int, samples: Sequence[bool]
    ) -> tuple[tuple[RowMask, ...], bool]:
        """Masks that change by the number of tokens; whether others follow from tokens that are on their way."""
        masks, waits = [], False
        for place, request in enumerate(requests):
            extras = request.extras
            if extras is None or (place >= num_decodes and not samples[place - num_decodes]):
                continue
            on_their_way = request.schedule.num_in_flight - 1  # without the one that this step samples
            waits |= extras.has_grammar_or_budget or (on_their_way > 0 and extras.follows_tokens)
            count = request.num_output_tokens + on_their_way
            if extras.changes_at(count):
                masks.append(RowMask(request.schedule.row, extras.mask(request.token_ids, count)))
        return tuple(masks), waits

    def _largest_sampler(self, draft: StepDraft) -> SamplerVariant:
        """What the sampler must be able to do for the decodes. Looks at each of them only where they may differ."""
        kinds = [variant for variant in SamplerVariant if self._num_decoding[variant]]
        if len(kinds) == 1 and draft.decodes:
            return kinds[0]
        return max((request.sampler for request in draft.decodes), default=SamplerVariant.GREEDY)

    def _note_sampled(self, request: Request) -> None:
        request.schedule.num_in_flight += 1
        request.schedule.on_hold = request.is_beam
        if not request.is_beam:
            request.schedule.decoding = True
            self._num_decoding[request.sampler] += 1

    def _pass_boundary(self, request: Request) -> None:
        """Give back what has fallen behind a window, and find out until when decoding is plain."""
        if request.schedule.num_computed >= request.kv.release_at:
            self.manager.release_before_windows(request)
        until = min(request.kv.num_slots, request.max_total_tokens - 1, request.kv.release_at - 1)
        if request.kv.rope_len <= self._outgrown_after:
            until = min(until, self._outgrown_after)
        request.schedule.next_boundary = 0 if request.kv.tail_shared else until

    def _follow(self, request: Request, follower: Request) -> bool:
        """Have a follower fork from the request whose prompt is done, which samples for it, too; or let it wait."""
        request.schedule.followers.remove(follower)
        headroom = (len(self.running) + 1) * self.manager.num_kv_groups
        self.waiting.rank(follower)
        # The row and the blocks belong to whoever waits before it.
        passes = bool(self.waiting) and self.waiting.head().schedule.rank < follower.schedule.rank
        if passes or not self._free_rows or self.manager.pool.num_free < headroom:
            self.manager.inherit_names(follower, request)
            self.waiting.add(follower)
            return False
        self.fork(request, follower)
        self._note_sampled(follower)
        follower.schedule.next_boundary = request.schedule.next_boundary = 0
        return True

    def _moves(self) -> np.ndarray:
        if not self.manager.pool.moves:
            return _NO_MOVES
        moves = self.manager.pool.take_moves()
        for kind, _, _ in moves:
            self.counters.copied_blocks += kind == BlockMove.COPY
            self.counters.blocks_to_host += kind == BlockMove.TO_HOST
            self.counters.blocks_to_device += kind == BlockMove.TO_DEVICE
        return _int32(itertools.chain.from_iterable(moves)).reshape(-1, 3)

    def _count_step(self) -> None:
        manager = self.manager
        allocated = manager.num_held * manager.block_size
        self.counters.steps += 1
        self.counters.waste_sum += manager.num_empty * manager.num_kv_groups / allocated if allocated else 0


def _behind(first: np.ndarray, count: int, others: list[Any]) -> np.ndarray:
    """The first so many of an array, and others behind."""
    return np.concatenate([first[:count], np.array(others, first.dtype)]) if others else first[:count]


def _int32(values: Iterable[int]) -> np.ndarray:
    """An array of integers; a third of the time that np.array takes over a list of 256."""
    return np.frombuffer(array.array("i", values), np.int32)


def _to_score(request: Request, count: int) -> list[tuple[int, int]]:
    """Of its next `count` tokens those whose successor in the prompt is to be told about: (place, successor)."""
    first = request.schedule.num_computed
    last = min(first + count, request.prompt_len - 1)
    return [(i - first, request.prompt_token_ids[i + 1]) for i in range(max(first, request.schedule.num_scored - 1), last)]
