"""Suffix drafts: the most frequent path, its limits, and what one request may learn from another."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import RequestError
from jpaged.engine.speculation.answer_store import AnswerStore
from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.suffix import SuffixDrafter, most_frequent
from tests.engine.speculation.requests import request_of


def drafter_of(**options) -> SuffixDrafter:
    return SuffixDrafter(**{"stored_tokens": 1 << 10} | options)


def finish(drafter: SuffixDrafter, prompt: list[int], answer: list[int], root: bytes = b"") -> None:
    """Run one request to its end."""
    request = request_of(prompt, root)
    drafter.propose(request, 4)
    request.token_ids += answer
    drafter.note_end(request)


@settings(max_examples=100, deadline=None)
@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=8),
    limit=st.integers(1, 5),
    min_prob=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_the_path_is_the_most_frequent_one(paths, limit, min_prob):
    draft, score = most_frequent(paths, limit, min_prob)
    expected = 0.0
    for length in range(1, len(draft) + 1):
        having = [path[:length] for path in paths if path[: length - 1] == draft[: length - 1]]
        share = having.count(draft[:length])
        assert share == max(collections.Counter(map(tuple, filter(lambda p: len(p) == length, having))).values())
        expected += sum(path[:length] == draft[:length] for path in paths) / len(paths)
        assert expected - score < 1e-9
    assert score == pytest.approx(expected)
    assert len(draft) <= limit
    assert not draft or sum(path[: len(draft)] == draft for path in paths) / len(paths) >= min_prob - 1e-9


def test_it_finds_the_most_frequent_continuation_of_its_own_tokens():
    drafter = drafter_of()
    assert isinstance(drafter, Drafter)
    tokens = [1, 2, 3, 5, 1, 2, 4, 6, 1, 2, 3, 7, 1, 2]
    assert drafter.propose(request_of(tokens), 1) == [3]
    assert drafter.propose(request_of([1, 2, 3, 5]), 4) == []


def test_a_draft_is_as_long_as_its_match_and_the_depth_allow():
    text = list(range(100, 140))
    for depth, factor, count, match, expected in [
        (24, 1.0, 30, 2, 2), (24, 1.0, 30, 7, 7), (24, 1.0, 30, 12, 12), (24, 1.0, 30, 20, 12),
        (24, 2.0, 30, 5, 10), (24, 2.0, 30, 20, 16), (24, 1.0, 3, 20, 3), (3, 1.0, 30, 20, 1), (40, 0.5, 30, 10, 5),
    ]:  # fmt: skip
        drafter = drafter_of(max_tree_depth=depth, max_spec_factor=factor)
        draft = drafter.propose(request_of([*text, 7, *text[: match]]), count)
        assert draft == text[match : match + expected], (depth, factor, count, match)


def test_own_text_with_a_period_is_continued():
    assert drafter_of().propose(request_of([8, 9] * 8), 8) == [8, 9] * 4


def test_improbable_tokens_are_not_drafted():
    tokens = [token for last in range(10, 18) for token in (1, 2, 3, 4, last)] + [1, 2]
    assert drafter_of(max_spec_factor=4.0).propose(request_of(tokens), 4)[:2] == [3, 4]
    assert drafter_of(max_spec_factor=4.0, min_token_prob=0.2).propose(request_of(tokens), 4) == [3, 4]


def test_answers_are_learnt_from_their_first_token_on():
    drafter, answer = drafter_of(), list(range(50, 80))
    finish(drafter, [1, 2, 3, 4, 5, 6], answer)
    again = request_of([1, 2, 3, 4, 5, 6])
    assert drafter.propose(again, 5) == answer[:5]
    again.token_ids += answer[:10]
    assert drafter.propose(again, 8) == answer[10:18]
    assert drafter.propose(request_of([9, 9, 8, *answer[20:24]]), 4) == answer[24:28]


def test_the_more_frequent_of_two_answers_wins():
    drafter = drafter_of()
    for last in (7, 8, 7):
        finish(drafter, [1, 2, 3], [4, 5, last])
    finish(drafter, [1, 2, 3], [4, 5, 8])
    finish(drafter, [1, 2, 3], [4, 5, 7])
    assert drafter.propose(request_of([1, 2, 3, 4, 5]), 4) == [7]


def test_nothing_crosses_a_prefix_root():
    drafter = drafter_of()
    finish(drafter, [1, 2, 3], [4, 5, 6, 7, 8], b"one")
    finish(drafter, [1, 2, 3], [4, 9, 9, 9, 9], b"two")
    known = [1, 2, 3, 4]
    assert drafter.propose(request_of(known, b"one"), 2) == [5, 6]
    assert drafter.propose(request_of(known, b"two"), 2) == [9, 9]
    assert drafter.propose(request_of(known, b"three"), 2) == []
    assert drafter.propose(request_of(known), 2) == []


def test_equal_hashes_of_two_roots_are_told_apart(monkeypatch):
    monkeypatch.setattr("jpaged.engine.speculation.token_index.SALT", 0)
    test_nothing_crosses_a_prefix_root()


def test_forget_drops_everything():
    drafter = drafter_of()
    finish(drafter, [1, 2, 3], [4, 5, 6])
    running = request_of([1, 2, 3, 7, 8, 1, 2])
    assert drafter.propose(running, 1)
    drafter.forget()
    assert drafter.propose(request_of([1, 2, 3, 4]), 2) == []
    assert drafter.propose(running, 1) == [3]


def test_old_answers_are_dropped_by_number_and_by_tokens():
    by_number = drafter_of(max_cached_requests=2)
    by_tokens = drafter_of(stored_tokens=256)
    for drafter, length in ((by_number, 6), (by_tokens, 100)):
        size = drafter.num_bytes
        for number in range(4):
            finish(drafter, [1000 + number] * 3, list(range(200 * number, 200 * number + length)), bytes([number]))
        kept = [drafter.propose(request_of(list(range(200 * n + 2, 200 * n + 5)), bytes([n])), 1) for n in range(4)]
        assert kept == [[], [], [405], [605]]
        assert drafter.num_bytes == size
        assert len(drafter._answers._owners) == drafter._answers.num_answers == 2
    nothing = drafter_of(max_cached_requests=0)
    finish(nothing, [1, 2, 3], [4, 5])
    assert nothing.propose(request_of([1, 2, 3]), 2) == []


def test_an_answer_longer_than_the_store_keeps_its_end():
    drafter = drafter_of(stored_tokens=256)
    finish(drafter, [1], list(range(1000, 2000)))
    assert drafter.propose(request_of([1980, 1981, 1982, 1983]), 4) == [1984, 1985, 1986, 1987]
    assert drafter.propose(request_of([1780, 1781, 1782, 1783]), 4) == []


def test_positions_start_over_before_they_overflow(monkeypatch):
    monkeypatch.setattr("jpaged.engine.speculation.answer_store.MOST_POSITION", 50)
    store = AnswerStore([2], 100, 256)
    for number in range(30):
        first = 10 * number
        store.add(b"", [first, first + 1, first + 2, 5, 6])
        tail = [first + 1, first]
        (found,) = store.continuations(0, store.keys(tail, 0)[0], tail, 0, 8, 3)
        assert found == (2, [first + 2, 5, 6])
        assert store._index.end < 60


@pytest.mark.parametrize("fields", [{"max_tree_depth": 2}, {"max_cached_requests": -1}, {"max_spec_factor": 0.0},
                                    {"min_token_prob": 1.1}, {"min_token_prob": -0.1}])  # fmt: skip
def test_parameters_are_checked(fields):
    with pytest.raises(RequestError, match=f"suffix_decoding_{next(iter(fields))} must be"):
        SuffixDrafter(**fields)
