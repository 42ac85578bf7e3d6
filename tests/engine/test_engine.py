"""The engine on a fake runner. Its tokens are right only if every slot of every block table is right."""

from typing import Any

import numpy as np
import pytest

from jpaged.engine.engine import Engine, EngineOptions, SchedulingOptions, StepError
from jpaged.engine.scheduling import plan_builder
from jpaged.engine.step_plan import SamplerVariant
from jpaged.errors import CapacityError, EngineError, RequestError
from jpaged.params.sampling import COLUMNS, NEUTRAL_COLUMNS, SamplingParams
from tests.engine.fake_runner import FakeRunner, alone
from tests.engine.greedy_requests import greedy, prompt_of, run


def test_one_request_gives_the_models_tokens():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(5), greedy(8))
    output = run(engine)["a"]
    assert output.outputs[0].token_ids == alone(prompt_of(5), 8, 97)
    assert output.finished
    assert output.outputs[0].finish_reason == "length"


def test_every_length_around_block_and_budget_borders():
    engine = Engine(FakeRunner())
    lengths = (1, 2, 3, 4, 5, 15, 16, 17, 33, 55)
    for length in lengths:
        engine.add_request(str(length), prompt_of(length), greedy(9))
    finals = run(engine)
    for length in lengths:
        assert finals[str(length)].outputs[0].token_ids == alone(prompt_of(length), 9, 97), length


def test_decode_never_waits_for_the_host():
    """Step N is dispatched before step N-1 is collected, and each step but the first has a decode."""
    runner = FakeRunner()
    engine = Engine(runner)
    engine.add_request("a", prompt_of(3), greedy(6))
    assert engine.step() == []
    engine.step()
    assert len(runner.plans) == 2
    assert runner.plans[1].num_decodes == 1
    run(engine)
    assert len(runner.plans) == 6, "nothing runs past max_tokens"


def test_a_stopped_request_runs_one_step_too_many_and_drops_its_token():
    tokens = alone(prompt_of(3), 8, 97)
    runner = FakeRunner()
    engine = Engine(runner, options=EngineOptions(eos_token_id=tokens[2]))
    engine.add_request("a", prompt_of(3), greedy(8))
    engine.add_request("b", prompt_of(3), greedy(8, ignore_eos=True))
    engine.add_request("c", prompt_of(3), greedy(8, ignore_eos=True, stop_token_ids=[tokens[4]]))
    finals = run(engine)
    assert finals["a"].outputs[0].token_ids == tokens[:3]
    assert (finals["a"].outputs[0].finish_reason, finals["a"].outputs[0].stop_reason) == ("stop", None)
    assert finals["b"].outputs[0].token_ids == tokens
    assert (finals["c"].outputs[0].finish_reason, finals["c"].outputs[0].stop_reason) == ("stop", tokens[4])
    assert engine.stats().generated_tokens == 3 + 8 + 5


def test_max_tokens_is_cut_to_what_fits():
    engine = Engine(FakeRunner(max_model_len=16))
    engine.add_request("a", prompt_of(10), greedy(1000))
    engine.add_request("b", prompt_of(15), greedy(None))
    finals = run(engine)
    assert finals["a"].outputs[0].token_ids == alone(prompt_of(10), 6, 97)
    assert finals["b"].outputs[0].token_ids == alone(prompt_of(15), 1, 97)
    assert finals["a"].outputs[0].finish_reason == finals["b"].outputs[0].finish_reason == "length"


def test_a_tiny_pool_preempts_the_youngest_and_changes_no_token():
    runner = FakeRunner(num_blocks=16, max_model_len=64)
    engine = Engine(runner)
    prompts = [prompt_of(8, start=100 * i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(40))
    finals, ended = {}, []
    while engine.has_work:
        for output in engine.step():
            finals[output.request_id] = output
            ended.append(output.request_id)
        engine.check_integrity()
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert stats.peak_used_blocks == 16
    assert ended[0] == "0"
    assert finals["0"].metrics.preemptions == 0
    for i, prompt in enumerate(prompts):
        assert finals[str(i)].outputs[0].token_ids == alone(prompt, 40, 97)


def test_equal_prefixes_are_computed_once():
    runner = FakeRunner()
    engine = Engine(runner)
    engine.add_request("a", prompt_of(21), greedy(4))
    run(engine)
    engine.add_request("b", prompt_of(21), greedy(4))
    engine.add_request("c", prompt_of(20), greedy(4))
    engine.add_request("d", [*prompt_of(20), 1, 2, 3], greedy(4))
    finals = run(engine)
    assert finals["b"].num_cached_tokens == 20
    assert finals["c"].num_cached_tokens == 16, "the last token is always computed"
    assert finals["d"].num_cached_tokens == 20
    assert engine.stats().prefix_hit_tokens == 56
    assert finals["d"].outputs[0].token_ids == alone([*prompt_of(20), 1, 2, 3], 4, 97)


def test_blocks_of_output_tokens_are_found_as_well():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(6), greedy(12))
    answer = run(engine)["a"].outputs[0].token_ids
    engine.add_request("b", prompt_of(6) + answer + [5], greedy(2))
    assert run(engine)["b"].num_cached_tokens == 16


