"""Beam search: compared with recorded answers of Transformers and with exhaustive search; and invariants."""

import dataclasses
import gc
import itertools
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jpaged.engine.strategies.beam_search import BeamSearch, BeamStep, Hypothesis
from jpaged.errors import EngineError, RequestError
from tests.golden.beams import TABLE_PROMPT, TableCase, cases, table, table_cases

END = 2


class Follower:
    """Drives a search with a table. Follows the sequence of every live beam by its parents, as an engine does."""

    def __init__(self, table: np.ndarray, search: BeamSearch, last: tuple[int, ...] = TABLE_PROMPT):
        self.table = table
        self.search = search
        self.beams = [last]
        self.steps: list[list[BeamStep]] = []

    def step(self) -> None:
        """One step of the engine."""
        rows = np.stack([self.table[beam[-2:]] for beam in self.beams])
        order = np.argsort(-rows, axis=-1, kind="stable")[:, : self.search.num_candidates]
        steps = self.search.advance(order.astype(np.int32), np.take_along_axis(rows, order, -1))
        self.steps.append(steps)
        self.beams = [(*self.beams[step.parent], step.token_id) for step in steps]

    def run(self) -> BeamSearch:
        """Run the search to its end."""
        while not self.search.is_over:
            self.step()
        return self.search


def options_of(params: Any) -> dict[str, Any]:
    options = dataclasses.asdict(params)
    del options["num_return_sequences"]
    return options | {"end_token_ids": frozenset(params.end_token_ids)}


@pytest.mark.parametrize("case", table_cases(), ids=lambda c: str(c.seed))
def test_answers_of_transformers_bit_for_bit(case: TableCase):
    search = Follower(table(case.seed), BeamSearch(**options_of(case.params))).run()
    best = search.best(case.params.num_return_sequences)
    assert len(best) == len(case.answers)
    for hypothesis, answer in zip(best, case.answers, strict=True):
        assert hypothesis.token_ids == tuple(answer.token_ids)
        assert hypothesis.beam_indices == tuple(answer.beam_indices)
        assert np.float32(hypothesis.score) == np.float32(answer.score)
        assert hypothesis.cumulative_logprob == pytest.approx(answer.cumulative_logprob, abs=1e-4)


def test_the_recorded_tables_cover_all_options():
    """All values of all options, and searches that end early."""
    all_cases = table_cases()
    for name, values in {
        "width": (2, 3, 4, 10), "length_penalty": (-0.5, 0.0, 0.6, 1.0, 2.0), "early_stopping": (False, True, "never"),
    }.items():  # fmt: skip
        assert {getattr(case.params, name) for case in all_cases} == set(values)
    ended_early = [
        case for case in all_cases
        if all(answer.token_ids[-1] in case.params.end_token_ids for answer in case.answers)
        and max(len(answer.token_ids) for answer in case.answers) < case.params.max_new_tokens - 1
    ]  # fmt: skip
    assert len(ended_early) > 20
    assert {case.params.early_stopping for case in ended_early} == {False, True, "never"}


def test_the_recorded_models_cover_all_kinds_of_searches():
    """The answers for tests/end_to_end/test_beams.py: all kinds of searches, with answers of all ends."""
    found = cases()
    assert len({case.variant for case in found}) >= 6
    assert {len(case.prompt) for case in found} == {1, 15, 16, 17, 40}
    assert {case.params.width for case in found} == {2, 4, 10}
    kinds = {(case.params.length_penalty, case.params.early_stopping) for case in found}
    assert len(kinds) == 12
    lengths = {len(answer.token_ids) for case in found for answer in case.answers}
    assert min(lengths) < 6
    assert max(lengths) == 40
    for case in found:
        assert len(case.answers) == case.params.num_return_sequences
        assert case.params.end_token_ids


def tables_of(vocab: int) -> st.SearchStrategy[np.ndarray]:
    """Log-probabilities by [token before the last, last, next]. Few different values, so that ties happen."""
    value = st.integers(0, 40).map(lambda k: -k / 8)
    return st.lists(value, min_size=vocab**3, max_size=vocab**3).map(
        lambda values: np.array(values, np.float32).reshape(vocab, vocab, vocab)
    )


def all_hypotheses(table: np.ndarray, length: int, penalty: float) -> dict[tuple[int, ...], float]:
    """Every sequence that ends at END or has `length` tokens, and its score, in float64."""
    found = {}
    for size in range(1, length + 1):
        for tokens in itertools.product(range(len(table)), repeat=size):
            if END in tokens[:-1] or (tokens[-1] != END and size < length):
                continue
            context = (0, 1, *tokens)
            total = math.fsum(float(table[context[i : i + 3]]) for i in range(size))
            found[tokens] = total / size**penalty
    return found


