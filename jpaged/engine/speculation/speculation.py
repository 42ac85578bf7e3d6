"""Makes the drafts of a step: asks the drafters, and lets the budget choose how many drafts each request gets.

Called by: `DraftScheduler`, for the drafts of a step; `Scheduler`, with what was accepted, the time of a step, and the
end of a request; `Engine`, when the weights change.
Owns: the drafters, the budget, and each request's accept rates.
Never: changes a request's schedule.

A request's drafts come from the first of these sources that has any:

1. Its grammar, where it leaves no choice. These drafts are always accepted.
2. The answer that its caller predicted.
3. The drafter that the engine was started with.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

from jpaged.engine.request import Request
from jpaged.engine.speculation.accept_rate import DECAY, FIRST_CHANCE, MOST_CHANCE, AcceptRate
from jpaged.engine.speculation.draft import Draft, DraftSource
from jpaged.engine.speculation.draft_budget import DraftBudget
from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.function import FunctionDrafter
from jpaged.engine.speculation.ngram import NgramDrafter
from jpaged.engine.speculation.prediction import PredictionDrafter
from jpaged.engine.speculation.program_times import ProgramKind
from jpaged.engine.speculation.suffix import SuffixDrafter
from jpaged.engine.step_plan import StepPlan
from jpaged.errors import EngineError
from jpaged.speculation_config import SpeculationConfig

_FORCED = AcceptRate(chance=MOST_CHANCE)  # of drafts that a grammar forces


@dataclasses.dataclass(slots=True)
class _Rates:
    """Accept rates of one request."""

    drafter: AcceptRate
    prediction: AcceptRate = dataclasses.field(default_factory=AcceptRate)


class Speculation:
    """The drafters of an engine, and the choice between them."""

    def __init__(self, drafter: Drafter, max_drafts: int, row_sizes: Sequence[int]):
        """max_drafts: most drafts per row of a step. row_sizes: rows of each decode program, as in `DraftBudget`."""
        self._drafter = drafter
        self._predictions = PredictionDrafter()
        self._budget = DraftBudget(max_drafts, row_sizes)
        self._row_sizes = sorted(row_sizes)
        self._rates: dict[Request, _Rates] = {}

    @classmethod
    def create(
        cls, config: SpeculationConfig, max_drafts: int, row_sizes: Sequence[int], vocab_size: int
    ) -> "Speculation":
        """The drafters of a configuration. vocab_size: of the model."""
        return cls(_drafter(config, vocab_size), max_drafts, row_sizes)

    def choose(
        self, requests: Sequence[Request], most: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[Request, Draft]]:
        """Drafts of some of the decodes of a step. Empty where drafts would not make the step faster.

        most: most drafts of each request. sizes: `Runner.verify_sizes`.
        """
        rates = [self._rates_of(request).drafter for request in requests]
        self._budget.verify_sizes = sizes
        if not self._budget.may_pay(rates):
            return
        drafts = [self._propose(request, limit) for request, limit in zip(requests, most, strict=True)]
        for index, draft in enumerate(drafts):
            if draft is not None:
                rates[index] = self._rate(requests[index], draft.source)
        counts = self._budget.choose(rates, [0 if draft is None else draft.count for draft in drafts])
        for request, draft, count in zip(requests, drafts, counts, strict=True):
            if draft is not None and count:
                yield request, dataclasses.replace(draft, count=count)

    def note_result(self, request: Request, draft: Draft, accepted: int) -> None:
        """Note how many of a request's drafts were accepted."""
        request.metrics.num_draft_tokens += draft.count
        request.metrics.num_accepted_tokens += accepted
        rates = self._rates.get(request)
        if rates is None or draft.source is DraftSource.GRAMMAR:
            return
        if draft.source is DraftSource.DRAFTER:
            self._budget.note_drafts(rates.drafter, draft.count, accepted)
        else:
            rates.prediction.note(draft.count, accepted, DECAY, FIRST_CHANCE)

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Note the time of a step without prompt tokens."""
        if plan.drafts is None:
            kind, sizes, size = ProgramKind.DECODE, self._row_sizes, len(plan.rows)
        else:
            kind, sizes, size = ProgramKind.VERIFY, self._budget.verify_sizes, plan.total_tokens
        index = bisect.bisect_left(sizes, size)
        if index < len(sizes):
            self._budget.note_seconds(kind, sizes[index], seconds)

    def note_end(self, request: Request) -> None:
        """Note that a request has ended."""
        self._rates.pop(request, None)
        self._drafter.note_end(request)
        self._predictions.note_end(request)

    def forget(self) -> None:
        """Drop what drafters have learnt: the engine has new weights."""
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
        return None

    def _guesses(self, request: Request, source: DraftSource, count: int) -> Sequence[int]:
        if source is DraftSource.GRAMMAR:
            matcher = request.output.matcher
            return [] if matcher is None else matcher.forced_tokens()[:count]
        drafter = self._predictions if source is DraftSource.PREDICTION else self._drafter
        return drafter.propose(request, count)


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