def test_a_block_that_the_stop_token_fills_is_found():
    """The stop token fills the fourth block. The superfluous step after it has computed its KV."""
    tokens = alone(prompt_of(13), 3, 97)
    engine = Engine(FakeRunner(), options=EngineOptions(eos_token_id=tokens[-1]))
    engine.add_request("a", prompt_of(13), greedy(8))
    assert run(engine)["a"].outputs[0].token_ids == tokens
    engine.add_request("b", [*prompt_of(13), *tokens, 5], greedy(2))
    assert run(engine)["b"].num_cached_tokens == 16


@pytest.mark.parametrize("how", ["off", "not cacheable", "other salt", "reset"])
def test_nothing_is_shared_if_it_must_not_be(how: str):
    runner = FakeRunner(cacheable_up_to=10 if how == "not cacheable" else 10**9)
    engine = Engine(runner, options=EngineOptions(enable_prefix_caching=how != "off"))
    engine.add_request("a", {"prompt_token_ids": prompt_of(21), "cache_salt": "x"}, greedy(4))
    run(engine)
    if how == "reset":
        assert engine.reset_prefix_cache()
    salt = "y" if how == "other salt" else "x"
    engine.add_request("b", {"prompt_token_ids": prompt_of(21), "cache_salt": salt}, greedy(4))
    final = run(engine)["b"]
    assert final.num_cached_tokens == 0
    assert final.outputs[0].token_ids == alone(prompt_of(21), 4, 97)


def test_abort_in_every_state():
    runner = FakeRunner(max_num_seqs=2)
    engine = Engine(runner)
    for name in "abcd":
        engine.add_request(name, prompt_of(20, start=ord(name)), greedy(20))
    engine.step()
    aborted = engine.abort(["a", "c", "nobody"])  # within its prompt, and waiting
    assert [output.outputs[0].finish_reason for output in aborted] == ["abort", "abort"]
    engine.check_integrity()
    for _ in range(5):
        engine.step()
    (output,) = engine.abort(["b"])  # decoding, with a token in flight
    tokens = output.outputs[0].token_ids
    assert tokens
    assert tokens == alone(prompt_of(20, start=ord("b")), 20, 97)[: len(tokens)]
    engine.check_integrity()
    assert engine.abort(["b"]) == []
    assert run(engine)["d"].outputs[0].token_ids == alone(prompt_of(20, start=ord("d")), 20, 97)


def test_short_requests_overtake_long_ones():
    """Short requests arrive, run and finish while long prompts are computed and more of them wait."""
    engine = Engine(FakeRunner(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256, num_blocks=256))
    for i in range(3):
        engine.add_request(f"long {i}", prompt_of(200, start=i), greedy(4))
    engine.step()
    for i in range(2):
        engine.add_request(f"short {i}", prompt_of(6, start=i), greedy(3))
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step()]
        engine.check_integrity()
    assert ended == ["short 0", "short 1", "long 0", "long 1", "long 2"]


def test_a_short_request_never_takes_the_last_row_from_a_long_one():
    engine = Engine(FakeRunner(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64))
    engine.add_request("long 0", prompt_of(40), greedy(2))
    engine.step()
    engine.add_request("long 1", prompt_of(40, start=1), greedy(2))
    for i in range(20):
        engine.add_request(f"short {i}", prompt_of(4, start=i), greedy(2))
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step()]
    assert ended.index("long 1") < 3


def test_the_token_budget_is_used_up_while_prompts_wait():
    runner = FakeRunner(max_num_batched_tokens=16, max_model_len=64)
    engine = Engine(runner)
    for i in range(3):
        engine.add_request(str(i), prompt_of(40, start=i), greedy(2))
    run(engine)
    assert [plan.total_tokens for plan in runner.plans[:7]] == [16] * 7


