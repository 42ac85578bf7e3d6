"""Builds a step's plan from a selection of rows and tokens.

Called by: `Scheduler.schedule`, as its last act.
Owns: the arrays of the plan, and the counts that they make final (tokens computed, tokens in flight).
Never: drops a selected request. It adds only the followers that fork from one.

Until the plan is built, preemption may remove a row from the selection. Building the plan makes the selection final:
tokens count as computed, and samples as in flight.

1. Decodes come first. Their tokens are already counted.
2. Rows that compute a chunk follow. A row that reaches the end of its known tokens samples, and decodes from then on.
3. Followers of a request whose prompt ends fork from it. They come last, and compute no token of their own.
4. Block moves, masks and tokens to score complete the plan.
"""

import array
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jpaged.engine.request import Request
from jpaged.engine.scheduling.decode_scheduler import DecodeScheduler
from jpaged.engine.scheduling.forks import Forks
from jpaged.engine.scheduling.scheduler_state import ScheduledStep, SchedulerState
from jpaged.engine.scheduling.step_selection import StepSelection
from jpaged.engine.speculation.speculation import Speculation
from jpaged.engine.step_plan import (
    NO_ADAPTER,
    AdapterLoad,
    BlockMove,
    DraftPlan,
    RowInit,
    RowMask,
    SamplerVariant,
    StepPlan,
    num_guesses,
)
from jpaged.params.sampling import NEUTRAL_COLUMNS, PARAMETERS, SamplingParams

# A larger penalty makes logits infinite, at any temperature. So does a penalty below the inverse of this.
MAX_REPETITION_PENALTY = 1e25
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
# Most steps need these. Each takes 1 us to create.
_NOTHING = np.zeros(0, np.int32)
_NO_MOVES = np.zeros((0, 3), np.int32)
_NO_UPDATES = np.zeros((0, 4), np.int32)
_NOTHING_SCORED = np.zeros((0, 4), np.int32)


@dataclasses.dataclass(slots=True)
class _PromptRows:
    """The rows after the decodes, while the plan is built."""

    first: int                # index of the first of these rows: the number of decodes
    sampler: SamplerVariant = SamplerVariant.GREEDY
    requests: list[Request] = dataclasses.field(default_factory=list)
    rows: list[int] = dataclasses.field(default_factory=list)
    num_tokens: list[int] = dataclasses.field(default_factory=list)
    samples: list[bool] = dataclasses.field(default_factory=list)
    prompt_tokens: list[int] = dataclasses.field(default_factory=list)
    inits: list[RowInit] = dataclasses.field(default_factory=list)
    # columns of `StepPlan.scored`
    scored: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    score_masks: list[RowMask] = dataclasses.field(default_factory=list)
    scorers: list[tuple[Request, int]] = dataclasses.field(default_factory=list)  # (request, entries of `scored`)
    parents: list[Request] = dataclasses.field(default_factory=list)  # requests with followers, whose prompt ends
    forked_from: list[int] = dataclasses.field(default_factory=list)
    type_1_from: list[int] = dataclasses.field(default_factory=list)  # only of an encoder

    def add(self, request: Request, num_tokens: int, *, samples: bool) -> None:
        """Append a row."""
        self.rows.append(request.schedule.row)
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.samples.append(samples)


_NO_PROMPT_ROWS = _PromptRows(0)


