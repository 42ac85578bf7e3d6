"""Makes the drafts of a step: asks the drafters, and lets the budget choose how many drafts each request gets.

Called by: `DraftScheduler`, for the drafts of a step; `Scheduler`, with what was accepted, the time of a step, and the
end of a request; `Engine`, when the weights change.
Owns: the drafters, the budget, and each request's accept rates.
Never: changes a request's schedule.

A request's drafts come from the first of these sources that has any:

1. Its grammar, where it leaves no choice. These drafts are always accepted.
2. The answer that its caller predicted.
3. The drafter that the engine was started with, on the host or on the device.

A switch compares decoding with and without the drafter, by measured seconds per token (`DraftSwitch`). While it is off,
the drafter costs nothing: the host looks nothing up, and a draft head does not follow the steps.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.engine.request import Request
from jpaged.engine.speculation.accept_rate import DECAY, FIRST_CHANCE, MOST_CHANCE, AcceptRate
from jpaged.engine.speculation.draft import Draft, DraftSource
from jpaged.engine.speculation.draft_budget import DraftBudget
from jpaged.engine.speculation.draft_switch import DraftSwitch
from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.function import FunctionDrafter
from jpaged.engine.speculation.model_drafts import DraftRow, HeadDrafts, HeadRow, ModelDrafts
from jpaged.engine.speculation.ngram import NgramDrafter
from jpaged.engine.speculation.prediction import PredictionDrafter
from jpaged.engine.speculation.program_times import Program, ProgramKind, decode_size
from jpaged.engine.speculation.suffix import SuffixDrafter
from jpaged.engine.step_plan import HeadPlan, ModelDraftPlan, Runner, StepPlan
from jpaged.errors import EngineError
from jpaged.speculation_config import SpeculationConfig

RUN = 8           # steps that are measured together
SKIPPED = 2       # steps before a run that are not measured: one is in flight when the switch changes
MODEL_SKIPPED = 6  # the same when a draft model is turned on, because it must catch up
HEAD_SKIPPED = 8  # the same for a draft head, after the block in which it begins to follow a row
_FORCED = AcceptRate(chance=MOST_CHANCE)  # of drafts that a grammar forces


@dataclasses.dataclass(slots=True)
class _Rates:
    """Accept rates of one request."""

    drafter: AcceptRate
    prediction: AcceptRate = dataclasses.field(default_factory=AcceptRate)


@dataclasses.dataclass(slots=True)
class _Run:
    """Consecutive steps of about as many rows, without prompt tokens."""

    bucket: int  # rows of the decode program
    skip: int    # steps to come that are not measured
    steps: int = 0
    rows: int = 0    # of all steps
    tokens: int = 0  # of all steps
    seconds: float = 0.0
    programs: collections.Counter[Program] = dataclasses.field(default_factory=collections.Counter)


class Speculation:
    """The drafters of an engine, and the choice between them."""

    def __init__(
        self, drafter: Drafter | None, max_drafts: int, row_sizes: Sequence[int],
        on_device: ModelDrafts | HeadDrafts | None = None,
    ):  # fmt: skip
        """drafter: on the host. on_device: plans the work of a drafter on the device. One of the two is not None.

        max_drafts: most drafts per row of a step. row_sizes: rows of each decode program, as in `DraftBudget`.
        """
        self._drafter = drafter
        self._model = on_device if isinstance(on_device, ModelDrafts) else None
        self._head = on_device if isinstance(on_device, HeadDrafts) else None
        self._predictions = PredictionDrafter()
        self._budget = DraftBudget(max_drafts, row_sizes)
        self._row_sizes = sorted(row_sizes)
        self._rates: dict[Request, _Rates] = {}
        self._switch = DraftSwitch(row_sizes)
        self._has_room = False  # for drafts, in the step that is being planned
        self._is_on = False     # the drafter, in this step
        self._skipped = SKIPPED if self._model is None else MODEL_SKIPPED
        if self._head is not None:
            self._skipped = HEAD_SKIPPED + self._head.block_size
        self._run: _Run | None = None
        self._num_new = 0  # rows whose prompts were computed since the last run

    @classmethod
    def create(cls, config: SpeculationConfig, runner: Runner[Any]) -> "Speculation":
        """The drafters of a configuration."""
        device, on_device = runner.device_drafter, None
        if device is not None and device.is_head:
            on_device = HeadDrafts(
                block_size=runner.block_size, kv_group=device.kv_group, max_len=device.max_len
            )
        elif device is not None:
            on_device = ModelDrafts(
                block_size=runner.block_size, kv_group=device.kv_group, absorb_tokens=device.absorb_tokens,
                absorb_rows=device.absorb_rows, max_len=device.max_len,
            )  # fmt: skip
        drafter = _drafter(config, runner.vocab_size) if device is None else None
        return cls(drafter, runner.max_drafts, runner.decode_sizes, on_device)

    def begin_step(self, sizes: Sequence[int], num_rows: int) -> None:
        """Note that a step of `num_rows` rows is being planned. sizes: `Runner.verify_sizes`."""
        self._budget.verify_sizes = sizes
        self._has_room = bool(sizes) and 0 < num_rows < sizes[-1]
        self._is_on = self._has_room and self._switch.is_on(num_rows)

    def may_draft(self, requests: Sequence[Request]) -> bool:
        """Whether some of the decodes of a step may have drafts. False costs next to nothing."""
        return self._has_room and (self._is_on or any(map(_has_own_source, requests)))

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> Iterator[tuple[Request, Draft]]:
        """Drafts of some of the decodes of a step. Empty where drafts would not make the step faster.

        most: most drafts of each request.
        """
        rates = [self._rates_of(request).drafter for request in requests]
        if self._is_on and not self._budget.may_pay(rates):
            return
        drafts = [self._propose(request, limit) for request, limit in zip(requests, most, strict=True)]
        for index, draft in enumerate(drafts):
            if draft is not None:
                rates[index] = self._rate(requests[index], draft.source)
        counts = self._budget.choose(rates, [0 if draft is None else draft.count for draft in drafts])
        for request, draft, count in zip(requests, drafts, counts, strict=True):
            if draft is not None and count:
                yield request, dataclasses.replace(draft, count=count)

    @property
    def has_model(self) -> bool:
        """Whether a draft model on the device makes drafts."""
        return self._model is not None

    def plan_model(self, requests: Sequence[Request], drafts: Mapping[Request, Draft]) -> ModelDraftPlan | None:
        """The work of a draft model in a verify step. None: nothing, or there is no draft model.

        requests: the decodes of the step. drafts: already counted in their schedules.
        """
        if self._model is None:
            return None
        rows = []
        for request in requests:
            draft = drafts.get(request)
            count = 0 if draft is None else draft.count
            in_flight = request.schedule.num_in_flight - 1 - count
            rows.append(DraftRow(request, count if draft is not None and draft.guesses is None else 0, in_flight))
        return self._model.plan(rows)

    def plan_head(
        self, requests: Sequence[Request], num_tokens: np.ndarray, samples: np.ndarray
    ) -> HeadPlan | None:
        """The work of a draft head after a step. None: it does not follow the step, or there is no head.

        requests, num_tokens, samples: rows of the plan. Their tokens count as computed already.
        """
        if self._head is None:
            return None
        if not self._is_on:
            self._head.pause()
            return None
        rows = zip(requests, num_tokens.tolist(), samples.tolist(), strict=True)
        return self._head.plan([
            HeadRow(request, request.schedule.num_computed - count, count, sampled) for request, count, sampled in rows
        ])  # fmt: skip

    def note_result(self, request: Request, draft: Draft, accepted: int) -> None:
        """Note how many of a request's drafts were accepted."""
        request.metrics.num_draft_tokens += draft.count
        request.metrics.num_accepted_tokens += accepted
        if self._model is not None and draft.guesses is None:
            self._model.note_verified(request, accepted)
        rates = self._rates.get(request)
        if rates is None or draft.source is DraftSource.GRAMMAR:
            return
        if draft.source is DraftSource.DRAFTER:
            self._budget.note_drafts(rates.drafter, draft.count, accepted)
        else:
            rates.prediction.note(draft.count, accepted, DECAY, FIRST_CHANCE)

    def note_step(self, plan: StepPlan, seconds: float, num_accepted: np.ndarray | None) -> None:
        """Note the time of a step, from the arrival of the step before it to its own.

        num_accepted: int[rows], accepted drafts of a verify step.
        """
        program, num_rows, sizes = self._program(plan), len(plan.rows), self._budget.verify_sizes
        if program is None or not sizes or num_rows >= sizes[-1]:
            self._run = None
            self._num_new += num_rows - plan.num_decodes
            return
        if self._num_new:
            self._switch.note_new(num_rows, self._num_new)
            self._num_new = 0
        run, bucket = self._run, decode_size(self._row_sizes, num_rows)
        if run is None or run.bucket != bucket:
            run = self._run = _Run(bucket, SKIPPED)
        if run.skip:
            run.skip -= 1
            return
        run.steps += 1
        run.rows += num_rows
        run.tokens += num_rows + (0 if num_accepted is None else int(num_accepted.sum()))
        run.seconds += self._budget.usual(program, seconds)
        run.programs[program] += 1
        if run.steps < RUN:
            return
        self._budget.note_run(run.programs, run.seconds, had_choice=self._switch.is_on(num_rows))
        has_changed = self._switch.note(num_rows, run.seconds / run.steps * run.rows / run.tokens)
        turns_on = has_changed and self._switch.is_on(num_rows)
        self._run = _Run(bucket, self._skipped if turns_on else SKIPPED if has_changed else 0)

    def _program(self, plan: StepPlan) -> Program | None:
        """The program that a step has run. None: it has prompt tokens, or was larger than these programs."""
        if len(plan.prompt_tokens):
            return None
        if plan.drafts is None:
            kind, sizes, size = ProgramKind.DECODE, self._row_sizes, len(plan.rows)
        else:
            kind, sizes, size = ProgramKind.VERIFY, self._budget.verify_sizes, plan.total_tokens
        index = bisect.bisect_left(sizes, size)
        return None if index == len(sizes) else (kind, sizes[index])

    def note_end(self, request: Request) -> None:
        """Note that a request has ended."""
        self._rates.pop(request, None)
        if self._drafter is not None:
            self._drafter.note_end(request)
        self._predictions.note_end(request)

    def note_left(self, request: Request) -> None:
        """Note that a request has lost its row, or continues from other tokens than those in flight."""
        if self._model is not None:
            self._model.forget(request)
        if self._head is not None:
            self._head.forget(request)

    def note_kv_lost(self) -> None:
        """Note that the pages of a drafter on the device are empty."""
        for drafts in (self._model, self._head):
            if drafts is not None:
                drafts.reset()

    def forget(self) -> None:
        """Drop what drafters have learnt: the engine has new weights."""
        if self._drafter is not None:
            self._drafter.forget()
        self._predictions.forget()

    def _rates_of(self, request: Request) -> _Rates:
        rates = self._rates.get(request)
        if rates is None:
            rates = self._rates[request] = _Rates(self._budget.new_row())
            self._predictions.note_prediction(request, request.prediction_token_ids)
        return rates

    def _rate(self, request: Request, source: DraftSource) -> AcceptRate:
        if source is DraftSource.GRAMMAR:
            return _FORCED
        rates = self._rates_of(request)
        return rates.drafter if source is DraftSource.DRAFTER else rates.prediction

    def _propose(self, request: Request, limit: int) -> Draft | None:
        """Up to `limit` drafts of a request, and before them guesses for its tokens in flight."""
        if limit <= 0 or not (self._is_on or _has_own_source(request)):
            return None
        in_flight = request.schedule.num_in_flight - 1  # without the token of the step that is being planned
        for source in DraftSource:
            guesses = self._guesses(request, source, in_flight + limit)
            if len(guesses) > in_flight:
                return Draft(len(guesses) - in_flight, guesses, source)
        is_ready = self._model is not None or (self._head is not None and self._head.is_ready(request))
        return Draft(limit, None) if self._is_on and is_ready else None

    def _guesses(self, request: Request, source: DraftSource, count: int) -> Sequence[int]:
        if source is DraftSource.GRAMMAR:
            matcher = request.output.matcher
            return [] if matcher is None else matcher.forced_tokens()[:count]
        if source is DraftSource.PREDICTION:
            return self._predictions.propose(request, count)
        if self._drafter is None or not self._is_on or self._budget.is_paused(self._rates_of(request).drafter):
            return ()
        return self._drafter.propose(request, count)


def _has_own_source(request: Request) -> bool:
    """Whether a request may have drafts without the drafter."""
    return request.output.matcher is not None or bool(request.prediction_token_ids)


def _drafter(config: SpeculationConfig, vocab_size: int) -> Drafter:
    """The drafter of a method that runs on the host."""
    if config.method == "ngram" and config.prompt_lookup_min is not None and config.prompt_lookup_max is not None:
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        names = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
        return SuffixDrafter(**{name: getattr(config, f"suffix_decoding_{name}") for name in names})
    if config.method == "custom" and config.function is not None:
        return FunctionDrafter(config.function, vocab_size)
    raise EngineError(f"method {config.method} has no drafter on the host")
