"""Random answers under a grammar match it when they are finished. Jump-forward does not change them."""

import re
import warnings

import pytest

from tests.structured import corpus
from tests.structured.grammar_model import Model

SCHEMAS = corpus.schemas()


def check_schema(model: Model, name: str, seeds: range) -> int:
    """Return the number of finished answers. Each of them must match the schema."""
    finished = 0
    for seed in seeds:
        answer = model.write(model.matcher(json=SCHEMAS[name]), seed)
        stepwise = model.write(model.matcher(json=SCHEMAS[name]), seed, jump=False)
        assert stepwise.token_ids == answer.token_ids
        assert stepwise.finished == answer.finished
        assert not stepwise.forced
        if answer.finished:
            finished += 1
            text = model.decode(answer.token_ids)
            try:
                corpus.check_json(SCHEMAS[name], text)
            except Exception as error:
                raise AssertionError(f"{name}: {text!r}: {error}") from error
    return finished


def check_regex(model: Model, regex: str, seeds: range) -> int:
    """Return the number of finished answers. Each of them must match the expression."""
    finished = 0
    for seed in seeds:
        answer = model.write(model.matcher(regex=regex), seed)
        assert model.write(model.matcher(regex=regex), seed, jump=False).token_ids == answer.token_ids
        if answer.finished:
            finished += 1
            text = model.decode(answer.token_ids)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about "[[", a future nested set
                whole = re.fullmatch(regex, text) or (model.drops_leading_blank and re.fullmatch(regex, f" {text}"))
            assert whole, text
    return finished


def test_the_corpus_has_200_schemas_and_50_expressions():
    assert len(SCHEMAS) == 200
    assert len(set(map(str, SCHEMAS.values()))) == 200
    assert len(set(corpus.REGEXES)) == 50


def test_some_schemas(any_model: Model):
    finished = sum(check_schema(any_model, name, range(2)) for name in corpus.SHORT)
    assert finished >= 0.9 * 2 * len(corpus.SHORT)


def test_some_regexes(any_model: Model):
    finished = sum(check_regex(any_model, regex, range(1)) for regex in corpus.REGEXES[::5])
    assert finished == len(corpus.REGEXES[::5])


@pytest.mark.slow
def test_all_schemas(any_model: Model):
    finished = sum(check_schema(any_model, name, range(3)) for name in SCHEMAS)
    assert finished >= 0.9 * 3 * len(SCHEMAS)


@pytest.mark.slow
def test_all_regexes(any_model: Model):
    finished = sum(check_regex(any_model, regex, range(5)) for regex in corpus.REGEXES)
    assert finished >= 0.9 * 5 * len(corpus.REGEXES)
