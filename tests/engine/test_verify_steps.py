"""Verify steps of the engine on the fake device: answers never depend on drafts. Each test is a corner of the host."""

import dataclasses
import random
from concurrent.futures import Future

import numpy as np
import pytest

from jpaged.engine.engine import Engine, EngineOptions, StepError
from jpaged.engine.sampling_extras import SamplingExtras
from tests.engine.drafting import DraftingEngine, Oracle, RandomSpeculation
from tests.engine.fake_runner import FakeRunner, alone
from tests.engine.greedy_requests import greedy, run
from tests.engine.speculating_machine import VOCAB_SIZE, Grammar, Masks

PROMPTS = {"a": [3, 10, 17], "b": [5], "c": [9, 2, 30, 1, 4, 4, 8, 11, 0]}


def speculating(runner, truth, *, right=1.0, jump_forward=False) -> Engine:
    """An engine whose rows always have as many drafts as fit. truth: prompt -> its answer, and some tokens after it."""

    def continuation(request, count):
        known = request.num_output_tokens
        return truth(request.prompt_token_ids)[known : known + count]

    rng = random.Random(1)
    speculation = RandomSpeculation(
        Oracle(continuation, [right], VOCAB_SIZE, rng), runner.max_drafts, rng, always=True
    )
    return DraftingEngine(runner, speculation, EngineOptions(jump_forward=jump_forward))


def fake(*, max_drafts=3, verify=16, **fields) -> FakeRunner:
    return FakeRunner(vocab_size=VOCAB_SIZE, max_drafts=max_drafts, verify_sizes=(verify,), **fields)


def natural(prompt, count=60, windows=(None,)):
    return alone(prompt, count, VOCAB_SIZE, windows=windows)


def ruled(prompt, masks, count=60):
    """The answer to a prompt with masks."""
    tokens = list(prompt)
    for number in range(count):
        tokens.append(masks.next(tokens, number, natural(tokens, 1)[0]))
    return tokens[len(prompt) :]


def add(engine, request_id, prompt, params, *, follows=None, bad_words=(), ends=(), grammar=None):
    """Add a request with masks. follows: parameters that its masks read."""
    request_group = engine.inputs.process(request_id, {"prompt_token_ids": prompt}, params)
    for request in request_group.requests:
        request.extras = SamplingExtras(follows or params, VOCAB_SIZE, end_token_ids=ends, bad_words=bad_words)
        request.__post_init__()
    if grammar is not None:
        future: Future = Future()
        future.set_result(grammar)
        request_group = dataclasses.replace(request_group, grammar=future)
    engine.add(request_group)


@pytest.mark.parametrize("windows", [(None,), (3,), (9, None)])
@pytest.mark.parametrize("right", [1.0, 0.5, 0.0])
def test_answers_and_steps(right, windows):
    """Perfect drafts divide the steps by 1 + 3; wrong ones cost none, except to wait for the last token."""
    steps = {}
    for max_drafts in (0, 3):
        truth = lambda prompt: natural(prompt, windows=windows)  # noqa: E731
        runner = fake(max_drafts=max_drafts, windows=windows, num_blocks=96)
        engine = speculating(runner, truth, right=right) if max_drafts else Engine(runner)
        for name, prompt in PROMPTS.items():
            engine.add_request(name, {"prompt_token_ids": prompt}, greedy(33))
        finals = run(engine)
        for name, prompt in PROMPTS.items():
            assert finals[name].outputs[0].token_ids == natural(prompt, 33, windows)
        steps[max_drafts] = engine.stats().steps
    if right == 1.0:
        assert steps[3] <= steps[0] / 4 + 3
    else:
        assert steps[3] <= steps[0] + 3


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("stop", range(6))
def test_an_answer_ends_in_the_middle_of_accepted_drafts(max_tokens, stop):
    prompt = [3, 10, 17]
    answer = natural(prompt)
    first = answer.index(answer[stop])
    engine = speculating(fake(), natural)
    params = greedy(max_tokens, stop_token_ids=[answer[stop]], logprobs=2)
    engine.add_request("a", {"prompt_token_ids": prompt}, params)
    (answered,) = run(engine)["a"].outputs
    ends = min(first + 1, max_tokens)
    assert answered.token_ids == answer[:ends]
    assert answered.finish_reason == ("stop" if first < max_tokens else "length")
    assert [next(iter(entries)) for entries in answered.logprobs] == answer[:ends]


