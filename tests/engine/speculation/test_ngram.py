"""N-gram drafts and the index of tokens, compared with a search through all tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import RequestError
from jpaged.engine.speculation import token_index
from jpaged.engine.speculation.drafter import Drafter
from jpaged.engine.speculation.ngram import NgramDrafter
from jpaged.engine.speculation.token_index import RequestIndexes, TokenIndex
from tests.engine.speculation.requests import request_of


def searched(tokens: list[int], sizes: list[int], count: int) -> list[int]:
    """The definition: the last occurrence of the longest n-gram, continued periodically."""
    for size in reversed(sizes):
        for position in range(len(tokens) - 1, size - 1, -1):
            if tokens[position - size : position] == tokens[-size:] and len(tokens) > size:
                draft = list(tokens)
                for i in range(count):
                    draft.append(draft[position + i])
                return draft[len(tokens) :]
    return []


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=70), max_size=5),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    count=st.integers(1, 9),
)
def test_every_draft_against_a_search(prompt, pieces, sizes, count):
    drafter, request = NgramDrafter(*sizes), request_of(prompt)
    lengths = list(range(sizes[0], sizes[1] + 1))
    for piece in [[], *pieces]:
        request.token_ids += piece
        draft, full = drafter.propose(request, count), searched(request.token_ids, lengths, count)
        assert list(draft) == full
        assert drafter.propose(request, count) == draft


def test_text_with_a_short_period_is_drafted_to_the_end():
    drafter = NgramDrafter(2, 4)
    assert drafter.propose(request_of([9, 1, 2, 3, 1, 2, 3, 1]), 8) == [2, 3, 1, 2, 3, 1, 2, 3]
    assert drafter.propose(request_of([7, 7, 7]), 5) == [7] * 5
    assert not drafter.propose(request_of([1, 2, 3, 4]), 5)
    assert not drafter.propose(request_of([1]), 5)


def test_the_last_occurrence_wins_and_the_longest_before_it():
    drafter = NgramDrafter(1, 3)
    assert drafter.propose(request_of([5, 1, 6, 5, 2, 9, 5]), 2) == [2, 9]
    assert drafter.propose(request_of([4, 5, 1, 6, 5, 2, 9, 4, 5]), 2) == [1, 6]


def test_a_wide_range_has_both_ends():
    drafter = NgramDrafter(2, 100)
    tokens = list(range(1000, 1200))
    assert drafter.propose(request_of([*tokens, 3, *tokens[:100]]), 3) == tokens[100:103]
    assert drafter.propose(request_of([*tokens, 3, *tokens[8:10]]), 3) == tokens[10:13]


def test_a_long_prompt_is_indexed_in_pieces(monkeypatch):
    monkeypatch.setattr(token_index, "PIECE", 50)
    drafter, request = NgramDrafter(3, 3), request_of([*range(110), 20, 21, 22])
    drafts = [list(drafter.propose(request, 2)) for _ in range(4)]
    assert drafts == [[], [], [23, 24], [23, 24]]


def test_requests_are_apart_and_end():
    drafter, one, two = NgramDrafter(1, 2), request_of([1, 2, 3, 1]), request_of([1, 8, 1])
    assert isinstance(drafter, Drafter)
    assert (drafter.propose(one, 1), drafter.propose(two, 1)) == ([2], [8])
    drafter.note_end(one)
    drafter.note_end(one)
    assert len(drafter._indexes) == 1
    drafter.forget()
    assert len(drafter._indexes) == 0
    assert drafter.propose(two, 1) == [8]


def test_replaced_tokens_are_indexed_anew():
    drafter, request = NgramDrafter(1, 2), request_of([1, 2, 3, 1, 4, 4])
    drafter.propose(request, 1)
    request.token_ids[:] = [5, 6, 5]
    assert drafter.propose(request, 2) == [6, 5]


@pytest.mark.parametrize("limits", [(0, 3), (3, 2), (-1, -1)])
def test_limits_are_checked(limits):
    with pytest.raises(RequestError, match="must be at least"):
        NgramDrafter(*limits)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=90), min_size=1, max_size=12))
def test_a_ring_returns_only_what_it_still_has(sequences):
    """Positions that it finds follow the n-gram, are in one sequence, and include the newest occurrence."""
    index, known = TokenIndex([2, 4], 64), [-1]
    for number, tokens in enumerate(sequences):
        if number:
            index.start_sequence()
            known.append(-1)
        index.append(tokens)
        known += tokens
        tail, length = tokens[:-5:-1], len(known)
        for i, key in enumerate(index.keys()):
            size = index.sizes[i]
            found = [p for p in index.positions(i, key, 1000) if index.match(p, tail[:size]) == size]
            gram = tail[:size][::-1]
            expected = [p for p in range(length - 1, max(length - 63 + size, size) - 1, -1)
                        if known[p - size : p] == gram and known[p] >= 0]  # fmt: skip
            assert [p for p in found if p - size >= length - 63] == expected
            assert [p for p in found if index.follows(p, gram)] == expected
            for position in found:
                ends = [*known[position:], -1]
                assert index.following(position, 5) == ends[: ends.index(-1)][:5]


def test_indexes_of_requests_share_nothing():
    indexes, one, two = RequestIndexes([1]), request_of([1, 2]), request_of([3])
    assert indexes.read(one) is indexes.read(one)
    assert indexes.read(one) is not indexes.read(two)
    assert len(indexes) == 2
