"""The host side under random arrivals, aborts, failures and tiny pools: tokens are those of each request alone."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.engine.engine import Engine, StepError
from jpaged.engine.request import RequestStatus
from jpaged.kv_groups import most_blocks
from jpaged.sampling_params import SamplingParams
from tests.engine.fake_runner import DeviceFailure, FakeRunner, next_token

VOCAB_SIZE = 31
EOS = 7


def expected(
    token_ids: list[int], params: SamplingParams, max_model_len: int, windows: tuple[int | None, ...]
) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that nobody disturbs."""
    tokens = list(token_ids)
    longest = min(max_model_len, len(token_ids) + (params.max_tokens or max_model_len))
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    while True:
        tokens.append(next_token(tokens, VOCAB_SIZE, params.seed if params.temperature > 0 else 0, windows))
        if tokens[-1] in stops:
            return tokens[len(token_ids) :], "stop"
        if len(tokens) == longest:
            return tokens[len(token_ids) :], "length"


class EngineMachine(RuleBasedStateMachine):
    """Any user, any size of pool, any number of rows, any token budget, any kinds of layers."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([(None,), (None,), (1,), (7,), (5, None), (None, 2, 2), (3, None, 11), (9, 4)]),
        model_len=st.sampled_from([4, 17, 40]),
        outgrown_after=st.sampled_from([None, None, 1, 8, 23]),
        extra_blocks=st.sampled_from([0, 1, 2, 4, 12]),
        rows=st.integers(1, 5),
        extra_budget=st.sampled_from([0, 1, 5, 20]),
        caching=st.booleans(),
        failures=st.frozensets(st.tuples(st.sampled_from(["dispatch", "collect"]), st.integers(0, 60)), max_size=2),
    )
    def setup(
        self, block_size, windows, model_len, outgrown_after, extra_blocks, rows, extra_budget, caching, failures
    ) -> None:
        need = most_blocks(windows, model_len, chunk=rows + extra_budget, block_size=block_size)
        self.runner = FakeRunner(
            num_blocks=need + extra_blocks,
            block_size=block_size,
            windows=windows,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + extra_budget,
            max_model_len=model_len,
            outgrown_after=outgrown_after,
            vocab_size=VOCAB_SIZE,
            fail_at=failures,
        )
        self.engine = Engine(self.runner, eos_token_id=EOS, enable_prefix_caching=caching)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.progress: dict[str, int] = {}
        self.ended: set[str] = set()

    @rule(
        shared=st.sampled_from([0, 3, 9, 22, 37]),
        family=st.integers(0, 1),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        max_tokens=st.sampled_from([None, 1, 2, 5, 30]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(1, 3),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, 0, 2]),
        stream=st.booleans(),
    )
    def add(self, shared, family, own, max_tokens, temperature, seed, ignore_eos, logprobs, stream) -> None:
        prompt = [*((i * 5 + family) % VOCAB_SIZE for i in range(shared)), *own][: self.runner.max_model_len - 1] or [1]
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos, logprobs=logprobs,
            stop_token_ids=[3] if family else None,
        )  # fmt: skip
        request_id = str(len(self.asked))
        self.asked[request_id] = (prompt, params)
        self.engine.add_request(request_id, prompt, params, stream=stream)

    @rule(data=st.data())
    @precondition(lambda self: len(self.asked) > len(self.ended))
    def abort(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked.keys() - self.ended)))
        (output,) = self.engine.abort([request_id])
        self.judge(output)
        assert output.outputs[0].finish_reason == "abort"

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.step()

    @invariant()
    def sound(self) -> None:
        self.engine.check_integrity()
        pool = self.engine._manager.pool
        for block, name in enumerate(pool._names):
            if name is not None:
                assert self.runner.pages[block].tolist() == list(name.tokens), "a name that lies about its block"
                assert (self.runner.written_for[block, :, 0] == name.group).all(), "a name that lies about its group"
        self.only_equal_beginnings_are_shared()

    def only_equal_beginnings_are_shared(self) -> None:
        size, holders = self.runner.block_size, {}
        for request in self.engine._scheduler.running:
            for group, table in enumerate(request.block_tables):
                for index, block in enumerate(table.held, table.first_held):
                    beginning = (group, request.token_ids[: (index + 1) * size])
                    assert holders.setdefault(block, beginning) == beginning, "a block in the tables of two"

    def step(self) -> None:
        oldest = min(self.engine._scheduler.running, key=lambda request: request.arrival, default=None)
        limit = self.runner.outgrown_after
        outgrows = oldest is not None and limit is not None and oldest.rope_len <= limit == oldest.num_computed
        try:
            for output in self.engine.step():
                self.judge(output)
        except StepError as error:
            self.end_failed(error)
        self.sound()
        if oldest is not None and oldest.status is RequestStatus.PREEMPTED:
            assert outgrows, "the oldest is never preempted"

    def end_failed(self, error: StepError) -> None:
        assert isinstance(error.__cause__, DeviceFailure)
        assert not self.ended & set(error.request_ids)
        self.ended |= set(error.request_ids)

    def judge(self, output) -> None:
        assert output.request_id not in self.ended
        tokens, reason = expected(*self.asked[output.request_id], self.runner.max_model_len, self.runner.windows)
        answer = output.outputs[0]
        assert answer.token_ids == tokens[: len(answer.token_ids)]
        assert len(answer.token_ids) >= self.progress.get(output.request_id, 0)
        self.progress[output.request_id] = len(answer.token_ids)
        if answer.logprobs is not None:
            assert [next(iter(entries)) for entries in answer.logprobs] == answer.token_ids
        if output.finished:
            self.ended.add(output.request_id)
            if answer.finish_reason != "abort":
                assert (answer.token_ids, answer.finish_reason) == (tokens, reason)

    def teardown(self) -> None:
        bound = 200 + 60 * len(self.asked)  # every step moves the oldest request on: nothing can take longer
        while self.engine.has_work:
            self.step()
            bound -= 1
            assert bound > 0, "the engine does not come to an end"
        assert self.ended == self.asked.keys()
        assert self.engine.stats().used_blocks == 0


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=200, stateful_step_count=40)