def test_end_tokens_are_allowed_from_min_tokens_on():
    """A verify step has masks of tokens. One row has no drafts, and its mask must not go to another row's token."""
    engine = speculating(fake(), lambda prompt: [] if prompt == [5] else natural(prompt))
    engine.add_request("drafted", {"prompt_token_ids": [3, 10, 17]}, greedy(20))
    ends = [token for token in range(VOCAB_SIZE) if token % 4]  # three of four tokens end the answer
    masks = Masks(min_tokens=4, ends=frozenset(ends))
    params = greedy(20, stop_token_ids=ends)
    add(engine, "plain", [5], params, follows=greedy(20, min_tokens=4), ends=ends)
    finals = run(engine)
    wanted = ruled([5], masks)
    count = next(number for number, token in enumerate(wanted, 1) if token in ends)
    assert count > 4
    assert finals["plain"].outputs[0].token_ids == wanted[:count]
    assert finals["drafted"].outputs[0].token_ids == natural([3, 10, 17], 20)


def test_a_mask_of_drafts_reads_as_many_tokens_as_are_known():
    """The longest bad word is longer than the sequence."""
    tokens = natural([5], 4)
    bad = [tokens[1:], [9] * 6]  # the fourth token is forbidden after the second and third
    engine = speculating(fake(max_drafts=1), natural)
    add(engine, "a", [5], greedy(9), bad_words=bad)
    assert run(engine)["a"].outputs[0].token_ids[:4] == [*tokens[:3], (tokens[3] + 1) % VOCAB_SIZE]


def test_a_decode_that_waited_a_turn_gets_its_mask():
    """Its drafts may have been its last tokens, so it waits for them. Then nothing of it is in flight."""
    bad = [[token, (token + step) % VOCAB_SIZE] for token in range(VOCAB_SIZE) for step in range(1, 9)]
    masks = Masks(bad=True)
    for first in range(20):
        engine = speculating(fake(), lambda prompt: ruled(prompt, masks), right=0.0)
        add(engine, "a", [first], greedy(3), bad_words=bad)
        assert run(engine)["a"].outputs[0].token_ids == ruled([first], masks, 3)


def test_a_jump_drops_drafts_in_flight():
    """Forced tokens take the places of drafts in flight. A later request must not find the drafts under their name."""
    prompt, answer = [3, 10, 17], natural([3, 10, 17])
    forced = {1: answer[1], 2: (answer[2] + 1) % VOCAB_SIZE, 3: 4, 4: 5, 5: 6}
    masks = Masks(forced=forced)
    wanted = ruled(prompt, masks)
    for max_tokens in (4, 5, 6, 12):
        engine = speculating(fake(block_size=1), lambda prompt: answer, jump_forward=True)
        follows = greedy(max_tokens, structured_outputs={"json_object": True})
        engine._drafts._guesses = lambda request, source, count: answer[request.num_output_tokens :][:count]
        add(engine, "a", prompt, greedy(max_tokens), follows=follows, grammar=Grammar(forced))
        assert run(engine)["a"].outputs[0].token_ids == wanted[:max_tokens]
        again = [*prompt, *wanted[:max_tokens], 1]
        engine.add_request("b", {"prompt_token_ids": again}, greedy(5))
        assert run(engine)["b"].outputs[0].token_ids == natural(again, 5)
        pool = engine.scheduler.manager.pool
        for block, name in enumerate(pool.states().names):
            if name is not None:
                assert engine.runner.pages[block].tolist() == np.frombuffer(name.tokens, np.int32).tolist()


