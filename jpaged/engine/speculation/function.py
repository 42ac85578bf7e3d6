"""Drafts from a Python function of the user."""

import logging
import operator
from collections.abc import Callable, Sequence

from jpaged.engine.request import Request
from jpaged.errors import first_line, shown

logger = logging.getLogger(__name__)

DraftFunction = Callable[[list[int], int], Sequence[int]]


class FunctionDrafter:
    """Calls `function(token_ids, count)` for each row of a step that may have drafts.

    token_ids: the request's known tokens, prompt first. The list is a copy: 30 us for 10,000 tokens.
    count:     most tokens to return.

    The function returns the token ids that may follow. It runs on the engine's thread, between two steps: while it
    runs, no request advances. Nothing stops a function that takes long, so it must return within tens of microseconds.
    It runs once for each request of a step, and may keep state of its own.

    A function that raises, or returns anything but at most `count` valid token ids, gives no draft. The first
    such call of each kind is logged as a warning. It never fails a request, because drafts do not decide tokens.
    """

    def __init__(self, function: DraftFunction, vocab_size: int):
        """vocab_size: token ids are below this."""
        self._function, self._vocab_size = function, vocab_size
        self._warned: set[str] = set()

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """Return the function's drafts. Empty if they are invalid."""
        try:
            answer = self._function(list(request.token_ids), count)
        except Exception as error:  # of any kind: it is the user's code
            return self._refuse("raised", f"raised {type(error).__name__}: {first_line(error)}")
        try:
            drafts = [operator.index(each) for each in answer]
        except Exception:
            return self._refuse("type", f"must return a list of token ids, got {shown(answer)}")
        if len(drafts) > count:
            return self._refuse("length", f"must return at most {count} token ids, got {len(drafts)}")
        for draft in drafts:
            if not 0 <= draft < self._vocab_size:
                return self._refuse("id", f"must return token ids from 0 to {self._vocab_size - 1}, got {draft}")
        return drafts

    def note_end(self, request: Request) -> None:
        """Do nothing: there is no data for a request."""

    def forget(self) -> None:
        """Do nothing: what the function keeps is the user's."""

    def _refuse(self, kind: str, problem: str) -> Sequence[int]:
        """Log a problem if it is the first of its kind. Returns no drafts."""
        if kind not in self._warned:
            self._warned.add(kind)
            name = getattr(self._function, "__name__", type(self._function).__name__)
            logger.warning("the draft function %s %s; the request goes on without drafts (logged once)", name, problem)
        return ()
