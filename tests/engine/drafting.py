"""Engines of tests whose drafts are right or wrong as the test wants, whatever the time of a step."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

from jpaged.engine.engine import Engine, EngineOptions
from jpaged.engine.request import Request
from jpaged.engine.speculation.draft import Draft
from jpaged.engine.speculation.speculation import Speculation
from jpaged.speculation_config import SpeculationConfig
from tests.engine.fake_runner import FakeRunner
from tests.support.drafting import AlwaysOn

Continuation = Callable[[Request, int], list[int]]  # (request, count) -> the next `count` tokens of its answer


class Oracle:
    """A drafter that knows the answers. Each draft is right with probability `right` of the request."""

    def __init__(self, continuation: Continuation, right: Sequence[float], vocab_size: int, rng: random.Random):
        """right: one of these for each request."""
        self._continuation, self._right, self._vocab_size, self._rng = continuation, right, vocab_size, rng

    def propose(self, request: Request, count: int) -> list[int]:
        """Propose the next tokens of the request's answer, some of them replaced."""
        right = self._right[request.arrival % len(self._right)]
        tokens = self._continuation(request, count)
        return [token if self._rng.random() < right else self._rng.randrange(self._vocab_size) for token in tokens]

    def note_end(self, request: Request) -> None:
        """Keep nothing of a request."""

    def forget(self) -> None:
        """Keep nothing."""


class RandomSpeculation(Speculation):
    """Gives each row a random number of drafts. The real budget depends on the time of steps."""

    def __init__(self, oracle: Oracle, max_drafts: int, rng: random.Random, *, always: bool = False):
        """always: each row has as many drafts as fit."""
        super().__init__(oracle, max_drafts, (1000,))
        self._switch = AlwaysOn((1000,))
        self._always, self._rng = always, rng

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> Iterator[tuple[Request, Draft]]:
        """Drafts of some of the requests."""
        room = self._budget.verify_sizes[-1] - len(requests)
        for request, limit in zip(requests, most, strict=True):
            self._rates_of(request)
            limit = min(limit, room)
            if not self._always and limit > 0:
                limit = self._rng.choice((0, limit, limit, self._rng.randint(0, limit)))
            draft = self._propose(request, limit)
            if draft is not None:
                room -= draft.count
                yield request, draft


class DraftingEngine(Engine):
    """An engine with another choice of drafts."""

    def __init__(self, runner: FakeRunner, speculation: Speculation, options: EngineOptions):
        """speculation: makes the drafts."""
        self._drafts = speculation
        config = SpeculationConfig(method="ngram", num_speculative_tokens=runner.max_drafts)  # for the metrics
        options = dataclasses.replace(options, speculation=config)
        super().__init__(runner, options=options)

    def _speculation(self) -> Speculation:
        return self._drafts
