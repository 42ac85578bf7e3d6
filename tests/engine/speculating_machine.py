"""The state machine of `engine_machine` with verify steps.

Drafts are right, wrong, or some of each. Some requests have masks that change with every token, or a grammar that
forces tokens. Their answers are those of plain decoding.
"""

import dataclasses
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
from hypothesis.stateful import precondition, rule

from jpaged.engine.engine import Engine, EngineOptions, StepError
from jpaged.engine.request import Request
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.sampling_extras import SamplingExtras, pack_mask
from jpaged.params.sampling import SamplingParams
from tests.engine.drafting import DraftingEngine, Oracle, RandomSpeculation
from tests.engine.engine_machine import VOCAB_SIZE, EngineMachine, expected
from tests.engine.fake_runner import next_token, sample_seed

# No id may be followed by one of the next eight. Because of the long word a mask depends on the last seven tokens.
BAD_WORDS = [[token, (token + step) % VOCAB_SIZE] for token in range(VOCAB_SIZE) for step in range(1, 9)] + [[0] * 8]
FREE, FORCED = 3, 4  # lengths of alternating stretches: the model chooses, and the grammar forces
FEATURES = ("accepted drafts", "rejected drafts", "guesses past tokens in flight", "masks of drafts", "dropped drafts")


@dataclasses.dataclass
class Grammar:
    """A grammar that forces some tokens by their place in the answer, and its matcher."""

    forced: dict[int, int]
    taken: int = 0
    is_finished: bool = False

    def matcher(self) -> "Grammar":
        return Grammar(self.forced)

    def forced_tokens(self) -> list[int]:
        tokens = []
        while (token := self.forced.get(self.taken + len(tokens))) is not None:
            tokens.append(token)
        return tokens

    def mask_into(self, words: np.ndarray) -> None:
        token = self.forced.get(self.taken)
        words[:] = pack_mask(np.arange(VOCAB_SIZE) == token if token is not None else np.ones(VOCAB_SIZE, bool))

    def accept(self, token_id: int) -> bool:
        if self.forced.get(self.taken, token_id) != token_id:
            return False
        self.taken += 1
        return True

    def rollback(self, count: int) -> None:
        self.taken -= count
        assert self.taken >= 0


@dataclasses.dataclass
class Masks:
    """Rules of one request group; see `engine_machine.Rules`."""

    min_tokens: int = 0
    ends: frozenset[int] = frozenset()
    bad: bool = False
    forced: dict[int, int] = dataclasses.field(default_factory=dict)

    def next(self, token_ids: list[int], num_output_tokens: int, token: int) -> int:
        """The token, or the next larger one that is allowed."""
        while not self._allows(token_ids, num_output_tokens, token):
            token = (token + 1) % VOCAB_SIZE
        return token

    def _allows(self, token_ids: list[int], count: int, token: int) -> bool:
        if count < self.min_tokens and token in self.ends:
            return False
        if self.bad and count and 1 <= (token - token_ids[-1]) % VOCAB_SIZE <= 8:
            return False
        if self.bad and token == 0 and count >= 7 and token_ids[-7:] == [0] * 7:
            return False
        return self.forced.get(count, token) == token


