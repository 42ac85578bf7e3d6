"""Stop strings in a text that comes in pieces: what may be given out, and where the text ends.

One automaton (Aho-Corasick) a set of strings: each character is looked at once, however many strings there are and
wherever a piece ends. It knows the longest end of the text that a stop string begins with, and that much is held back,
no more: of `a b</s` the last three characters where `</stop>` is one.

The string that is complete first ends the text, so that the answer does not depend on how the text was split; of two
that are complete at the same character the one that stands first in the list, as in vLLM. The text is cut before it,
or, with `include`, after it: then nothing ever has to be held back.
"""

import functools
from collections import deque
from collections.abc import Sequence

KEPT = 16  # automata of the sets that were used last; one of 4,096 characters takes about 1.1 MB and 11 ms


class StopAutomaton:
    """Of one set of stop strings; state 0 is where nothing of any has been seen."""

    def __init__(self, strings: Sequence[str]):
        self.strings = tuple(dict.fromkeys(strings))
        self.steps: list[dict[str, int]] = [{}]
        self.found: list[int] = [-1]  # the string, first in the list, that is complete in a state; -1: none
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
        self.held = [0] * len(self.steps)  # characters at the text's end that a stop string may begin with
        self.fallback = [0] * len(self.steps)  # the state of the longest end that is another string's beginning
        waiting = deque(self.steps[0].values())
        self._note(waiting, depth)
        self.firsts = frozenset(self.steps[0])

    def _note(self, waiting: deque[int], depth: list[int]) -> None:
        """Fill in, the nearest states first, what a state takes over from the one it falls back to."""
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


@functools.lru_cache(maxsize=KEPT)
def stop_automaton(strings: tuple[str, ...]) -> StopAutomaton:
    """Of a set that other requests may have as well: shared, it is only read."""
    return StopAutomaton(strings)


class StopText:
    """One answer's text on its way through: `add` gives what may be given out, until `stop` is a string.

    include: give out the stop string too.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "stop")

    def __init__(self, strings: tuple[str, ...], *, include: bool):
        self._automaton = stop_automaton(strings)
        self._include = include
        self._state = 0
        self._held = ""
        self.stop: str | None = None

    def add(self, piece: str, *, ends: bool = True) -> str:
        """Take a piece. ends: whether a stop string that is complete within it ends the text."""
        automaton = self._automaton
        if self.stop is not None or (not self._state and automaton.firsts.isdisjoint(piece)):
            return "" if self.stop is not None else piece
        steps, fallback, state = automaton.steps, automaton.fallback, self._state
        for place, character in enumerate(piece, start=1):
            following = steps[state].get(character)
            while following is None and state:
                state = fallback[state]
                following = steps[state].get(character)
            state = following or 0
            if ends and automaton.found[state] >= 0:
                return self._end(automaton.strings[automaton.found[state]], self._held + piece[:place])
        self._state = state
        held = 0 if self._include else automaton.held[state]
        text = self._held + piece
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """What is still held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _end(self, stop: str, text: str) -> str:
        self.stop = stop
        self._held = ""
        if not self._include:
            return text[: len(text) - len(stop)]
        return text
