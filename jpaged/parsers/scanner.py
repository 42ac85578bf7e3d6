"""Scans the streamed text of one answer. All parsers of answers use it.

A parser is a generator over a `Scanner`. It yields when it needs more text, and is resumed when there is more. Consumed
text is never read again, so the time is linear. The result does not depend on the cuts between pieces.
"""

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # a part of a parser: yields for more text, returns T

SPACE = re.compile(r"\s*+")
# Limit on syntax tokens of calls in one answer, and the tokens that each attempt to parse a call costs. Text beyond the
# limit is content. No model's answer has 20,000 tokens of JSON or 1,000 calls. Without the limit, a megabyte of hostile
# text would take more than 100 ms (benchmarks/answer_parsers.py).
MAX_STEPS = 20_000
CALL_STEPS = 20


class Scanner:
    """Text that is not consumed yet, and held text: consumed text that becomes content if a call is not valid."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False      # the text is complete
        self.steps = MAX_STEPS  # syntax tokens left
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append text."""
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def advance(self, end: int) -> str:
        """Consume the text up to index `end`, and return it."""
        piece = self.text[self.pos : end]
        self.pos = end
        if self._held is not None:
            self._held.append(piece)
        return piece

    def back(self, piece: str) -> None:
        """Undo `advance`: the scanner's next text is `piece` again, which was the last consumed text, and not held."""
        self.pos -= len(piece)

    def rest(self) -> str:
        """Consume all text so far, and return it."""
        return self.advance(len(self.text))

    def hold(self, already: str = "") -> None:
        """Hold the text consumed from now on, after `already`."""
        self._held = [already]

    def release(self) -> str:
        """Return the held text, and stop holding text."""
        held = "".join(self._held or ())
        self._held = None
        return held

    def step(self, count: int = 1) -> bool:
        """Count syntax tokens. Returns False when the limit of the answer is reached."""
        self.steps -= count
        return self.steps >= 0

    def peek(self) -> Steps[str]:
        """Return the next character, or "" at the end."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def space(self) -> Steps[str]:
        """Consume white space, and return the character after it, or "" at the end."""
        while True:
            end = _end(SPACE, self.text, self.pos)
            if end > self.pos:
                self.advance(end)
            if end < len(self.text):
                return self.text[end]
            if self.ended:
                return ""
            yield

    def is_next(self, literal: str) -> Steps[bool]:
        """Return True if `literal` is next. Consumes nothing."""
        while True:
            there = self.text[self.pos : self.pos + len(literal)]
            if there == literal or self.ended or not literal.startswith(there):
                return there == literal
            yield

    def accept(self, literal: str) -> Steps[bool]:
        """Consume `literal` if it is next. Returns True if it was consumed."""
        found = yield from self.is_next(literal)
        if found:
            self.advance(self.pos + len(literal))
        return found

    def run(self, pattern: re.Pattern[str], most: int) -> Steps[str | None]:
        """Consume and return all characters that a pattern matches; None if there are more than `most`."""
        while True:
            end = _end(pattern, self.text, self.pos)
            if end - self.pos > most:
                return None
            if end < len(self.text) or self.ended:
                return self.advance(end)
            yield

    def until(
        self, literals: tuple[str, ...], emit: Callable[[str], None], *, cut: bool = True
    ) -> Steps[str | None]:
        """Consume text up to and including the first of `literals`. Emit the text before it as soon as it is certain.

        Returns the literal, or None if the text ends without one. No literal may be a prefix of another.
        cut: emit the beginning of a literal at the end of the text. False drops it.
        """
        search = _any_of(literals)
        while True:
            match = search.search(self.text, self.pos)
            if match:
                emit(self.advance(match.start()))
                return self.advance(match.end())
            end = len(self.text)
            if not (self.ended and cut):
                begun, longest = _prefixes_of(literals)
                match = begun.search(self.text, max(self.pos, end - longest))
                end = match.start() if match else end
            emit(self.advance(end))
            if self.ended:
                self.rest()
                return None
            yield


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    return match.end() if match else pos


@functools.lru_cache(maxsize=64)
def _any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)))


@functools.lru_cache(maxsize=64)
def _prefixes_of(literals: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Return a pattern that matches a proper prefix of a literal at the end of a text, and its largest length."""
    nested = []
    for literal in literals:
        pattern = ""
        for char in reversed(literal[:-1]):
            pattern = re.escape(char) + (f"(?:{pattern})?+" if pattern else "")
        nested.append(pattern)
    return re.compile(rf"(?:{'|'.join(nested)})\Z"), max(map(len, literals)) - 1
