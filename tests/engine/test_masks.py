"""Masks that depend on tokens in flight: computed one step late, for the right rows. Also failures of masks."""

import pytest

from jpaged import SamplingParams
from jpaged.engine.engine import Engine, StepError
from jpaged.engine.sampling_extras import SamplingExtras
from tests.engine.fake_runner import FakeRunner, next_token

VOCAB = 97
# No id may be followed by one of the next forty ids: a mask that changes with every token, and never is empty.
BAD = [[token, (token + step) % VOCAB] for token in range(VOCAB) for step in range(1, 41)]
BAD_PAIRS = {tuple(pair) for pair in BAD}


def add(engine, request_id, prompt, **fields):
    """Add a request whose output may contain no pair of BAD."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields)
    request_group = engine.inputs.process(request_id, {"prompt_token_ids": prompt}, params)
    extras = SamplingExtras(params, VOCAB, bad_words=BAD)
    for request in request_group.requests:
        request.extras = extras
        request.__post_init__()
    engine.add(request_group)


def wanted(prompt, count=12):
    tokens = list(prompt)
    for number in range(count):
        token = next_token(tokens, VOCAB)
        while number and (tokens[-1], token) in BAD_PAIRS:
            token = (token + 1) % VOCAB
        tokens.append(token)
    return tokens[len(prompt) :]


PROMPTS = {"a": [3, 10, 17], "b": [5], "c": [60, 61, 62, 63, 64, 65], "d": [90, 4], "e": [11] * 9}


def run(engine):
    done = {}
    while engine.has_work:
        for output in engine.step():
            done[output.request_id] = output.outputs[0]
        engine.check_integrity()
    return done


def test_each_row_has_the_mask_of_its_own_tokens():
    engine = Engine(FakeRunner(vocab_size=VOCAB, num_blocks=128))
    for name, prompt in PROMPTS.items():
        add(engine, name, prompt)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request("plain", {"prompt_token_ids": PROMPTS["a"]}, plain)
    done = run(engine)
    for name, prompt in PROMPTS.items():
        assert done[name].token_ids == wanted(prompt)
    assert done["plain"].token_ids != wanted(PROMPTS["a"])


def test_preempted_requests_continue_with_their_masks():
    engine = Engine(FakeRunner(vocab_size=VOCAB, num_blocks=9, max_model_len=32))
    for name, prompt in PROMPTS.items():
        add(engine, name, prompt)
    done = run(engine)
    assert engine.stats().preemptions > 0
    assert {name: done[name].token_ids for name in PROMPTS} == {n: wanted(prompt) for n, prompt in PROMPTS.items()}


@pytest.mark.parametrize("failing", range(1, 14))
def test_outputs_are_returned_before_a_failure_is_raised(failing):
    """Sampling fails in the call that finds a short request's end. It returns the output, the next call raises."""
    engine = Engine(FakeRunner(vocab_size=VOCAB, num_blocks=128, fail_at=frozenset({("sample", failing)})))
    add(engine, "long", PROMPTS["a"])
    for count in range(1, 12):
        add(engine, str(count), PROMPTS["b"], max_tokens=count)
    ended, failed = {}, []
    while engine.has_work:
        try:
            ended |= {output.request_id: output.outputs[0] for output in engine.step()}
        except StepError as error:
            failed += error.request_ids
        engine.check_integrity()
    assert not set(ended) & set(failed)
    assert {*ended, *failed} == {"long", *map(str, range(1, 12))}
    assert failed or engine.stats().steps <= failing
    for name, output in ended.items():
        prompt, count = (PROMPTS["a"], 12) if name == "long" else (PROMPTS["b"], int(name))
        assert output.token_ids == wanted(prompt, count)
    assert engine.stats().used_blocks == 0
