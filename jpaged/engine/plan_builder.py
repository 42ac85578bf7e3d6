"""Builds a step's plan from a selection of rows and tokens.

Until here, preemption could still remove a row. Building the plan makes the selection final: tokens count as computed,
samples as in flight, and full blocks are named.

1. Decodes come first. Their tokens are already counted.
2. Rows that compute a chunk follow. A row that reaches the end of its known tokens samples, and decodes from then on.
3. Followers of a request whose prompt ends fork from it. They come last, and compute no token of their own.
4. Block moves, masks and tokens to score complete the plan.
"""

import array
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from jpaged.engine.decode_scheduler import DecodeScheduler
from jpaged.engine.forks import Forks
from jpaged.engine.request import Request
from jpaged.engine.scheduler_state import ScheduledStep, SchedulerState
from jpaged.engine.step_plan import BlockMove, RowInit, RowMask, SamplerVariant, StepPlan
from jpaged.engine.step_selection import StepSelection

# A larger penalty makes logits infinite, at any temperature. A smaller one does the same to their quotients.
MAX_REPETITION_PENALTY = 1e25
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
_NO_MOVES = np.zeros((0, 3), np.int32)


@dataclasses.dataclass(slots=True)
class _Rows:
    """Rows of a plan while it is built. The lists that are not of all rows are of the rows after the decodes."""

    num_decodes: int
    all_rows: list[int]       # decodes included
    requests: list[Request]   # decodes included
    sampler: SamplerVariant
    num_tokens: list[int] = dataclasses.field(default_factory=list)
    samples: list[bool] = dataclasses.field(default_factory=list)
    prompt_tokens: list[int] = dataclasses.field(default_factory=list)
    inits: list[RowInit] = dataclasses.field(default_factory=list)
    scored: list[tuple[int, int]] = dataclasses.field(default_factory=list)       # (index of the token, next token)
    scorers: list[tuple[Request, int]] = dataclasses.field(default_factory=list)  # (request, entries of `scored`)
    followers: list[tuple[Request, int]] = dataclasses.field(default_factory=list)  # (follower, its parent's index)
    forked_from: list[int] = dataclasses.field(default_factory=list)

    def add(self, request: Request, num_tokens: int, *, samples: bool) -> None:
        """Append a row."""
        self.all_rows.append(request.schedule.row)
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.samples.append(samples)


class PlanBuilder:
    """Builds plans. One object serves all steps."""

    def __init__(self, state: SchedulerState, decodes: DecodeScheduler, forks: Forks):
        self._manager = state.manager
        self._running = state.running
        self._counters = state.counters
        self._vocab_size = state.limits.vocab_size
        self._decodes = decodes
        self._forks = forks
        self._ones = np.ones(state.limits.max_num_seqs, np.int32)
        self._trues = np.ones(state.limits.max_num_seqs, bool)

    def build(self, selection: StepSelection) -> ScheduledStep:
        """The plan of a selection."""
        decodes, count = selection.decodes, len(selection.decodes)
        all_rows = [request.schedule.row for request in decodes]
        self._manager.num_empty -= count
        for request in selection.boundary_decodes:
            self._decodes.update_boundary(request)
        rows = _Rows(count, all_rows, decodes, self._running.sampler_for(decodes))
        for request, num_tokens in selection.chunks.items():
            self._add_chunk(rows, request, num_tokens)
        for follower, index in rows.followers:
            self._add_fork(rows, follower, index)
        self._count_step()
        masks, waits_for_masks = self._masks(rows) if rows.sampler is SamplerVariant.FULL else ((), False)
        plan = StepPlan(
            rows=_int32(all_rows),
            num_tokens=_followed_by(self._ones, count, rows.num_tokens),
            num_decodes=count,
            samples=_followed_by(self._trues, count, rows.samples),
            prompt_tokens=_int32(rows.prompt_tokens),
            block_updates=_int32(itertools.chain.from_iterable(selection.block_updates)).reshape(-1, 4),
            row_inits=tuple(rows.inits),
            sampler=rows.sampler,
            forked_from=_int32(rows.forked_from),
            moves=self._moves(),
            masks=masks,
            scored=_int32(itertools.chain.from_iterable(rows.scored)).reshape(-1, 2).T,
            waits_for_masks=waits_for_masks,
        )
        return ScheduledStep(plan, tuple(rows.requests), tuple(rows.scorers))

    def _add_chunk(self, rows: _Rows, request: Request, num_tokens: int) -> None:
        schedule = request.schedule
        first, end = schedule.num_computed, schedule.num_computed + num_tokens
        if request.output.prompt_logprobs is not None:
            _score(rows, request, num_tokens)
        rows.prompt_tokens += request.token_ids[first:end]
        if schedule.row_is_new:
            self._start_row(rows, request)
        samples = end == request.num_tokens
        if samples:
            rows.sampler = max(rows.sampler, request.sampler)
            self._decodes.note_sampled(request)
            rows.followers += [(follower, len(rows.all_rows)) for follower in schedule.followers]
        rows.add(request, num_tokens, samples=samples)
        schedule.num_computed = end
        self._manager.num_empty -= num_tokens
        self._manager.index_computed(request)
        self._decodes.update_boundary(request)

    def _add_fork(self, rows: _Rows, follower: Request, index: int) -> None:
        if self._forks.fork_at_prompt_end(rows.requests[index], follower):
            self._start_row(rows, follower)
            rows.add(follower, 0, samples=True)
            rows.forked_from.append(index)

    def _start_row(self, rows: _Rows, request: Request) -> None:
        rows.inits.append(row_init(request, self._vocab_size))
        request.schedule.row_is_new = False

    def _masks(self, rows: _Rows) -> tuple[tuple[RowMask, ...], bool]:
        """Masks that change with the number of tokens; and whether further masks depend on tokens in flight."""
        masks, waits = [], False
        for index, request in enumerate(rows.requests):
            extras = request.extras
            if extras is None or (index >= rows.num_decodes and not rows.samples[index - rows.num_decodes]):
                continue
            in_flight = request.schedule.num_in_flight - 1  # without the token that this step samples
            waits |= extras.has_grammar_or_budget or (in_flight > 0 and extras.follows_tokens)
            count = request.num_output_tokens + in_flight
            if extras.changes_at(count):
                masks.append(RowMask(request.schedule.row, extras.mask(request.token_ids, count)))
        return tuple(masks), waits

    def _moves(self) -> np.ndarray:
        if not self._manager.pool.moves:
            return _NO_MOVES
        moves, counters = self._manager.pool.take_moves(), self._counters
        for kind, _, _ in moves:
            counters.copied_blocks += kind == BlockMove.COPY
            counters.blocks_to_host += kind == BlockMove.TO_HOST
            counters.blocks_to_device += kind == BlockMove.TO_DEVICE
        return _int32(itertools.chain.from_iterable(moves)).reshape(-1, 3)

    def _count_step(self) -> None:
        manager, counters = self._manager, self._counters
        allocated = manager.num_held * manager.block_size
        counters.steps += 1
        counters.waste_sum += manager.num_empty * manager.num_kv_groups / allocated if allocated else 0


