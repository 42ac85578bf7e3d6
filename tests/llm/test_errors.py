"""The messages of RequestError: long values are shortened, at little cost."""

import copy
import pickle

import numpy as np
import pytest

from jpaged.errors import RequestError


class Part:
    """Counts calls of its repr."""

    shown = 0

    def __repr__(self) -> str:
        Part.shown += 1
        return "part"


@pytest.mark.parametrize("value", [[Part()] * 10_000, (Part(),) * 10_000, {"ids": [[Part()] * 10_000]}])
def test_a_long_value_is_shortened_before_it_is_formatted(value: object):
    Part.shown = 0
    error = RequestError("prompt", value, "is too long")
    assert 0 < Part.shown < 100
    assert str(error).startswith("prompt is too long, got ")
    assert len(str(error)) < 250
    assert error.value is value


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), [10**5000], "x" * 10**6, np.arange(10**6), b"x" * 1000],
    ids=["integer", "negative", "list", "text", "array", "bytes"],
)
def test_values_of_any_size_have_a_short_message(value: object):
    assert len(str(RequestError("seed", value, "is too large"))) < 250


@pytest.mark.parametrize("value", [5, -(2**63), 1.5, "a" * 150, "it's", None, True, [1, 2, 3], {"a": [1]}, b"x"])
def test_a_short_value_is_shown_whole(value: object):
    assert str(RequestError("n", value, "must be x")) == f"n must be x, got {value!r}"


def test_an_error_can_be_copied_and_pickled():
    error = RequestError("n", 3, "must be 1")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301 (our own bytes)
        assert (other.parameter, other.value, other.accepted, str(other)) == ("n", 3, "must be 1", str(error))


def test_the_parameter_comes_first_and_names_are_cut():
    error = RequestError("temperature", -1.0, "must be a finite number of at least 0")
    assert str(error) == "temperature must be a finite number of at least 0, got -1.0"
    assert error.without_value == "temperature must be a finite number of at least 0"
    assert str(RequestError("model", None, "name a model")) == "model: name a model"
    assert str(RequestError("n", 3, "unknown field")) == "n: unknown field, got 3"
    assert str(RequestError("prompt", "x" * 10**6, "is long: cut it")).startswith("prompt is long: cut it, got '")
    assert len(str(RequestError("a" * 10**6, 1, "unknown field"))) < 250