def test_seeds():
    def tokens(engine_seed: int, *seeds: int | None) -> list[list[int]]:
        engine = Engine(FakeRunner(), options=EngineOptions(seed=engine_seed))
        for i, seed in enumerate(seeds):
            engine.add_request(str(i), prompt_of(5), SamplingParams(seed=seed, max_tokens=8))
        finals = run(engine)
        return [finals[str(i)].outputs[0].token_ids for i in range(len(seeds))]

    assert tokens(0, 5, 5) == [alone(prompt_of(5), 8, 97, seed=5)] * 2
    first, second = tokens(0, None, None)
    assert first != second
    assert tokens(0, None, None) == [first, second]
    assert tokens(1, None, None) != [first, second]


def test_the_sampler_is_the_largest_that_a_sampling_row_needs():
    runner = FakeRunner(max_num_batched_tokens=32)
    engine = Engine(runner)
    engine.add_request("greedy", prompt_of(2), greedy(20))
    engine.step()
    assert runner.plans[-1].sampler is SamplerVariant.GREEDY
    engine.add_request("random", prompt_of(2), SamplingParams(max_tokens=12, min_p=0.1))
    engine.step()
    assert runner.plans[-1].sampler is SamplerVariant.RANDOM
    engine.add_request("full", prompt_of(40), SamplingParams(max_tokens=2, typical_p=0.5))
    engine.step()
    assert runner.plans[-1].sampler is SamplerVariant.RANDOM, "it is in mid-prompt"
    engine.step()
    assert runner.plans[-1].sampler is SamplerVariant.FULL
    run(engine)
    assert runner.plans[-1].sampler is SamplerVariant.GREEDY


def test_row_state_of_greedy_and_odd_parameters():
    runner = FakeRunner()
    engine = Engine(runner)
    engine.add_request("a", prompt_of(2), SamplingParams(temperature=1e-7, top_p=0.5, top_k=3, min_p=0.5, max_tokens=1))
    engine.add_request("b", prompt_of(2), SamplingParams(top_k=97, top_p=1e-60, max_tokens=1))
    engine.step()
    first, second = runner.plans[0].row_inits
    columns = dict(zip(COLUMNS, second.columns, strict=True))
    assert (first.temperature, first.columns) == (0, tuple(NEUTRAL_COLUMNS.values()))
    assert columns["top_k"] == 0
    assert np.float32(columns["top_p"]) > 0


def test_logprobs_hold_the_sampled_token_and_the_top():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(3), greedy(3, logprobs=2))
    engine.add_request("b", prompt_of(3), greedy(3, logprobs=0))
    engine.add_request("c", prompt_of(3), greedy(3))
    finals = run(engine)
    answer = finals["a"].outputs[0]
    assert [list(entries) for entries in answer.logprobs] == [[t, (t + 1) % 97] for t in answer.token_ids]
    assert [entries[t].rank for t, entries in zip(answer.token_ids, answer.logprobs, strict=True)] == [1, 1, 1]
    assert answer.cumulative_logprob == pytest.approx(-sum(answer.token_ids) / 10)
    assert [list(entries) for entries in finals["b"].outputs[0].logprobs] == [[t] for t in answer.token_ids]
    assert finals["c"].outputs[0].logprobs is finals["c"].outputs[0].cumulative_logprob is None


def test_streaming_gives_every_token_as_it_comes():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(3), greedy(4), stream=True)
    engine.add_request("b", prompt_of(3), greedy(4))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs if output.request_id == "a"] == [1, 2, 3, 4]
    assert [output.finished for output in outputs if output.request_id == "a"] == [False, False, False, True]
    assert len([output for output in outputs if output.request_id == "b"]) == 1


@pytest.mark.parametrize("call", ["dispatch", "collect"])
def test_a_failed_step_ends_its_requests_and_no_other(call: str):
    runner = FakeRunner(max_num_seqs=2, fail_at=frozenset({(call, 2)}))
    engine = Engine(runner)
    for name in "abcd":
        engine.add_request(name, prompt_of(6), greedy(6))
    failed = None
    finals = {}
    while engine.has_work:
        try:
            for output in engine.step():
                finals[output.request_id] = output
        except StepError as error:
            failed = error
            assert engine.stats().used_blocks == 0
        engine.check_integrity()
    assert failed.request_ids == ("a", "b")
    assert isinstance(failed, EngineError)
    assert set(finals) == {"c", "d"}
    for final in finals.values():
        assert final.outputs[0].token_ids == alone(prompt_of(6), 6, 97)
    assert finals["c"].num_cached_tokens == 0, "what was computed before a failure is not trusted"