def row_init(request: Request, vocab_size: int) -> RowInit:
    """State of the row of a request that starts, or continues as a fork."""
    params, extras = request.params, request.extras
    blocks: list[int] = []  # flat: np.array takes twice as long over tuples
    for kv_group, table in enumerate(request.kv.block_tables):
        for index, block in enumerate(table.held, table.first_held):
            blocks += (kv_group, index, block)
    greedy = params.greedy or request.is_beam
    return RowInit(
        row=request.schedule.row,
        num_computed=request.schedule.num_computed,
        rope_len=request.kv.rope_len,
        blocks=_int32(blocks).reshape(-1, 3),
        temperature=0.0 if greedy else params.temperature,
        top_p=1.0 if greedy else max(params.top_p, SMALLEST_FLOAT32),
        top_k=0 if greedy or params.top_k >= vocab_size else params.top_k,
        min_p=0.0 if greedy else params.min_p,
        seed=request.seed,
        sample_index=request.index,
        beam_temperature=(1.0 if params.greedy else params.temperature) if request.is_beam else 0.0,
        typical_p=1.0 if greedy else max(params.typical_p, SMALLEST_FLOAT32),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=min(max(params.repetition_penalty, 1 / MAX_REPETITION_PENALTY), MAX_REPETITION_PENALTY),
        processors=0 if extras is None else extras.processors,
        logprobs=params.needs_logprobs,
        extras=None if extras is None else extras.row_extras(request),
    )


def _score(rows: _Rows, request: Request, num_tokens: int) -> None:
    """Add the tokens of a chunk whose log-probabilities are requested: each by the token before it."""
    schedule, prompt = request.schedule, request.prompt_token_ids
    first = schedule.num_computed
    last = min(first + num_tokens, len(prompt) - 1)
    offset = rows.num_decodes + len(rows.prompt_tokens) - first  # from a position to an index among the step's tokens
    scored = [(offset + i, prompt[i + 1]) for i in range(max(first, schedule.num_scored - 1), last)]
    if scored:
        rows.scored += scored
        rows.scorers.append((request, len(scored)))
        schedule.num_scored += len(scored)


def _followed_by(first: np.ndarray, count: int, others: list[Any]) -> np.ndarray:
    """The first `count` entries of an array, followed by `others`."""
    return np.concatenate([first[:count], np.array(others, first.dtype)]) if others else first[:count]


def _int32(values: Iterable[int]) -> np.ndarray:
    """int32[N] of integers. Takes a third of the time of np.array over a list of 256."""
    return np.frombuffer(array.array("i", values), np.int32)
