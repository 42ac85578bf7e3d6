"""A hypothesis state machine that runs an engine on the fake runner and checks every answer."""

import collections
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hypothesis.strategies as st
import numpy as np
from hypothesis import event
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions, StepError
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.step_plan import RecurrentSizes, TransferCosts
from jpaged.engine.strategies.beam_search import BeamSearch
from jpaged.errors import RequestError
from jpaged.kv_groups import max_blocks
from jpaged.params.sampling import SamplingParams
from tests.engine.fake_runner import (
    DeviceFailure,
    FakeRunner,
    adapted_seed,
    candidates,
    next_token,
    sample_seed,
    weighted_seed,
)

VOCAB_SIZE = 31
EOS = 7
BEAMS = (
    {"use_beam_search": True, "best_of": 2},
    {"use_beam_search": True, "beam_width": 4, "n": 3, "length_penalty": 0.0},
    {"use_beam_search": True, "beam_width": 3, "early_stopping": True},
)
SHARED = (0, 3, 9, 22, 37)  # lengths of prefixes that prompts share
MAX_TOKENS = (None, 1, 2, 5, 30)
LOGPROBS = (None, 0, 2)
ANSWERS = ({}, {}, {"n": 2}, {"n": 4}, {"n": 2, "best_of": 3}, *BEAMS)
SALTS = ("", "", "", "x")
# Cost of moving a block: not measured, cheap, cheap for many blocks, never worth it.
COSTS = (None, None, TransferCosts(0.1, 1.0), TransferCosts(0.1, 1.0, seconds_to_begin=6.0), TransferCosts(10.0, 0.01))
# Target times that a fake step always misses or always meets, however slow the machine is.
TARGETS = (None, None, 1e-9, 1e9)
COUNTERS = (
    "prefix_hit_tokens", "preemptions", "recomputed_tokens", "copied_blocks", "blocks_to_host", "blocks_to_device",
)  # fmt: skip


class Rules(Protocol):
    """Masks of one request."""

    def next(self, token_ids: list[int], num_output_tokens: int, token: int) -> int:
        """The token that is sampled after `token_ids`, where the model alone samples `token`."""
        ...


def expected(
    token_ids: list[int], params: SamplingParams, max_model_len: int, windows: tuple[int | None, ...], index: int = 0,
    rules: Rules | None = None, adapter: int = 0, weights: Callable[[int], int] = lambda index: 0,
) -> tuple[list[int], str]:
    """Tokens and finish reason of one sample of a request that runs alone.

    weights: index of an output token -> number of the weights that compute it.
    """
    tokens = list(token_ids)
    longest = min(max_model_len, len(token_ids) + (params.max_tokens or max_model_len))
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    seed = sample_seed(params.seed, index) if params.temperature > 0 else 0
    while True:
        number = weights(len(tokens) - len(token_ids))
        own_seed = weighted_seed(adapted_seed(seed, adapter), number, number)
        token = next_token(tokens, VOCAB_SIZE, own_seed, windows)
        tokens.append(token if rules is None else rules.next(tokens, len(tokens) - len(token_ids), token))
        if tokens[-1] in stops:
            return tokens[len(token_ids) :], "stop"
        if len(tokens) == longest:
            return tokens[len(token_ids) :], "length"


def expected_beams(
    token_ids: list[int], params: SamplingParams, max_model_len: int, windows: tuple[int | None, ...], count: int,
    adapter: int = 0, weights: int = 0,
) -> list[tuple[list[int], str]]:
    """The answers of a beam search. Each beam is computed from its whole sequence."""
    longest = min(max_model_len, len(token_ids) + (params.max_tokens or max_model_len))
    stops = frozenset({*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))})
    search = BeamSearch(
        width=params.num_sequences, max_new_tokens=longest - len(token_ids), end_token_ids=stops,
        length_penalty=params.length_penalty, early_stopping=params.early_stopping,
    )  # fmt: skip
    beams = [list(token_ids)]
    while True:
        seed = weighted_seed(adapted_seed(0, adapter), weights, weights)
        best = [next_token(beam, VOCAB_SIZE, seed, windows) for beam in beams]
        gave = [candidates(token, VOCAB_SIZE, count) for token in best]
        steps = search.advance(*(np.stack(part) for part in zip(*gave, strict=True)))
        if search.is_over:
            return [(list(found.token_ids), found.finish_reason) for found in search.best(params.n)]
        beams = [[*beams[step.parent], step.token_id] for step in steps]