class PlanBuilder:
    """Builds plans. One object serves all steps."""

    def __init__(
        self, state: SchedulerState, decodes: DecodeScheduler, forks: Forks, speculation: Speculation | None = None
    ):
        """speculation: plans the work of a drafter on the device; None: there is none."""
        self._speculation = speculation
        self._manager = state.manager
        self._running = state.running
        self._adapters = state.adapters
        self._counters = state.counters
        self._vocab_size, self._max_drafts = state.limits.vocab_size, state.limits.max_drafts
        self._encodes = bool(state.limits.text_shapes)
        self._decodes = decodes
        self._forks = forks
        self._ones = np.ones(state.limits.max_num_seqs, np.int32)
        self._trues = np.ones(state.limits.max_num_seqs, bool)

    def build(self, selection: StepSelection) -> ScheduledStep:
        """Build the plan of a selection."""
        requests, count = selection.decodes, len(selection.decodes)
        rows = [request.schedule.row for request in requests]
        self._manager.note_computed(count)
        for request in selection.boundary_decodes:
            self._decodes.update_boundary(request)
        drafts = self._drafts(selection) if selection.drafts else None
        sampler = self._running.sampler_for(requests)
        prompts = self._prompt_rows(selection) if selection.chunks else _NO_PROMPT_ROWS
        if prompts.rows:
            rows += prompts.rows
            requests = requests + prompts.requests
            sampler = max(sampler, prompts.sampler)
        self._counters.steps += 1
        self._counters.waste_sum += self._manager.waste
        masks, waits_for_masks = (), False
        if sampler is SamplerVariant.FULL:
            masks, waits_for_masks = self._masks(requests, count, prompts.samples, selection)
        num_tokens = _followed_by(self._ones, count, prompts.num_tokens)
        if drafts is not None:
            num_tokens = _int32([1 + selection.num_drafts(request) for request in requests])
        samples = _followed_by(self._trues, count, prompts.samples)
        plan = StepPlan(
            rows=_int32(rows),
            num_tokens=num_tokens,
            num_decodes=count,
            samples=samples,
            prompt_tokens=_int32(prompts.prompt_tokens) if prompts.prompt_tokens else _NOTHING,
            block_updates=_lines(selection.block_updates, _NO_UPDATES),
            row_inits=tuple(prompts.inits),
            sampler=sampler,
            forked_from=_int32(prompts.forked_from) if prompts.forked_from else _NOTHING,
            moves=self._moves(),
            masks=masks,
            scored=_lines(prompts.scored, _NOTHING_SCORED).T,
            score_masks=tuple(prompts.score_masks),
            waits_for_masks=waits_for_masks,
            adapter_loads=self._adapter_loads(),
            drafts=drafts,
            model_drafts=selection.model_drafts,
            type_1_from=_int32(prompts.type_1_from) if prompts.type_1_from else _NOTHING,
            head=None if self._speculation is None else self._speculation.plan_head(requests, num_tokens, samples),
        )
        return ScheduledStep(plan, tuple(requests), tuple(prompts.scorers), drafts=selection.drafts)

    def _drafts(self, selection: StepSelection) -> DraftPlan:
        """The drafts of the selection. Frees blocks that left their windows, as for decodes at their boundary."""
        count = len(selection.decodes)
        guesses = np.full((count, num_guesses(self._max_drafts)), -1, np.int32)
        first = np.full(count, -1, np.int32)
        for index, request in enumerate(selection.decodes):
            draft = selection.drafts.get(request)
            if draft is None:
                continue
            self._decodes.update_boundary(request)
            if draft.guesses is not None:
                first[index] = len(request.token_ids)
                guesses[index, : len(draft.guesses)] = draft.guesses
        if self._manager.states is None:
            return DraftPlan(guesses, first)
        slots = [self._manager.states.reserve(request) for request in selection.decodes]
        return DraftPlan(guesses, first, _int32(-1 if slot is None else slot for slot in slots))

    def _prompt_rows(self, selection: StepSelection) -> _PromptRows:
        rows = _PromptRows(len(selection.decodes))
        for request, num_tokens in selection.chunks.items():
            self._add_chunk(rows, request, num_tokens)
        for parent in rows.parents:
            self._add_forks(rows, parent)
        return rows

    def _add_chunk(self, rows: _PromptRows, request: Request, num_tokens: int) -> None:
        schedule = request.schedule
        first, end = schedule.num_computed, schedule.num_computed + num_tokens
        if self._manager.states is not None:
            self._manager.states.note_chunk(request)
        if schedule.row_is_new:
            self._start_row(rows, request)
        if request.scores_prompt:
            _score(rows, request, num_tokens, self._adapters.slot_of(request))
        rows.prompt_tokens += request.token_ids[first:end]
        if self._encodes:
            rows.type_1_from.append(end if request.type_1_from is None else request.type_1_from)
        samples = end == request.num_tokens
        if samples:
            rows.sampler = max(rows.sampler, request.sampler)
            self._decodes.note_sampled(request)
            if schedule.followers:
                rows.parents.append(request)
        rows.add(request, num_tokens, samples=samples)
        schedule.num_computed = end
        if request.params.return_routed_experts:
            schedule.num_routed = max(schedule.num_routed, end)
        self._manager.note_computed(num_tokens)
        self._manager.names.index_computed(request)
        self._decodes.update_boundary(request)

    def _add_forks(self, rows: _PromptRows, parent: Request) -> None:
        index = rows.first + rows.requests.index(parent)
        for follower in list(parent.schedule.followers):
            if self._forks.fork_at_prompt_end(parent, follower):
                self._start_row(rows, follower)
                rows.add(follower, 0, samples=True)
                rows.forked_from.append(index)

    def _start_row(self, rows: _PromptRows, request: Request) -> None:
        rows.inits.append(row_init(request, self._vocab_size, self._adapters.slot_of(request)))
        schedule, extras = request.schedule, request.extras
        schedule.row_is_new = False
        schedule.mask_pending = extras is not None and request.num_output_tokens < extras.min_tokens

    def _masks(
        self, requests: Sequence[Request], num_decodes: int, samples: Sequence[bool], selection: StepSelection
    ) -> tuple[tuple[RowMask, ...], bool]:
        """Masks that change because `min_tokens` is reached, and whether the step waits for other masks.

        samples: of the rows after the decodes. A step waits also if drafts make it uncertain whether `min_tokens` is
        reached. A verify step waits in any case, because it has masks of tokens.
        """
        masks, waits = [], False
        for index, request in enumerate(requests):
            extras = request.extras
            if extras is None or (index >= num_decodes and not samples[index - num_decodes]):
                continue
            if request.score_from is not None:
                continue  # the token that it samples is dropped
            schedule, drafts = request.schedule, selection.num_drafts(request)
            in_flight = schedule.num_in_flight - 1 - drafts  # without the tokens that this step samples
            # A decode's mask on the device is that of its last step. A row that starts has a new one.
            waits |= extras.has_grammar_or_budget or (index < num_decodes and extras.follows_tokens)
            count = request.num_output_tokens + in_flight
            if not schedule.mask_pending:
                continue
            if (selection.drafts or schedule.num_drafts_in_flight) and count + drafts >= extras.min_tokens:
                waits = True
            elif count >= extras.min_tokens:
                schedule.mask_pending = False
                masks.append(RowMask(schedule.row, extras.mask(request.token_ids, count)))
        return tuple(masks), waits

    def _adapter_loads(self) -> tuple[AdapterLoad, ...]:
        """LoRA adapters to write before the step."""
        loads = self._adapters.take_loads()
        self._counters.adapter_loads += len(loads)
        return loads

    def _moves(self) -> np.ndarray:
        moves, counters = self._manager.pool.take_moves(), self._counters
        if not moves:
            return _NO_MOVES
        for kind, _, _ in moves:
            counters.copied_blocks += kind == BlockMove.COPY
            counters.blocks_to_host += kind == BlockMove.TO_HOST
            counters.blocks_to_device += kind == BlockMove.TO_DEVICE
            counters.snapshots_to_host += kind == BlockMove.STATE_TO_HOST
            counters.snapshots_to_device += kind == BlockMove.STATE_TO_DEVICE
        return _lines(moves, _NO_MOVES)