EARLY = st.sampled_from([False, True, "never"])
PENALTY = st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0])


@given(tables_of(3), st.integers(1, 4), PENALTY, EARLY)
def test_a_search_wide_enough_finds_everything_there_is(table, length, penalty, early):
    expected = all_hypotheses(table, length, penalty)
    search = BeamSearch(
        width=len(expected) + 1, max_new_tokens=length, end_token_ids=frozenset({END}), length_penalty=penalty,
        early_stopping=early,
    )  # fmt: skip
    best = Follower(table, search, (0, 1)).run().best(len(expected) + 1)
    assert {h.token_ids: pytest.approx(h.score, rel=1e-5, abs=1e-5) for h in best} == expected
    assert max(expected.values()) == pytest.approx(best[0].score, rel=1e-5, abs=1e-5)
    check(best, penalty)


@given(
    tables_of(4), st.integers(1, 6), st.integers(1, 12), PENALTY, EARLY, st.frozensets(st.integers(0, 3), max_size=2)
)  # fmt: skip
def test_invariants_of_any_search(table, width, length, penalty, early, end_token_ids):
    search = BeamSearch(
        width=width, max_new_tokens=length, end_token_ids=end_token_ids, length_penalty=penalty, early_stopping=early
    )
    follower = Follower(table, search, (0, 1))
    assert search.best(width) == []
    while not search.is_over:
        num_before = len(follower.beams)
        follower.step()
        steps = follower.steps[-1]
        assert all(0 <= step.parent < num_before for step in steps)
        assert len(steps) <= width
        assert len(set(follower.beams)) == len(steps)
        assert not any(step.token_id in end_token_ids for step in steps)
        assert (not steps) == search.is_over
        so_far = search.best(2 * width)
        check(so_far, penalty)
        if steps:  # live beams count, at their present length
            live = {h.token_ids for h in so_far if h.finish_reason is None}
            assert live == {beam[2:] for beam in follower.beams}
    assert len(follower.steps) <= length
    best = search.best(width)
    assert 1 <= len(best) <= width
    assert [h.token_ids for h in search.best(1)] == [best[0].token_ids]
    for h in best:
        context = (0, 1, *h.token_ids)
        assert h.logprobs == tuple(float(table[context[i : i + 3]]) for i in range(len(h.token_ids)))
        assert not any(token in end_token_ids for token in h.token_ids[:-1])
        assert h.finish_reason == ("stop" if h.token_ids[-1] in end_token_ids else "length")
        assert h.finish_reason == "stop" or len(h.token_ids) == length
        for i, step in enumerate(follower.steps[: len(h.token_ids) - 1]):  # the beams that became this hypothesis
            assert step[h.beam_indices[i + 1]] == BeamStep(h.beam_indices[i], h.token_ids[i], h.logprobs[i])
    with pytest.raises(EngineError):
        search.advance(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))


def check(best: list[Hypothesis], penalty: float) -> None:
    assert [h.score for h in best] == sorted((h.score for h in best), reverse=True)
    assert len({h.token_ids for h in best}) == len(best)
    for h in best:
        assert len(h.token_ids) == len(h.logprobs) == len(h.beam_indices)
        assert h.cumulative_logprob == pytest.approx(math.fsum(h.logprobs), rel=1e-5)
        assert h.score == pytest.approx(h.cumulative_logprob / len(h.token_ids) ** penalty, rel=1e-5)


@given(tables_of(4), st.integers(1, 12), PENALTY, st.sampled_from([False, True]))
def test_width_one_is_greedy(table, length, penalty, early):
    search = BeamSearch(
        width=1, max_new_tokens=length, end_token_ids=frozenset({END}), length_penalty=penalty, early_stopping=early
    )
    (best,) = Follower(table, search, (0, 1)).run().best(1)
    tokens = [0, 1]
    while len(tokens) < length + 2 and END not in tokens[2:]:
        tokens.append(int(table[tokens[-2], tokens[-1]].argmax()))
    assert list(best.token_ids) == tokens[2:]


@given(tables_of(4), st.integers(1, 3), st.integers(1, 8), PENALTY, EARLY, st.integers(0, 9))
def test_more_candidates_than_needed_change_nothing(table, width, length, penalty, early, extra):
    """`num_candidates` candidates per beam give the same result as all tokens."""
    options = {
        "width": width, "max_new_tokens": length, "end_token_ids": frozenset({END}), "length_penalty": penalty,
        "early_stopping": early,
    }  # fmt: skip
    few, all_of_them = BeamSearch(**options), BeamSearch(**options)
    all_of_them.num_candidates += extra
    assert Follower(table, few, (0, 1)).run().best(width) == Follower(table, all_of_them, (0, 1)).run().best(width)


