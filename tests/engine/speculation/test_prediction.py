"""Drafts from a predicted answer: where it is followed, left, and found again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.prediction import BACKWARD, PredictionDrafter, _nearest
from tests.engine.speculation.requests import request_of

PREDICTION = list(range(100, 400))


def following(answer: list[int], prediction: list[int] = PREDICTION, count: int = 4) -> list[int]:
    """Return the draft after an answer that arrives token by token."""
    drafter, request = PredictionDrafter(), request_of([1, 2, 100, 101])
    drafter.note_prediction(request, prediction)
    draft = drafter.propose(request, count)
    for token in answer:
        request.token_ids.append(token)
        draft = drafter.propose(request, count)
    return list(draft)


def test_the_prediction_is_followed_from_its_first_token():
    assert following([]) == [100, 101, 102, 103]
    assert following(PREDICTION[:50]) == PREDICTION[50:54]
    assert following(PREDICTION[:298]) == PREDICTION[298:]
    assert following(PREDICTION) == []
    assert following([*PREDICTION, 5, 6, 7]) == []


def test_it_finds_its_place_after_other_missing_and_added_tokens():
    start, rest = PREDICTION[:20], PREDICTION[20:]
    assert following([*start, 7]) == []
    assert following([*start, 7, rest[1]]) == []
    assert following([*start, 7, *rest[1:3]]) == rest[3:7]                 # one token differs
    assert following([*start, *[7] * 30, *rest[:2]]) == rest[2:6]          # tokens were added
    assert following([*start, *rest[10:12]]) == rest[12:16]                # tokens are missing
    assert following([*start, *rest[100:102]]) == []                       # many are: two equal tokens may be chance
    assert following([*start, *rest[100:104]]) == rest[104:108]
    assert following([7, 8, *PREDICTION[:2]]) == PREDICTION[2:6]


def test_the_nearest_place_is_taken_rather_forward_than_back():
    prediction = [1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 70, 80, 1, 2, 3, 4, 90]
    assert following([*prediction[:10], 99, 1, 2, 3, 4], prediction, 1) == [90]
    assert following([9, 1, 2, 3, 4], prediction, 1) == [50]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1).map(sorted), st.integers(-5, 55))
def test_nearest(places, place):
    found = _nearest(places, place)
    assert found in places
    distances = [each - place if each >= place else BACKWARD * (place - each) for each in places]
    assert distances[places.index(found)] == min(distances)


@settings(max_examples=100, deadline=None)
@given(prediction=st.lists(st.integers(0, 3), max_size=40), answer=st.lists(st.integers(0, 3), max_size=40),
       pieces=st.integers(1, 5))  # fmt: skip
def test_drafts_are_a_part_of_the_prediction_and_do_not_depend_on_when_it_is_read(prediction, answer, pieces):
    drafter, request = PredictionDrafter(), request_of([2])
    drafter.note_prediction(request, prediction)
    for first in range(0, len(answer), pieces):
        request.token_ids += answer[first : first + pieces]
        draft = list(drafter.propose(request, 3))
        assert draft == following(request.token_ids[1:], prediction, 3)
        assert any(prediction[i : i + len(draft)] == draft for i in range(len(prediction) + 1))


def test_predictions_belong_to_their_request_and_end_with_it():
    drafter, one, two = PredictionDrafter(), request_of([1]), request_of([1])
    assert isinstance(drafter, Drafter)
    drafter.note_prediction(one, [5, 6, 7])
    drafter.note_prediction(two, [])
    assert (drafter.propose(one, 2), drafter.propose(two, 2)) == ([5, 6], ())
    one.token_ids += [5]
    assert drafter.propose(one, 2) == [6, 7]
    drafter.forget()
    assert drafter.propose(one, 2) == [6, 7]
    drafter.note_end(one)
    drafter.note_end(two)
    assert drafter.propose(one, 2) == ()
