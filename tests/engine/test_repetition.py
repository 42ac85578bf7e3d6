"""Repetition detection: compared with its definition at every token, and on the engine with preemption."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import RequestError, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.engine.output.repetition import RepetitionWatch
from jpaged.params.sampling import RepetitionDetectionParams
from tests.engine.fake_runner import FakeRunner, next_token


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition: the last tokens are one pattern, `min_count` times."""
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        end = tokens[-size * params.min_count :]
        if len(end) == size * params.min_count and end == end[:size] * params.min_count:
            return True
    return False


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    pattern=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    count=st.integers(0, 6),
    sizes=st.tuples(st.integers(0, 7), st.integers(1, 7)).map(sorted),
    min_count=st.integers(2, 5),
)
def test_every_token_against_the_definition(tokens, pattern, count, sizes, min_count):
    params = RepetitionDetectionParams(max_pattern_size=sizes[1], min_pattern_size=sizes[0], min_count=min_count)
    watch = RepetitionWatch(params)
    said = tokens + pattern * count
    for length, token_id in enumerate(said, 1):
        assert watch.append(token_id) == repeats(said[:length], params), said[:length]


def run(engine: Engine, **requests: SamplingParams):
    for name, params in requests.items():
        engine.add_request(name, [3, 10, 17], params)
    done = {}
    while engine.has_work:
        done |= {output.request_id: output.outputs for output in engine.step()}
        engine.check_integrity()
    return done


def allowed_alone(count: int, **fields: Any) -> SamplingParams:
    """Return the parameters of a request that may sample only one token id."""
    repetition = {"max_pattern_size": 3, "min_count": count}
    given = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "allowed_token_ids": [5]} | fields
    return SamplingParams(repetition_detection=repetition, **given)


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_a_repetitive_answer_ends_with_its_reason(num_blocks):
    engine = Engine(FakeRunner(num_blocks=num_blocks, max_model_len=32))
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    done = run(
        engine,
        three=allowed_alone(3),
        several=allowed_alone(4, n=2),
        later=allowed_alone(3, min_tokens=9, ignore_eos=False),
        full=allowed_alone(20),
        stopped=allowed_alone(4, stop_token_ids=[5]),
        free=free,
    )
    ends = {
        name: [(len(answer.token_ids), answer.finish_reason, answer.stop_reason) for answer in answers]
        for name, answers in done.items()
    }
    reason = "repetition", "repetition_detected"
    assert ends == {
        "three": [(3, *reason)],
        "several": [(4, *reason)] * 2,
        "later": [(9, *reason)],
        "full": [(20, "length", None)],
        "stopped": [(1, "stop", 5)],
        "free": [(20, "length", None)],
    }
    tokens = [3, 10, 17]
    for _ in range(20):
        tokens.append(next_token(tokens, 97))
    assert done["free"][0].token_ids == tokens[3:]


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"max_pattern_size": 3}, "repetition_detection.min_count"),
        ({"max_pattern_size": 3, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": -1, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 10**6, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "repetition_detection.min_pattern_size"),
        ({"max_pattern_size": 2.0, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"min_count": 2}, "repetition_detection.min_count"),
        ({"max_patern_size": 3}, "repetition_detection.max_patern_size"),
        (7, "repetition_detection"),
    ],
)
def test_invalid_values_raise(fields, parameter):
    with pytest.raises(RequestError) as caught:
        SamplingParams(repetition_detection=fields)
    assert caught.value.parameter == parameter


def test_the_default_switches_detection_off():
    assert SamplingParams(repetition_detection=RepetitionDetectionParams()) == SamplingParams()
