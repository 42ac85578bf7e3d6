"""Questions of node 0 to the other nodes, and their answers.

`ProcessGroup` sends the questions, and its watching threads note the answers. An answer is a text: the reason why a
node cannot do as asked, or "".
"""

import itertools
import threading
from concurrent.futures import Future

from jpaged.errors import EngineError


class Question:
    """A question to all other nodes. number: of the question, in its answers."""

    def __init__(self, number: int, count: int):
        """count: of the other nodes."""
        self.number = number
        self._answers = [Future[str]() for _ in range(count)]

    def problem(self) -> str:
        """Wait for all answers. Returns the problems of all nodes, "" if there are none.

        Raises EngineError if the engine is closed before all have answered.
        """
        found = [answer.result() for answer in self._answers]
        return "; ".join(f"node {rank}: {text}" for rank, text in enumerate(found, 1) if text)

    def early_problem(self) -> str:
        """The problem of a node that has answered already; "" if there is none. Does not wait."""
        done = [(rank, answer.result()) for rank, answer in enumerate(self._answers, 1) if answer.done()]
        return next((f"node {rank}: {text}" for rank, text in done if text), "")

    def note(self, rank: int, text: str) -> bool:
        """Note the answer of a node. Returns True if all nodes have answered."""
        self._answers[rank - 1].set_result(text)
        return all(answer.done() for answer in self._answers)

    def close(self) -> None:
        """Let `problem` raise EngineError."""
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(EngineError("the engine is closed"))


class Questions:
    """Questions without all answers. Any thread may call the methods."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Question] = {}
        self._lock = threading.Lock()

    def new(self, count: int) -> Question:
        """A new question to `count` nodes."""
        with self._lock:
            question = Question(next(self._numbers), count)
            self._open[question.number] = question
            return question

    def note(self, rank: int, number: int, text: str) -> None:
        """Note a node's answer."""
        with self._lock:
            if number in self._open and self._open[number].note(rank, text):
                del self._open[number]

    def close(self) -> None:
        """Answer all open questions with an EngineError."""
        with self._lock:
            for question in self._open.values():
                question.close()
            self._open.clear()
