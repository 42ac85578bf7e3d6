"""Stop strings: the end of a text does not depend on its pieces, and no more text is held back than necessary."""

import itertools
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from jpaged.engine.output.stop_strings import StopAutomaton, StopText, stop_automaton


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The definition: the stop string that is complete first, and its end. The first in the list wins a tie."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop, end
    return None


def begun(text: str, stops: list[str]) -> int:
    """The definition: the most characters at the end of a text that are a proper beginning of a stop string."""
    lengths = (length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length]))
    return max(lengths, default=0)


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], StopText]:
    stop_text = StopText(tuple(stops), include=include)
    return [stop_text.add(piece) for piece in pieces], stop_text


def check(pieces: list[str], stops: list[str], include: bool) -> None:
    """Assert that exactly the certain text is returned after each piece, and that it is cut at the stop string."""
    stop_text = StopText(tuple(stops), include=include)
    given_out = ""
    for count, piece in enumerate(pieces, start=1):
        given_out += stop_text.add(piece)
        so_far = "".join(pieces[:count])
        found = first_stop(so_far, stops)
        if found is not None:
            stop, end = found
            assert stop_text.stop == stop
            assert given_out == so_far[: end if include else end - len(stop)]
            assert (stop_text.add("more"), stop_text.rest()) == ("", "")
            return
        assert stop_text.stop is None
        assert given_out == so_far[: len(so_far) - (0 if include else begun(so_far, stops))]
    assert given_out + stop_text.rest() == "".join(pieces)


STOPS = st.lists(st.text(alphabet="ab漢", min_size=1, max_size=4), min_size=1, max_size=4)


@given(pieces=st.lists(st.text(alphabet="ab漢", max_size=5), max_size=8), stops=STOPS, include=st.booleans())
@example(pieces=["ab", "c"], stops=["bc", "abc"], include=False)
@example(pieces=["abcd"], stops=["abcd", "bc"], include=False)
@example(pieces=["aab", "aac"], stops=["aabaaa", "abaac", "b漢"], include=False)
@settings(max_examples=500)
def test_against_the_definition(pieces: list[str], stops: list[str], include: bool):
    check(pieces, stops, include)


@pytest.mark.parametrize("stops", [["DEFGHIJ"], ["END", "\n\n"], ["</s>", "</stop>"], ["漢字", "👩‍👩"], ["aa"]])
@pytest.mark.parametrize("include", [False, True])
def test_split_at_every_position(stops: list[str], include: bool):
    """Into three pieces, at every pair of positions."""
    for stop in stops:
        text = "ABC 漢" + stop[:-1] + " " + stop + "XYZ"
        for low, high in itertools.combinations_with_replacement(range(len(text) + 1), 2):
            check([text[:low], text[low:high], text[high:]], stops, include)
        check(list(text), stops, include)


def test_the_beginning_of_a_stop_string_is_held_back():
    pieces, stop_text = run(["ABC", "DEF", "G", "HI", "J rest"], ["DEFGHIJ"])
    assert pieces == ["ABC", "", "", "", ""]
    assert stop_text.stop == "DEFGHIJ"
    assert run(["ABC", "DEF", "G", "HI", "K"], ["DEFGHIJ"])[0] == ["ABC", "", "", "", "DEFGHIK"]
    assert run(["ABC", "DEF", "GHIJ!"], ["DEFGHIJ"], include=True)[0] == ["ABC", "DEF", "GHIJ"]


def test_of_two_complete_at_once_the_first_in_the_list_counts():
    assert run(["abc"], ["bc", "abc"])[0] == ["a"]
    assert run(["abc"], ["abc", "bc"])[0] == [""]
    assert run(["ab", "c"], ["c", "abc", "bc"])[1].stop == "c"


def test_a_stop_string_within_min_tokens_does_not_end_the_text():
    """A stop string that begins within `min_tokens` and ends after them does."""
    stop_text = StopText(("xy",), include=False)
    assert [stop_text.add("a xy b", ends=False), stop_text.add("x", ends=False)] == ["a xy b", ""]
    assert (stop_text.add("yz"), stop_text.stop) == ("", "xy")
    again = StopText(("xy", "xyxyz"), include=False)
    assert [again.add("xy", ends=False), again.add("!", ends=False)] == ["", "xy!"]


def test_the_longest_stop_string_is_searched_in_linear_time():
    """Counts calls instead of time. Each character adds one step, and there are at most as many fallbacks as steps."""
    automaton = StopAutomaton(["a" * 4095 + "b"])
    assert len(automaton.steps) == 4097
    stop_text = StopText(("a" * 4095 + "b",), include=False)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    text = ("a" * 4000 + "c") * 3
    sys.setprofile(count)
    try:
        pieces = [stop_text.add(character) for character in text]
    finally:
        sys.setprofile(None)
    assert "".join(pieces) == text
    assert calls < 8 * len(text)


def test_requests_share_the_automaton_of_a_set():
    stops = tuple(f"{number:04d}" * 4 for number in range(250))
    before = stop_automaton.cache_info()
    for _ in range(2):
        StopText(stops, include=False)
    after = stop_automaton.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