class SpeculatingMachine(EngineMachine):
    """Random drafts, of random verify programs, for the random users of EngineMachine."""

    def drafting(self, number: int, budget: int) -> dict[str, Any]:
        self.rng = rng = random.Random(number)
        sizes = tuple(sorted({min(rng.choice((2, 3, 4, 8, 16)), budget) for _ in range(2)}))
        self.later = sizes if rng.random() < 0.3 else None  # the programs are compiled while requests run
        failing = {("sample", rng.randrange(40))} if rng.random() < 0.1 else set()
        self.more_failures = frozenset(failing)
        return {
            "max_drafts": rng.choice((1, 2, 3, 6)), "verify_sizes": sizes if self.later is None else (),
            "owner_of": self.owner_of,
        }  # fmt: skip

    def new_engine(self, options: EngineOptions) -> Engine:
        rng, runner = self.rng, self.runner
        runner.fail_at |= self.more_failures
        right = rng.choice(([1.0], [0.0], [0.9], [1.0, 0.0, 0.7], [0.6]))
        oracle = Oracle(self.continuation, right, VOCAB_SIZE, rng)
        speculation = RandomSpeculation(oracle, runner.max_drafts, rng, always=rng.random() < 0.5)
        return DraftingEngine(runner, speculation, dataclasses.replace(options, jump_forward=rng.random() < 0.7))

    def owner_of(self, row: int) -> tuple[Request, int]:
        """The request that owns a row, and how often it was preempted."""
        request = next(r for r in self.engine.scheduler.running if r.schedule.row == row)
        return request, request.metrics.preemptions

    def continuation(self, request: Request, count: int) -> list[int]:
        """The next tokens of a request, also past its end."""
        rules, tokens = self.rules.get(request.request_id), list(request.token_ids)
        seed = sample_seed(request.seed, request.index) if request.params.temperature > 0 else 0
        for _ in range(count):
            token = next_token(tokens, VOCAB_SIZE, seed, self.runner.windows)
            tokens.append(token if rules is None else rules.next(tokens, len(tokens) - request.prompt_len, token))
        return tokens[len(request.token_ids) :]

    def ruled(self, request_group: RequestGroup) -> RequestGroup:
        params = request_group.params
        kind = self.rng.choice(("none", "none", "min_tokens", "bad", "both", "grammar", "natural"))
        if params.use_beam_search or kind == "none":
            return request_group
        first = request_group.first
        masks, follows, grammar = Masks(ends=first.stop_ids), params, None
        if kind in ("min_tokens", "both"):
            masks.min_tokens = self.rng.randint(1, 6)
            follows = dataclasses.replace(follows, max_tokens=None, min_tokens=masks.min_tokens)
        masks.bad = kind in ("bad", "both")
        if kind in ("grammar", "natural"):
            masks.forced = self._forced(first.prompt_token_ids, params, natural=kind == "natural")
            grammar = Future()
            grammar.set_result(Grammar(masks.forced))
            follows = dataclasses.replace(follows, structured_outputs={"json_object": True})
        bad_words = BAD_WORDS if masks.bad else ()
        extras = SamplingExtras(follows, VOCAB_SIZE, end_token_ids=first.stop_ids, bad_words=bad_words)
        for request in request_group.requests:
            request.extras = extras
            request.__post_init__()
        self.rules[request_group.request_id] = masks
        return request_group if grammar is None else dataclasses.replace(request_group, grammar=grammar)

    def _forced(self, prompt: list[int], params: SamplingParams, *, natural: bool) -> dict[int, int]:
        """Tokens that a grammar forces, by their place. natural: the first sample would have them without it."""
        if not natural:
            return {place: 7 * place % VOCAB_SIZE for place in range(64) if place % (FREE + FORCED) >= FREE}
        answer, _ = expected(prompt, params, self.runner.max_model_len, self.runner.windows)
        return {place: token for place, token in enumerate(answer) if place % (FREE + FORCED) >= FREE}

    @rule()
    @precondition(lambda self: not self.runner.fail_at)
    def sleep(self) -> None:
        """The engine forgets all KV, and running requests recompute theirs."""
        for output in self.engine.flush():
            self.judge(output)
        self.engine.sleep()
        self.sound()
        self.engine.wake_up()

    def step(self) -> None:
        if self.later is not None and self.rng.random() < 0.1:
            self.runner.verify_sizes, self.later = self.later, None
        before = len(self.runner.plans)
        super().step()
        self._note_reached(before)
        if self.engine.pipeline.failure is not None:  # sampling has failed: the next call raises it
            try:
                self.engine.step()
            except StepError as error:
                self.end_failed(error)
            self.sound()

    def _note_reached(self, before: int) -> None:
        for plan in self.runner.plans[before:]:
            if plan.drafts is not None:
                drafted = plan.num_tokens > 1
                guesses = (plan.drafts.guesses >= 0).sum(axis=1) >= plan.num_tokens
                self.reached["guesses past tokens in flight"] += bool((drafted & guesses).any())
                self.reached["masks of drafts"] += plan.waits_for_masks
        for step in self.engine.scheduler._newest:
            self.reached["dropped drafts"] += sum(request in step.drafts for request in step.discarded)
        counters = self.engine._counters.speculation
        self.reached["accepted drafts"] = counters.accepted_tokens
        self.reached["rejected drafts"] = counters.draft_tokens - counters.accepted_tokens