def row_init(request: Request, vocab_size: int, adapter_slot: int = NO_ADAPTER) -> RowInit:
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
        seed=request.seed,
        sample_index=request.index,
        beam_temperature=(1.0 if params.greedy else params.temperature) if request.is_beam else 0.0,
        columns=_columns(params, vocab_size, greedy=greedy),
        processors=0 if extras is None else extras.processors,
        logprobs=params.needs_logprobs,
        sampling_mask=bool(params.return_sampling_mask),
        extras=None if extras is None else extras.row_extras(request),
        adapter_slot=adapter_slot,
    )


def _columns(params: SamplingParams, vocab_size: int, *, greedy: bool) -> tuple[float, ...]:
    """`RowInit.columns`: filters that keep all tokens are neutral, and numbers above 0 stay above 0 in float32."""
    values: dict[str, float] = {}
    for name, neutral in NEUTRAL_COLUMNS.items():
        value = getattr(params, name)
        value = max(value, SMALLEST_FLOAT32) if value > 0 else value
        values[name] = neutral if greedy and PARAMETERS[name].filters else value
    values["top_k"] = 0 if values["top_k"] >= vocab_size else values["top_k"]
    penalty = values["repetition_penalty"]
    values["repetition_penalty"] = min(max(penalty, 1 / MAX_REPETITION_PENALTY), MAX_REPETITION_PENALTY)
    return tuple(values.values())


def _score(rows: _PromptRows, request: Request, num_tokens: int, slot: int) -> None:
    """Add a chunk's tokens to `scored`. Log-probabilities need the token after each, vectors the token itself."""
    schedule, prompt = request.schedule, request.prompt_token_ids
    ahead = 0 if request.pools_tokens else 1
    row = schedule.row if request.scores_processed else -1
    first = schedule.num_computed
    last = min(first + num_tokens, len(prompt) - ahead)
    offset = rows.first + len(rows.prompt_tokens) - first  # from a position to an index among the step's tokens
    unscored = range(max(first, schedule.num_scored - ahead), last)
    scored = [(offset + i, prompt[i + ahead], slot, row) for i in unscored]
    if request.output.scored_text is not None:
        masks = request.output.scored_text.masks(range(unscored.start + 1, unscored.stop + 1))
        rows.score_masks += (RowMask(row, mask, index) for index, mask in enumerate(masks, len(rows.scored)))
    if scored:
        rows.scored += scored
        rows.scorers.append((request, len(scored)))
        schedule.num_scored += len(scored)


def _followed_by(first: np.ndarray, count: int, others: list[Any]) -> np.ndarray:
    """The first `count` entries of an array, followed by `others`."""
    return np.concatenate([first[:count], np.array(others, first.dtype)]) if others else first[:count]


def _lines(lines: Sequence[tuple[int, ...]], nothing: np.ndarray) -> np.ndarray:
    """int32[N, M] of N tuples of M integers. nothing: int32[0, M]."""
    if not lines:
        return nothing
    return _int32(itertools.chain.from_iterable(lines)).reshape(-1, nothing.shape[1])


def _int32(values: Iterable[int]) -> np.ndarray:
    """int32[N] of integers. Takes a third of the time of np.array over a list of 256."""
    return np.frombuffer(array.array("i", values), np.int32)
