"""Drafts from a user's function: valid ones are used, all others give one warning and no draft."""

import logging

import numpy as np
import pytest

from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.function import FunctionDrafter
from tests.engine.speculation.requests import request_of


def failing(token_ids: list[int], count: int) -> list[int]:
    raise ZeroDivisionError("a\nb")


def test_valid_drafts_are_returned_as_integers():
    drafter = FunctionDrafter(lambda token_ids, count: np.array(token_ids[:count], np.int64), 10)
    assert isinstance(drafter, Drafter)
    assert drafter.propose(request_of([3, 0, 9]), 2) == [3, 0]
    assert all(type(each) is int for each in drafter.propose(request_of([3, 0, 9]), 2))
    assert FunctionDrafter(lambda *_: (), 10).propose(request_of([3]), 2) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (failing, "failing raised ZeroDivisionError: a;"),
        (lambda *_: None, "must return a list of token ids, got None"),
        (lambda *_: [1.0], "must return a list of token ids, got [1.0]"),
        (lambda *_: "ab", "must return a list of token ids, got 'ab'"),
        (lambda *_: [1, 2, 3], "must return at most 2 token ids, got 3"),
        (lambda *_: [1, 10], "must return token ids from 0 to 9, got 10"),
        (lambda *_: [-1], "must return token ids from 0 to 9, got -1"),
        (lambda one: [1], "raised TypeError"),
    ],
)
def test_invalid_drafts_give_one_warning_and_no_draft(function, message, caplog):
    drafter, request = FunctionDrafter(function, 10), request_of([1, 2])
    with caplog.at_level(logging.WARNING):
        assert [drafter.propose(request, 2) for _ in range(3)] == [()] * 3
    (record,) = caplog.records
    assert message in record.getMessage()


def test_each_kind_of_problem_is_logged(caplog):
    answers = iter([[99], None, [98], [1, 1, 1]])
    drafter = FunctionDrafter(lambda *_: next(answers), 10)
    for _ in range(4):
        assert drafter.propose(request_of([1]), 2) == ()
    assert len(caplog.records) == 3


def test_the_function_cannot_change_the_request():
    request = request_of([1, 2])
    FunctionDrafter(lambda token_ids, count: token_ids.clear() or [], 10).propose(request, 1)
    assert request.token_ids == [1, 2]
