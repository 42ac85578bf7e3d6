"""Finds stop strings in text that arrives in pieces.

Each set of stop strings has one Aho-Corasick automaton. It reads each character once, for any number of strings and any
split into pieces. Its state gives the longest suffix of the text that may begin a stop string. Exactly this suffix is
held back: with the stop string `</stop>`, the last three characters of `a b</s`.

The string that is complete first ends the text, so the result does not depend on the split. If two are complete at the
same character, the first in the list counts, as in vLLM. The text is cut before the stop string, or after it with
`include`; then no text is held back.
"""

import functools
from collections import deque
from collections.abc import Sequence

CACHE_SIZE = 16  # automata; one of 4,096 characters takes about 1.1 MB and 11 ms


class StopAutomaton:
    """Aho-Corasick automaton of a set of stop strings. In state 0, no string has begun."""

    def __init__(self, strings: Sequence[str]):
        self.strings = tuple(dict.fromkeys(strings))
        self.steps: list[dict[str, int]] = [{}]
        self.found: list[int] = [-1]  # by state: index of the first string that is complete, or -1
        depth = [0]
        for index, string in enumerate(self.strings):
            state = 0
            for character in string:
                following = self.steps[state].get(character)
                if following is None:
                    following = self.steps[state][character] = len(self.steps)
                    self.steps.append({})
                    self.found.append(-1)
                    depth.append(depth[state] + 1)
                state = following
            self.found[state] = index
        self.held = [0] * len(self.steps)  # by state: characters at the end of the text that may begin a stop string
        self.fallback = [0] * len(self.steps)  # by state: state of its longest proper suffix that begins a string
        waiting = deque(self.steps[0].values())
        self._fill_from_fallbacks(waiting, depth)
        self.firsts = frozenset(self.steps[0])

    def _fill_from_fallbacks(self, waiting: deque[int], depth: list[int]) -> None:
        """Fill in `fallback`, `held` and `found`, in order of depth: a state inherits from its fallback state."""
        for state in waiting:
            self.held[state] = depth[state] if self.steps[state] else 0
        while waiting:
            state = waiting.popleft()
            for character, following in self.steps[state].items():
                back = self.fallback[state]
                while back and character not in self.steps[back]:
                    back = self.fallback[back]
                back = self.fallback[following] = self.steps[back].get(character, 0)
                self.held[following] = depth[following] if self.steps[following] else self.held[back]
                both = [index for index in (self.found[following], self.found[back]) if index >= 0]
                self.found[following] = min(both, default=-1)
                waiting.append(following)


@functools.lru_cache(maxsize=CACHE_SIZE)
def stop_automaton(strings: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of a set of strings. Requests with the same set share it, so it is read-only."""
    return StopAutomaton(strings)


class StopText:
    """Searches the text of one answer. `add` returns the text that is certain; `stop` is the stop string once found.

    include: the text includes the stop string.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "stop")

    def __init__(self, strings: tuple[str, ...], *, include: bool):
        self._automaton = stop_automaton(strings)
        self._include = include
        self._state = 0
        self._held = ""
        self.stop: str | None = None

    def add(self, piece: str, *, ends: bool = True) -> str:
        """Append a piece and return the text that is certain. ends: whether stop strings end the text in this piece."""
        automaton = self._automaton
        if self.stop is not None or (not self._state and automaton.firsts.isdisjoint(piece)):
            return "" if self.stop is not None else piece
        steps, fallback, state = automaton.steps, automaton.fallback, self._state
        for length, character in enumerate(piece, start=1):
            following = steps[state].get(character)
            while following is None and state:
                state = fallback[state]
                following = steps[state].get(character)
            state = following or 0
            if ends and automaton.found[state] >= 0:
                return self._end(automaton.strings[automaton.found[state]], self._held + piece[:length])
        self._state = state
        held = 0 if self._include else automaton.held[state]
        text = self._held + piece
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """Return the held-back text. Called after the last piece."""
        held, self._held = self._held, ""
        return held

    def _end(self, stop: str, text: str) -> str:
        self.stop = stop
        self._held = ""
        if not self._include:
            return text[: len(text) - len(stop)]
        return text