class _BrokenText:
    """A text decoder whose detokenizers fail in one of their methods."""

    def __init__(self, call: str):
        self.call = call
        self.added = 0

    def new(self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool, after: list[int]) -> "_BrokenText":
        return self

    def begins(self, token_id: int) -> int:
        return 0

    def add(self, token_id: int) -> str:
        self.added += 1
        return self._fail("add") if self.added > 1 else "so far"

    def finish(self) -> str:
        return self._fail("finish")

    def _fail(self, call: str) -> str:
        if call == self.call:
            raise ValueError("no such text")
        return ""


@pytest.mark.parametrize("call", ["add", "finish"])
def test_text_that_cannot_be_decoded_ends_its_own_request_only(call: str, caplog: pytest.LogCaptureFixture):
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(5), greedy(4))
    engine._writer._decoder = _BrokenText(call)
    engine.add_request("b", prompt_of(7), greedy(4), stream=True)
    engine._writer._decoder = None
    engine.add_request("c", prompt_of(9), greedy(4))
    finals = run(engine)
    assert {name: output.outputs[0].finish_reason for name, output in finals.items()} == {
        "a": "length", "b": "error", "c": "length"
    }  # fmt: skip
    assert finals["b"].outputs[0].text == "so far"
    assert finals["c"].outputs[0].token_ids == alone(prompt_of(9), 4, 97)
    assert "request b ends" in caplog.text
    assert "no such text" in caplog.text


def test_starting_over_from_any_state():
    engine = Engine(FakeRunner(num_blocks=20))
    for start in range(6):
        engine.add_request(str(start), prompt_of(30, start), greedy(8))
    for _ in range(5):
        engine.step()
    before = engine.stats()
    engine.scheduler.running.pop()  # an interrupt in the middle of a call may leave this state
    engine.start_over()
    engine.check_integrity()
    after = engine.stats()
    assert not engine.has_work
    assert (after.num_waiting, after.used_blocks, after.finished_requests) == (0, 0, 6)
    assert (after.steps, after.peak_used_blocks) == (before.steps, before.peak_used_blocks)
    engine.add_request("0", prompt_of(30), greedy(8))
    assert run(engine)["0"].outputs[0].token_ids == alone(prompt_of(30), 8, 97)


def test_no_step_outlives_the_engine():
    """A step that ends while the interpreter shuts down aborts the process. So a dropped step is waited for."""
    for end in (Engine.close, Engine.start_over, lambda engine: engine._fail_running()):
        runner = FakeRunner()
        engine = Engine(runner)
        engine.add_request("a", prompt_of(5), greedy(8))
        engine.step()
        collected = []
        runner.collect = lambda handle, collected=collected: collected.append(handle.number)
        end(engine)
        assert collected == [0]


def test_numbers_above_0_stay_above_0_in_float32():
    """0 turns these filters off, so a smaller number than float32 has must not become 0."""
    runner = FakeRunner()
    engine = Engine(runner)
    engine.add_request("a", prompt_of(3), SamplingParams(top_n_sigma=1e-50, min_p=1e-50, top_p=1e-50, max_tokens=1))
    engine.step()
    columns = dict(zip(NEUTRAL_COLUMNS, runner.plans[0].row_inits[0].columns, strict=True))
    assert all(np.float32(columns[name]) > 0 for name in ("top_n_sigma", "min_p", "top_p"))
    run(engine)


def test_an_error_in_a_plan_leaves_the_counts_of_slots_right(monkeypatch):
    engine = Engine(FakeRunner())
    monkeypatch.setattr(plan_builder, "row_init", lambda *_: 1 / 0)
    engine.add_request("a", prompt_of(30), greedy(8))
    with pytest.raises(StepError):
        engine.step()
    monkeypatch.undo()
    engine.check_integrity()
    engine.add_request("b", prompt_of(5), greedy(8))
    assert run(engine)["b"].outputs[0].token_ids == alone(prompt_of(5), 8, 97)


def test_a_pool_smaller_than_one_request_is_refused():
    with pytest.raises(EngineError, match="max_model_len=64"):
        Engine(FakeRunner(num_blocks=15))


def test_ids_in_use_are_refused():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(3), greedy(4))
    with pytest.raises(RequestError, match="request_id"):
        engine.add_request("a", prompt_of(3), greedy(4))
    run(engine)
    engine.add_request("a", prompt_of(3), greedy(4))