class EngineMachine(RuleBasedStateMachine):
    """Random users, sizes of the pool, numbers of rows, token budgets and kinds of layers."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([(None,), (None,), (1,), (7,), (5, None), (None, 2, 2), (3, None, 11), (9, 4)]),
        model_len=st.sampled_from([4, 17, 40, 40]),
        longrope_switch_len=st.sampled_from([None, None, None, 1, 8, 23]),
        extra_blocks=st.sampled_from([0, 1, 2, 4, 12]),
        rows=st.sampled_from([1, 2, 3, 5, 8]),
        stages=st.sampled_from([1, 1, 2, 3]),
        extra_budget=st.sampled_from([0, 1, 5, 20]),
        caching=st.sampled_from([True, True, False]),
        host_slots=st.sampled_from([0, 1, 5, 40]),
        costs=st.sampled_from(COSTS),
        policy=st.sampled_from(["fcfs", "priority", "shortest_first"]),
        partial=st.integers(1, 2),
        target_ms=st.sampled_from(TARGETS),
        failures=st.frozensets(st.tuples(st.sampled_from(["dispatch", "collect"]), st.integers(0, 60)), max_size=2),
        crowd=st.integers(0, 2**32),
    )
    def setup(
        self, block_size, windows, model_len, longrope_switch_len, extra_blocks, rows, stages, extra_budget, caching,
        host_slots, costs, policy, partial, target_ms, failures, crowd,
    ) -> None:  # fmt: skip
        windows, stages = self.kinds(windows, stages)
        need = max_blocks(windows, model_len, chunk=rows + extra_budget, block_size=block_size)
        self.runner = FakeRunner(
            num_blocks=need + extra_blocks,
            block_size=block_size,
            windows=windows,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + extra_budget,
            num_stages=stages,
            max_model_len=model_len,
            longrope_switch_len=longrope_switch_len,
            vocab_size=VOCAB_SIZE,
            max_logprobs=6,
            host_slots=host_slots,
            transfer_costs=self.transfer_costs(costs, crowd),
            fail_at=failures,
            salt_of=self.salt_of,
            recurrent_sizes=self.recurrent_sizes(rows, crowd),
            **self.drafting(crowd, rows + extra_budget),
        )
        scheduling = SchedulingOptions(
            scheduling_policy=policy, max_num_partial_prefills=partial, target_step_ms=target_ms
        )  # fmt: skip
        options = EngineOptions(eos_token_id=EOS, enable_prefix_caching=caching, scheduling=scheduling)
        self.engine = self.new_engine(options)
        add = self.engine.add

        def add_at_a_step(request_group: RequestGroup) -> None:
            # Not the time of day: the order of the queue must not depend on how fast the machine is.
            request_group.metrics.arrival_time = len(self.runner.plans) / 64
            add(request_group)

        self.engine.add = add_at_a_step  # ty: ignore[invalid-assignment]
        self.rules: dict[str, Rules] = {}
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.salts: dict[str, str] = {}
        self.adapters: dict[str, int] = {}  # by request id; without an entry: the base model alone
        self.progress: dict[tuple[str, int], int] = {}
        self.ended: set[str] = set()
        self.waits: collections.Counter[Request] = collections.Counter()  # turns in a row without a token
        self.reached: collections.Counter[str] = collections.Counter()
        self.crowd(crowd, 5)

    def kinds(self, windows: tuple[int | None, ...], stages: int) -> tuple[tuple[int | None, ...], int]:
        """Windows of the KV groups, and the number of pipeline stages."""
        return windows, stages

    def recurrent_sizes(self, rows: int, number: int) -> RecurrentSizes | None:
        """Slots of recurrent state. number: decides them."""
        return None

    def transfer_costs(self, costs: TransferCosts | None, number: int) -> TransferCosts | None:
        """Costs of moves to the host. number: may decide some of them."""
        return costs

    def drafting(self, number: int, budget: int) -> dict[str, Any]:
        """More options of the fake device. number: decides them. budget: tokens of a step."""
        return {}

    def new_engine(self, options: EngineOptions) -> Engine:
        """An engine on `self.runner`."""
        return Engine(self.runner, options=options)

    def ruled(self, request_group: RequestGroup) -> RequestGroup:
        """The request group, perhaps with `rules` for its tokens."""
        return request_group

    def salt_of(self, row: int) -> str:
        """Salt of the request that owns a row."""
        return next(self.salts[r.request_id] for r in self.engine.scheduler.running if r.schedule.row == row)

    @rule(
        shared=st.sampled_from(SHARED),
        family=st.integers(0, 1),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        max_tokens=st.sampled_from(MAX_TOKENS),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(1, 3),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from(LOGPROBS),
        stream=st.booleans(),
        answers=st.sampled_from(ANSWERS),
        priority=st.integers(-2, 2),
        salt=st.sampled_from(SALTS),
    )
    def add(
        self, shared, family, own, max_tokens, temperature, seed, ignore_eos, logprobs, stream, answers, priority, salt
    ) -> None:  # fmt: skip
        prompt = [*((i * 5 + family) % VOCAB_SIZE for i in range(shared)), *own][: self.runner.max_model_len - 1] or [1]
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos, logprobs=logprobs,
            stop_token_ids=[3] if family else None, **answers,
        )  # fmt: skip
        request_id = str(len(self.salts))
        self.salts[request_id] = salt
        priority *= self.engine.options.scheduling.scheduling_policy == "priority"
        try:
            salted = {"prompt_token_ids": prompt, "cache_salt": salt}
            request_group = self.engine.inputs.process(request_id, salted, params, stream=stream, priority=priority)
            self.engine.add(self.ruled(request_group))
        except RequestError as error:  # its answers do not fit into the pool together
            if error.parameter not in ("n", "best_of", "beam_width") or "blocks of KV cache" not in str(error):
                raise
        else:
            self.asked[request_id] = (prompt, params)

    @rule(seed=st.integers(0, 2**32), count=st.integers(2, 6))
    def crowd(self, seed: int, count: int) -> None:
        """Add several requests: single arrivals hardly ever fill the pool."""
        self.last_crowd = seed, count
        rng = random.Random(seed)
        for _ in range(count):
            self.add(
                rng.choice(SHARED), rng.randrange(2), [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(7))],
                rng.choice(MAX_TOKENS), rng.choice([0.0, 1.0]), rng.randint(1, 3), rng.random() < 0.7,
                rng.choice(LOGPROBS), rng.random() < 0.5, rng.choice(ANSWERS), rng.randint(-2, 2), rng.choice(SALTS),
            )  # fmt: skip

    @rule(data=st.data())
    @precondition(lambda self: self.asked)
    def ask_again(self, data) -> None:
        """The next turn of a conversation: an earlier prompt and its answer so far."""
        before = data.draw(st.sampled_from(sorted(self.asked)))
        prompt, params = self.asked[before]
        request_group = self.engine._outputs.request_groups.get(before)
        prompt = [*prompt, *([] if request_group is None else request_group.first.token_ids[len(prompt) :])]
        request_id = str(len(self.salts))
        self.salts[request_id] = self.salts[before]
        salted = {"prompt_token_ids": prompt[: self.runner.max_model_len - 1], "cache_salt": self.salts[before]}
        params = SamplingParams(temperature=0, max_tokens=3, stop_token_ids=params.stop_token_ids)
        self.engine.add_request(request_id, salted, params)
        self.asked[request_id] = (salted["prompt_token_ids"], params)

    @rule(data=st.data())
    @precondition(lambda self: len(self.asked) > len(self.ended))
    def abort(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked.keys() - self.ended)))
        (output,) = self.engine.abort([request_id])
        self.judge(output, aborted=True)
        params = self.asked[request_id][1]
        several = params.n > 1 or params.use_beam_search  # then some may have ended before
        assert not output.outputs or several or output.outputs[0].finish_reason == "abort"

    @rule(again=st.booleans(), recompute=st.booleans())
    def new_weights(self, again: bool, recompute: bool) -> None:
        """Running requests keep their KV, or lose it."""
        self.flush()
        live = bool(self.asked.keys() - self.ended)
        self.replace_weights(recompute)
        self.runner.oldest_kv = self.runner.weights if recompute else self.runner.oldest_kv
        self.reached["new weights while requests live"] += live
        if again:
            self.crowd(*self.last_crowd)  # the same prompts again: their KV of the old weights must not be found

    def replace_weights(self, recompute: bool) -> None:
        """Use the next weights."""
        number = self.runner.weights + 1
        self.engine.update_weights([number, number], recompute=recompute)

    def flush(self) -> None:
        """Collect the steps in flight."""
        self.waits.clear()  # a pipeline is empty after it, and its turns begin again
        try:
            for output in self.engine.flush():
                self.judge(output)
            if self.engine.pipeline.failure is not None:  # it had outputs to return, so the next call raises
                self.engine.flush()
        except StepError as error:
            self.end_failed(error)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.engine.reset_prefix_cache() == (self.asked.keys() == self.ended)

    @rule(count=st.integers(1, 25))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.step()

    @invariant()
    def sound(self) -> None:
        self.engine.check_integrity()
        pool = self.engine.scheduler.manager.pool
        for block, name in enumerate(pool.states().names):
            if name is not None:
                tokens = np.frombuffer(name.tokens, np.int32).tolist()
                assert self.runner.pages[block].tolist() == tokens, "a name that lies about its block"
                assert (self.runner.written_for[block, :, 0] == name.kv_group).all(), "a name that lies about its group"
        if pool.host_tier is not None and not pool.moves:
            for name, slot in pool.host_tier._slots.items():
                tokens = np.frombuffer(name.tokens, np.int32).tolist()
                assert self.runner.host[slot][0].tolist() == tokens, "a name that lies about its slot"
        self.only_equal_beginnings_are_shared()
        states = self.engine.scheduler.manager.states
        if states is not None and not states._due:
            for name, slot in states._named.items():
                tokens = self.runner.states[slot][0][-self.runner.block_size :]
                assert tokens == tuple(np.frombuffer(name.tokens, np.int32).tolist()), "a name that lies about a state"
            for name, stored in ({} if pool.host_tier is None else pool.host_tier._snapshots).items():
                tokens = self.runner.host_states[stored.slot][0][-self.runner.block_size :]
                assert tokens == tuple(np.frombuffer(name.tokens, np.int32).tolist()), "a name that lies about a state"

    def only_equal_beginnings_are_shared(self) -> None:
        size, holders = self.runner.block_size, {}
        for request in self.engine.scheduler.running:
            for kv_group, table in enumerate(request.kv.block_tables):
                for index, block in enumerate(table.held, table.first_held):
                    # forks share a block that is partly full
                    computed = min((index + 1) * size, request.schedule.num_computed)
                    beginning = (kv_group, request.adapter, request.token_ids[:computed])
                    assert holders.setdefault(block, beginning) == beginning, "a block in the tables of two"

    def step(self) -> None:
        oldest = min(self.engine.scheduler.running, key=lambda request: request.arrival, default=None)
        if oldest is not None and oldest.is_beam:
            oldest = None  # a beam may be preempted for another beam of its search
        limit = self.runner.longrope_switch_len
        decodes = [
            (request, request.metrics.preemptions)
            for request in self.engine.scheduler.running
            if request.schedule.decoding and request.num_missing and not request.schedule.num_drafts_in_flight
        ]
        before = len(self.runner.plans)
        outgrows = limit is not None and oldest is not None and (
            oldest.kv.rope_len <= limit == oldest.schedule.num_computed
            or oldest.kv.rope_len <= limit < len(oldest.token_ids)  # forced tokens reach beyond the limit
        )
        try:
            for output in self.engine.step():
                self.judge(output)
        except StepError as error:
            self.end_failed(error)
        else:
            rows = {row for plan in self.runner.plans[before:] for row in plan.rows.tolist()}
            before_it, self.waits = self.waits, collections.Counter()  # one that is preempted begins again
            for request, preemptions in decodes:
                schedule = request.schedule
                waited = schedule.status is RequestStatus.RUNNING and schedule.row not in rows
                if waited and request.metrics.preemptions == preemptions:
                    self.waits[request] = before_it[request] + 1
                # with stages: until its micro-batch has a turn, and one turn more if it is passed on
                longest = self.runner.num_stages if self.runner.num_stages > 1 else 0
                assert self.waits[request] <= longest, "a decode waits"
        self.sound()
        if oldest is not None and oldest.schedule.status is RequestStatus.PREEMPTED:
            assert outgrows, "the oldest is never preempted"

    def end_failed(self, error: StepError) -> None:
        assert isinstance(error.__cause__, DeviceFailure)
        assert not self.ended & set(error.request_ids)
        self.ended |= set(error.request_ids)

    def judge(self, output, aborted: bool = False) -> None:
        assert output.request_id not in self.ended
        prompt, params = self.asked[output.request_id]
        if params.use_beam_search:
            self.judge_beams(output, prompt, params, aborted)
        else:
            self.judge_samples(output, prompt, params)
        if output.finished:
            self.ended.add(output.request_id)

    def weights_of(self, request_id: str, index: int) -> Sequence[tuple[int, int]]:
        """The weights that compute an answer: (index of the first token, their number)."""
        return ((0, 0),)

    def judge_beams(self, output, prompt, params, aborted) -> None:
        assert output.finished, "beams are not streamed"
        if aborted:
            return  # the answers so far
        adapter = self.adapters.get(output.request_id, 0)
        numbers = self.weights_of(output.request_id, 0)
        if len({number for _, number in numbers}) > 1:
            return  # some beams may have had their candidates from the weights before
        limits = self.runner.max_model_len, self.runner.windows
        wanted = expected_beams(prompt, params, *limits, 6, adapter, numbers[0][1])
        assert [(answer.token_ids, answer.finish_reason) for answer in output.outputs] == wanted
        for answer in output.outputs:
            assert (answer.logprobs is None) == (params.logprobs is None)
            if answer.logprobs is not None:
                assert [next(iter(entries)) for entries in answer.logprobs] == answer.token_ids

    def judge_samples(self, output, prompt, params) -> None:
        limits = self.runner.max_model_len, self.runner.windows
        rules, adapter = self.rules.get(output.request_id), self.adapters.get(output.request_id, 0)
        samples = []
        for index in range(params.num_sequences):
            changes = self.weights_of(output.request_id, index)
            numbers = lambda token, changes=changes: [number for first, number in changes if first <= token][-1]  # noqa: E731
            samples.append(expected(prompt, params, *limits, index, rules, adapter, numbers))
        aborted = any(answer.finish_reason == "abort" for answer in output.outputs)
        if params.chooses:
            assert output.finished
            assert len(output.outputs) == params.n
            sums = [answer.cumulative_logprob for answer in output.outputs]
            assert sums == sorted(sums, reverse=True)
            if not aborted:
                ranked = sorted((-sum(-token / 10 for token in tokens), tokens, reason) for tokens, reason in samples)
                best = [total for total, _, _ in ranked[: params.n]]
                assert np.allclose([-total for total in best], sums)
                for answer in output.outputs:
                    assert (answer.token_ids, answer.finish_reason) in samples
            return
        for (tokens, reason), answer in zip(samples, output.outputs, strict=True):
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            key = (output.request_id, answer.index)
            assert len(answer.token_ids) >= self.progress.get(key, 0)
            self.progress[key] = len(answer.token_ids)
            if answer.logprobs is not None:
                assert [next(iter(entries)) for entries in answer.logprobs] == answer.token_ids
            if output.finished and answer.finish_reason != "abort":
                assert (answer.token_ids, answer.finish_reason) == (tokens, reason)

    def teardown(self) -> None:
        # every step advances the oldest request, or collects the candidates that a search waits for
        bound = 200 + 150 * sum(params.num_sequences for _, params in self.asked.values())
        while self.engine.has_work:
            self.step()
            bound -= 1
            assert bound > 0, "the engine does not come to an end"
        assert self.ended == self.asked.keys()
        assert self.engine.stats().used_blocks == 0
        for name in COUNTERS:
            self.reached[name] += getattr(self.engine.scheduler.counters, name)
        for name, count in self.reached.items():
            if count:
                event(name)  # `--hypothesis-show-statistics` prints in how many examples