def test_drafts_that_are_rejected_do_not_switch_the_rope():
    """A sequence is preempted once, when it really outgrows the short rope."""
    engine = speculating(fake(longrope_switch_len=16), natural, right=0.0)
    prompt = [3, 10, 17, 1] * 3
    engine.add_request("a", {"prompt_token_ids": prompt}, greedy(30))
    assert run(engine)["a"].outputs[0].token_ids == natural(prompt, 30)
    assert engine.stats().preemptions == 1


@dataclasses.dataclass
class DeadEnd(Grammar):
    """A grammar that allows nothing after three tokens."""

    def matcher(self):
        return DeadEnd(self.forced)

    def mask_into(self, words):
        super().mask_into(words)
        if self.taken >= 3:
            words[:] = 0


@pytest.mark.parametrize("right", [1.0, 0.0])
def test_a_grammar_without_a_next_token_ends_only_its_request(right):
    """With drafts the device finds it, without the host."""
    engine = speculating(fake(), natural, right=right)
    add(engine, "stuck", [5], greedy(9), follows=greedy(9, structured_outputs={"json_object": True}),
        grammar=DeadEnd({}))  # fmt: skip
    engine.add_request("other", {"prompt_token_ids": [3, 10, 17]}, greedy(20))
    finals = run(engine)
    assert finals["other"].outputs[0].token_ids == natural([3, 10, 17], 20)
    (stuck,) = finals["stuck"].outputs
    assert stuck.token_ids == natural([5], 3)
    assert stuck.finish_reason == "error"
    assert "forbid" in stuck.stop_reason


@pytest.mark.parametrize("moment", range(1, 12))
def test_new_weights_sleep_and_abort_while_drafts_are_in_flight(moment):
    engine = speculating(fake(num_blocks=40), natural, right=0.7)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, greedy(30))
    finals = {}
    for _ in range(moment):
        finals |= {output.request_id: output for output in engine.step()}
    engine.note_new_weights()
    engine.runner.weights += 1
    engine.abort(["b"])
    engine.check_integrity()
    finals |= {output.request_id: output for output in engine.step()}
    finals |= {output.request_id: output for output in engine.flush()}
    engine.check_integrity()
    engine.sleep()
    engine.wake_up()
    finals |= run(engine)
    for name in ("a", "c"):
        assert finals[name].outputs[0].token_ids == natural(PROMPTS[name], 30)


@pytest.mark.parametrize("call", ["dispatch", "sample", "collect"])
@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_a_verify_step_that_fails_ends_its_requests_only(call, number):
    masks = Masks(bad=True)
    bad = [[token, (token + step) % VOCAB_SIZE] for token in range(VOCAB_SIZE) for step in range(1, 9)]
    engine = speculating(fake(fail_at=frozenset({(call, number)})), lambda prompt: ruled(prompt, masks))
    add(engine, "a", [5], greedy(30), bad_words=bad)
    with pytest.raises(StepError) as failure:
        run(engine)
    assert failure.value.request_ids == ("a",)
    assert engine.runner.plans[number].drafts is not None
    engine.check_integrity()
    assert engine.stats().used_blocks == 0
    add(engine, "b", [5], greedy(30), bad_words=bad)
    assert run(engine)["b"].outputs[0].token_ids == ruled([5], masks, 30)


def test_a_pool_without_room_for_drafts():
    """Two requests fill the pool. Drafts take what is left, and are fewer than proposed."""
    engine = speculating(fake(num_blocks=10, block_size=2, max_model_len=16), natural, right=0.8)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, {"prompt_token_ids": prompt[:4]}, greedy(12))
    finals = run(engine)
    for name, prompt in PROMPTS.items():
        assert finals[name].outputs[0].token_ids == natural(prompt[:4], 12)
    assert any(plan.drafts is not None for plan in engine.runner.plans)
    assert engine.stats().preemptions > 0
