"""Makes the drafts of a step: asks the drafters, and lets the budget choose how many drafts each request gets.

Called by: `DraftScheduler`, for the drafts of a step; `Scheduler`, with what was accepted, the time of a step, and the
end of a request; `Engine`, when the weights change.
Owns: the drafters, the budget, and each request's accept rates.
Never: changes a request's schedule.

A request's drafts come from the first of these sources that has any:

1. Its grammar, where it leaves no choice. These drafts are always accepted.
2. The answer that its caller predicted.
3. The drafter that the engine was started with, on the host or on the device.

A draft head on the device must follow every step of the target, which costs time. It follows for some steps after
drafts were last chosen, and then pauses. Now and then it follows again, so that drafts can be tried.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.engine.request import Request
from jpaged.engine.speculation.accept_rate import DECAY, FIRST_CHANCE, MOST_CHANCE, AcceptRate
from jpaged.engine.speculation.draft import Draft, DraftSource
from jpaged.engine.speculation.draft_budget import DraftBudget
from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.function import FunctionDrafter
from jpaged.engine.speculation.model_drafts import DraftRow, HeadDrafts, HeadRow, ModelDrafts
from jpaged.engine.speculation.ngram import NgramDrafter
from jpaged.engine.speculation.prediction import PredictionDrafter
from jpaged.engine.speculation.program_times import ProgramKind
from jpaged.engine.speculation.suffix import SuffixDrafter
from jpaged.engine.step_plan import HeadPlan, ModelDraftPlan, Runner, StepPlan
from jpaged.errors import EngineError
from jpaged.speculation_config import SpeculationConfig

FOLLOWED_STEPS = 64   # steps for which a draft head follows the target after drafts were last chosen
FIRST_FOLLOW = 256    # steps of the first pause after which it follows again. Each further pause is twice as long,
LONGEST_FOLLOW = 16_384
_FORCED = AcceptRate(chance=MOST_CHANCE)  # of drafts that a grammar forces


@dataclasses.dataclass(slots=True)
class _Rates:
    """Accept rates of one request."""

    drafter: AcceptRate
    prediction: AcceptRate = dataclasses.field(default_factory=AcceptRate)


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
        self._step = 0                       # steps that were planned
        self._follow_until = FOLLOWED_STEPS  # step until which a draft head follows the target
        self._next_follow = self._pause = FIRST_FOLLOW
        self._last_program: tuple[ProgramKind, int] | None = None  # of the last step

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

    def begin_step(self, sizes: Sequence[int]) -> None:
        """Note that a step is being planned. sizes: `Runner.verify_sizes`."""
        self._budget.verify_sizes = sizes
        self._step += 1

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> Iterator[tuple[Request, Draft]]:
        """Drafts of some of the decodes of a step. Empty where drafts would not make the step faster.

        most: most drafts of each request.
        """
        rates = [self._rates_of(request).drafter for request in requests]
        if not self._budget.may_pay(rates):
            return
        if self._step >= self._next_follow:
            self._follow_until = self._step + FOLLOWED_STEPS
            self._pause = min(2 * self._pause, LONGEST_FOLLOW)
            self._next_follow = self._step + self._pause
        drafts = [self._propose(request, limit) for request, limit in zip(requests, most, strict=True)]
        for index, draft in enumerate(drafts):
            if draft is not None:
                rates[index] = self._rate(requests[index], draft.source)
        counts = self._budget.choose(rates, [0 if draft is None else draft.count for draft in drafts])
        if any(counts):
            self._follow_until, self._pause = self._step + FOLLOWED_STEPS, FIRST_FOLLOW
            self._next_follow = self._step + FIRST_FOLLOW
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
        if not self._budget.verify_sizes or self._step > self._follow_until:
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

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Note the time of a step, from the arrival of the step before it to its own.

        It counts only if both ran the same program. Otherwise a part of it may belong to the step before, because the
        host may be late. A draft model also needs more time in the first step, to catch up.
        """
        if len(plan.prompt_tokens):
            self._last_program = None
            return
        if plan.drafts is None:
            kind, sizes, size = ProgramKind.DECODE, self._row_sizes, len(plan.rows)
        else:
            kind, sizes, size = ProgramKind.VERIFY, self._budget.verify_sizes, plan.total_tokens
        index = bisect.bisect_left(sizes, size)
        program = None if index == len(sizes) else (kind, sizes[index])
        if program is not None and program == self._last_program:
            self._budget.note_seconds(*program, seconds)
        self._last_program = program

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
        if limit <= 0:
            return None
        in_flight = request.schedule.num_in_flight - 1  # without the token of the step that is being planned
        for source in DraftSource:
            guesses = self._guesses(request, source, in_flight + limit)
            if len(guesses) > in_flight:
                return Draft(len(guesses) - in_flight, guesses, source)
        is_ready = self._model is not None or (self._head is not None and self._head.is_ready(request))
        return Draft(limit, None) if is_ready else None

    def _guesses(self, request: Request, source: DraftSource, count: int) -> Sequence[int]:
        if source is DraftSource.GRAMMAR:
            matcher = request.output.matcher
            return [] if matcher is None else matcher.forced_tokens()[:count]
        if source is DraftSource.PREDICTION:
            return self._predictions.propose(request, count)
        if self._drafter is None or self._budget.is_paused(self._rates_of(request).drafter):
            return ()
        return self._drafter.propose(request, count)


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