def test_stats():
    engine = Engine(FakeRunner())
    engine.add_request("a", prompt_of(10), greedy(6))
    run(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.finished_requests, stats.steps) == (10, 6, 1, 6)
    # 10 .. 15 tokens in blocks of 4: 12, 12, 12, 16, 16, 16 slots
    assert stats.kv_waste == pytest.approx(np.mean([2 / 12, 1 / 12, 0, 3 / 16, 2 / 16, 1 / 16]))
    assert stats.peak_used_blocks == 4
    engine.reset_stats()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.peak_used_blocks, stats.kv_waste) == (0, 0, 0, 0)


@pytest.mark.parametrize("windows", [(None,), (6,)])
def test_kv_of_old_weights_is_never_found_again(windows: tuple[int | None, ...]):
    """Not even by the request that computed it. With a window, only its last blocks would have to be found."""
    runner = FakeRunner(windows=windows)
    engine = Engine(runner)
    engine.add_request("a", prompt_of(6), greedy(30))  # one and a half blocks
    engine.step()
    engine.note_new_weights()
    runner.weights += 1
    engine.add_request("b", prompt_of(6), greedy(30))
    for _ in range(20):
        engine.step()
    named = {name.tokens for name in engine.scheduler.manager.pool.states().names if name is not None}
    assert named, "what the new weights have computed is found"
    (a,) = (request for request in engine.scheduler.running if request.request_id == "a")
    held = {block for table in a.kv.block_tables for block in table.held}
    assert not any(engine.scheduler.manager.pool.name(block) for block in held)
    run(engine)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_beams_that_switch_their_rope_together_restart_though_each_is_a_long_prompt(rows: int):
    """A beam that was just preempted does not count as a running long prompt, which the others would wait for."""
    runner = FakeRunner(max_num_seqs=rows, max_num_batched_tokens=rows, longrope_switch_len=8, max_logprobs=6)
    engine = Engine(runner)
    engine.add_request("a", prompt_of(5), SamplingParams(use_beam_search=True, best_of=2, max_tokens=5))
    assert len(run(engine)["a"].outputs[0].token_ids) == 5


def test_a_prompt_beyond_the_rope_switch_shares_nothing_with_a_short_one():
    engine = Engine(FakeRunner(longrope_switch_len=16))
    for name, length in (("short", 12), ("long", 20), ("long again", 20)):
        engine.add_request(name, prompt_of(length), greedy(2))
        assert run(engine)[name].num_cached_tokens == (16 if name == "long again" else 0)


def limited(**limits: int) -> Engine:
    runner = FakeRunner(num_blocks=256, max_num_batched_tokens=64)
    return Engine(runner, options=EngineOptions(scheduling=SchedulingOptions(**limits)))


def arrive(engine: Engine, request_id: str, length: int, **params: Any) -> None:
    """Add a request as a server does."""
    request_group = engine.inputs.process(request_id, prompt_of(length), SamplingParams(max_tokens=8, seed=1, **params))
    engine.admission.check_capacity(request_group)
    engine.add(request_group)


def test_requests_that_start_in_the_next_step_do_not_count_as_waiting():
    engine = limited(max_queued_tokens=50)
    for i in range(4):
        arrive(engine, str(i), 20)
    arrive(engine, "x", 2)


def test_the_requests_of_one_group_count_as_one_in_the_queue():
    engine = limited(max_queued_requests=4)
    arrive(engine, "big", 8, n=16)
    engine.step()
    engine.step()
    for i in range(3):
        arrive(engine, str(i), 8)
    with pytest.raises(CapacityError, match="4 requests wait"):
        arrive(engine, "x", 8)


def test_after_a_start_over_no_request_waits():
    engine = limited(max_queued_requests=1)
    for i in range(6):
        engine.add_request(str(i), prompt_of(20, start=i), greedy(4))
    engine.step()
    engine.start_over()
    for i in range(4):
        arrive(engine, f"new {i}", 5)


def test_more_answers_than_fit_at_the_same_time_are_refused():
    engine = Engine(FakeRunner(num_blocks=20))
    with pytest.raises(RequestError, match=r"^n: 64 answers of 40 tokens.*, got 64"):
        engine.add_request("a", prompt_of(8), SamplingParams(n=64, max_tokens=40))
    # 4 rows: at most four answers run at the same time
    roomy = Engine(FakeRunner(num_blocks=48))
    roomy.add_request("a", prompt_of(8), SamplingParams(n=64, max_tokens=40, seed=1))
    with pytest.raises(RequestError, match=r"beam_width.*, got 64"):
        Engine(FakeRunner(num_blocks=48, max_logprobs=97)).add_request(
            "a", prompt_of(8), SamplingParams(use_beam_search=True, beam_width=64, max_tokens=40)
        )
