"""The text of one answer as it comes, read from the front once: what every parser of answers stands on.

A parser is a generator over a `Scanner`: it yields where it needs more text, and is resumed when there is some. What is
consumed is never looked at again, so reading is linear, and where the text was cut does not matter.
"""

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # a part of a parser: yields for more text, returns T

SPACE = re.compile(r"\s*+")
# Tokens of calls' syntax in one answer, and how many of them trying to read a call counts as. What is beyond is text:
# no model's answer has 20,000 tokens of JSON or 1,000 calls, and reading on would take longer than the 100 ms that a
# megabyte of hostile text may cost (benchmarks/answer_parsers.py).
MAX_STEPS = 20_000
CALL_STEPS = 20


class Scanner:
    """A window on the text: what is not consumed yet, and what a call that may turn out to be none has consumed."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False         # no more text will come
        self.steps = MAX_STEPS     # tokens of syntax that may still be read
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        """More text."""
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def advance(self, end: int) -> str:
        """Consume up to `end`, and return it."""
        piece = self.text[self.pos : end]
        self.pos = end
        if self._held is not None:
            self._held.append(piece)
        return piece

    def rest(self) -> str:
        """Consume all there is."""
        return self.advance(len(self.text))

    def hold(self, already: str = "") -> None:
        """Remember what is consumed from here on, and `already` before it."""
        self._held = [already]

    def release(self) -> str:
        """What was consumed since `hold`, which is forgotten."""
        held = "".join(self._held or ())
        self._held = None
        return held

    def step(self, count: int = 1) -> bool:
        """Count tokens of syntax; False where the answer has had its share."""
        self.steps -= count
        return self.steps >= 0

    def peek(self) -> Steps[str]:
        """The next character, or "" at the end."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def space(self) -> Steps[str]:
        """Consume white space; the character after it, or "" at the end."""
        while True:
            end = _end(SPACE, self.text, self.pos)
            if end > self.pos:
                self.advance(end)
            if end < len(self.text):
                return self.text[end]
            if self.ended:
                return ""
            yield

    def accept(self, literal: str) -> Steps[bool]:
        """Consume `literal` if it comes next."""
        while True:
            there = self.text[self.pos : self.pos + len(literal)]
            if there == literal:
                self.advance(self.pos + len(literal))
                return True
            if self.ended or not literal.startswith(there):
                return False
            yield

    def run(self, pattern: re.Pattern[str], most: int) -> Steps[str | None]:
        """Consume all that a pattern of single characters matches; None where that is more than `most` characters."""
        while True:
            end = _end(pattern, self.text, self.pos)
            if end - self.pos > most:
                return None
            if end < len(self.text) or self.ended:
                return self.advance(end)
            yield

    def until(self, literals: tuple[str, ...], give: Callable[[str], None]) -> Steps[str | None]:
        """Consume up to and with the first of `literals`, giving the text before it as soon as it is certain.

        Returns which it was; None where the text ends without one. None of the literals may begin another.
        """
        search = _any_of(literals)
        while True:
            match = search.search(self.text, self.pos)
            if match:
                give(self.advance(match.start()))
                return self.advance(match.end())
            end = len(self.text)
            if not self.ended:
                begun, longest = _beginnings_of(literals)
                match = begun.search(self.text, max(self.pos, end - longest))
                end = match.start() if match else end
            give(self.advance(end))
            if self.ended:
                return None
            yield


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    return match.end() if match else pos


@functools.lru_cache(maxsize=64)
def _any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)))


@functools.lru_cache(maxsize=64)
def _beginnings_of(literals: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """What finds the beginning of a literal at the end of a text, and the most characters that it has."""
    nested = []
    for literal in literals:
        pattern = ""
        for char in reversed(literal[:-1]):
            pattern = re.escape(char) + (f"(?:{pattern})?+" if pattern else "")
        nested.append(pattern)
    return re.compile(rf"(?:{'|'.join(nested)})\Z"), max(map(len, literals)) - 1