@given(st.lists(st.sampled_from([-1.0, -1.5, -2.0, -7.0, -math.inf, math.nan]), max_size=40), st.integers(1, 12))
def test_the_largest_in_order(values, width):
    """Among few candidates and among many. On a tie the earlier one comes first."""
    search = BeamSearch(width=width, max_new_tokens=2)
    steps = search.advance(np.arange(len(values), dtype=np.int32)[None], np.array([values], np.float32))
    possible = [i for i, value in enumerate(values) if value > -math.inf]
    assert [step.token_id for step in steps] == sorted(possible, key=lambda i: -values[i])[:width]


def arrays(*rows: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of each beam, from dicts {token: log-probability}."""
    return np.array([list(row) for row in rows], np.int32), np.array([list(row.values()) for row in rows], np.float32)


class TestEndings:
    """The end of a search of width 2 with one end token. At each step the beams return an end token and two others."""

    def search(self, early: Any, penalty: float = 1.0) -> BeamSearch:
        search = BeamSearch(
            width=2, max_new_tokens=10, end_token_ids=frozenset({END}), length_penalty=penalty, early_stopping=early
        )
        assert search.num_candidates == 3
        assert search.advance(*arrays({5: -1.0, 6: -2.0, 7: -9.0})) == [BeamStep(0, 5, -1.0), BeamStep(0, 6, -2.0)]
        # Sums -1.5 and -2.5 end, scores -0.75 and -1.25; -3 and -4.5 go on.
        self.steps = search.advance(*arrays({END: -0.5, 5: -2.0, 6: -3.5}, {END: -0.5, 5: -4.0, 6: -5.0}))
        return search

    def test_true_at_once(self):
        search = self.search(True)
        assert search.is_over
        assert [h.token_ids for h in search.best(2)] == [(5, END), (6, END)]

    def test_false_when_the_best_is_no_better_at_its_present_length(self):
        assert self.search(False).is_over  # -3 / 2 against -1.25

    def test_false_goes_on_while_it_is_better(self):
        search = BeamSearch(width=2, max_new_tokens=10, end_token_ids=frozenset({END}))
        assert len(search.advance(*arrays({END: -1.0, 5: -1.5, 6: -2.0}))) == 2
        # Ends at -1.5 / 2 and -1 / 1; goes on at -1.75 / 2.
        assert len(search.advance(*arrays({END: 0.0, 5: -0.25, 6: -9.0}, {END: -9.0, 5: -5.0, 6: -9.0}))) == 2

    def test_equal_is_no_better(self):
        for early in (False, "never"):
            search = BeamSearch(
                width=1, max_new_tokens=10, end_token_ids=frozenset({END}), length_penalty=0.0, early_stopping=early
            )
            assert search.advance(*arrays({END: -1.0, 5: -1.0})) == []

    def test_never_while_it_could_be_better_at_the_longest(self):
        search = self.search("never")  # -3 / 10 against -1.25
        assert not search.is_over
        assert self.steps == [BeamStep(0, 5, -2.0), BeamStep(0, 6, -3.5)]
        assert [(h.score, h.finish_reason) for h in search.best(4)] == [
            (-0.75, "stop"), (-1.25, "stop"), (-1.5, None), (-2.25, None),
        ]  # fmt: skip
        # One ends at -3.25 / 3 and pushes the worse one out.
        search.advance(*arrays({END: -0.25, 5: -1.0, 6: -2.0}, {END: -9.0, 5: -1.0, 6: -1.0}))
        assert [h.token_ids for h in search.best(2)] == [(5, END), (5, 5, END)]

    def test_never_without_a_reward_for_length_compares_as_false_does(self):
        assert self.search("never", penalty=0.0).is_over
        search = BeamSearch(
            width=2, max_new_tokens=10, end_token_ids=frozenset({END}), length_penalty=-1.0, early_stopping="never"
        )
        assert len(search.advance(*arrays({5: -0.25, END: -3.0, 6: -4.0}))) == 2
        # Two have ended, the worse at -3. -0.5 * 2 is better than that, -0.5 * 10 would not be.
        assert len(search.advance(*arrays({END: -0.125, 5: -0.25, 6: -1.0}, {END: -9.0, 5: -9.0, 6: -9.0}))) == 2

    def test_an_end_beyond_the_best_of_width_is_dropped(self):
        search = BeamSearch(width=2, max_new_tokens=10, end_token_ids=frozenset({END}))
        steps = search.advance(*arrays({5: -1.0, 6: -2.0, END: -2.5}))
        assert [step.token_id for step in steps] == [5, 6]
        assert all(h.finish_reason is None for h in search.best(9))

    def test_ties_go_to_the_earlier_beam_and_the_older_hypothesis(self):
        search = BeamSearch(width=2, max_new_tokens=3, end_token_ids=frozenset({END}), length_penalty=0.0)
        assert search.advance(*arrays({5: -1.0, 6: -1.0, END: -1.0})) == [BeamStep(0, 5, -1.0), BeamStep(0, 6, -1.0)]
        assert search.advance(*arrays({7: -1.0, 8: -1.0, END: -1.0}, {7: -1.0, 8: -1.0, END: -1.0})) == [
            BeamStep(0, 7, -1.0), BeamStep(0, 8, -1.0),
        ]  # fmt: skip
        search.advance(*arrays({END: 0.0, 7: -1.0, 8: -1.0}, {END: 0.0, 7: -1.0, 8: -1.0}))
        assert [h.token_ids for h in search.best(2)] == [(5, 7, END), (5, 8, END)]


class TestNothingToFollow:
    @pytest.mark.parametrize("value", [-math.inf, math.nan])
    def test_a_token_that_cannot_come_is_no_candidate(self, value):
        search = BeamSearch(width=3, max_new_tokens=4)
        assert search.advance(*arrays({5: -1.0, 6: value, 7: value})) == [BeamStep(0, 5, -1.0)]

    def test_one_that_can_come_among_many_that_cannot(self):
        values = dict.fromkeys(range(20), math.nan) | {11: -1.0}
        search = BeamSearch(width=2, max_new_tokens=4)
        assert search.advance(*arrays(values)) == [BeamStep(0, 11, -1.0)]

    def test_without_any_the_beams_stay_as_they_were(self):
        search = BeamSearch(width=2, max_new_tokens=4)
        search.advance(*arrays({5: -1.0, 6: -2.0}))
        assert search.advance(*arrays({5: -math.inf}, {5: -math.inf})) == []
        assert search.is_over
        assert [(h.token_ids, h.score, h.finish_reason) for h in search.best(2)] == [
            ((5,), -1.0, None), ((6,), -2.0, None),
        ]  # fmt: skip

    def test_no_candidates(self):
        search = BeamSearch(width=2, max_new_tokens=4)
        assert search.advance(np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32)) == []
        assert search.is_over
        assert search.best(2) == []

    def test_only_an_end_can_come(self):
        search = BeamSearch(width=2, max_new_tokens=4, end_token_ids=frozenset({END}))
        assert search.advance(*arrays({END: 0.0})) == []
        assert [h.finish_reason for h in search.best(2)] == ["stop"]


def test_a_long_search_keeps_no_copy_a_step():
    """20,000 tokens of width 2: memory is that of two sequences, and freeing them does not recurse."""
    search = BeamSearch(width=2, max_new_tokens=20_000, length_penalty=0.0)
    search.advance(*arrays({3: -0.1, 4: -0.2}))
    candidates = arrays({3: -0.1, 4: -8.0}, {3: -0.1, 4: -8.0})
    for _ in range(19_998):
        assert len(search.advance(*candidates)) == 2
    search.advance(*candidates)
    assert [len(h.token_ids) for h in search.best(2)] == [20_000] * 2
    del search
    gc.collect()


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"width": 0}, "beam_width"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": math.inf}, "length_penalty"),
        ({"length_penalty": 200.0}, "length_penalty"),
        ({"length_penalty": -200.0}, "length_penalty"),
    ],
)
def test_what_is_refused(options, parameter):
    with pytest.raises(RequestError) as caught:
        BeamSearch(**({"width": 2, "max_new_tokens": 16} | options))
    assert caught.value.parameter == parameter


def test_the_largest_penalty_does_not_overflow():
    for penalty in (-10.0, 10.0):
        search = BeamSearch(width=1, max_new_tokens=1000, length_penalty=penalty)
        while not search.is_over:
            search.advance(*arrays({3: -80.0}))
        (best,) = search.best(1)
        assert math.isfinite(best.score)
        assert best.score < 0


def test_candidates_of_wrong_shapes_are_refused():
    search = BeamSearch(width=2, max_new_tokens=4)
    with pytest.raises(EngineError):
        search.advance(*arrays({3: -1.0}, {3: -1.0}))
    with pytest.raises(EngineError):
        search.advance(np.zeros((1, 2), np.int32), np.zeros((1, 3), np.float32))
