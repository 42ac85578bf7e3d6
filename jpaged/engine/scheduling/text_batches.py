"""Batches of an encoder: texts of one length, each computed whole in one step.

Called by: `PromptScheduler.schedule`, in place of its chunks.
Owns: the choice of the texts of a step.
Never: gives a text a larger length than its own, so that its result does not depend on other texts.

1. The head of the waiting queue sets the length: the smallest length of a program that fits it.
2. Waiting texts of the same length join it, in the order of the policy.
3. The step has as many texts as fill a program. If the smallest program that takes them all would be less than half
   full, the next smaller one runs first, and the rest waits for the next step.
"""

from collections.abc import Callable, Sequence

from jpaged.engine.kv_cache.prefix_finder import Prefix
from jpaged.engine.request import Request
from jpaged.engine.scheduling.scheduler_state import SchedulerState
from jpaged.engine.scheduling.step_selection import StepSelection

MAX_LOOKAHEAD = 1024  # waiting texts after the head that are searched for texts of its length; takes 0.1 ms

Start = Callable[[Request, Prefix, int, StepSelection], None]


class TextBatches:
    """Selects texts, and starts them."""

    def __init__(self, state: SchedulerState):
        self._waiting, self._running = state.waiting, state.running
        self._no_prefix = state.manager.prefixes.no_prefix
        self._rows: dict[int, list[int]] = {}  # rows of the programs of each length, both ascending
        for shape in state.limits.text_shapes:
            self._rows.setdefault(shape.length, []).append(shape.rows)

    def start(self, start: Start, selection: StepSelection) -> None:
        """Start texts of one length. start: `PromptScheduler._start`."""
        if not self._waiting or not self._running.free_rows:
            return
        head = self._waiting.head()
        if head.schedule.num_in_flight:
            return  # preempted by `sleep` while its vector was in flight
        length = self._length_of(head)
        later = self._waiting.after_head(MAX_LOOKAHEAD)
        alike = [head, *(r for r in later if self._length_of(r) == length and not r.schedule.num_in_flight)]
        for request in alike[: num_texts(self._rows[length], len(alike), len(self._running.free_rows))]:
            start(request, self._no_prefix, len(request.token_ids), selection)

    def _length_of(self, request: Request) -> int:
        count = len(request.token_ids)
        return next(length for length in self._rows if length >= count)


def num_texts(rows: Sequence[int], waiting: int, free: int) -> int:
    """Texts of a step. rows: of the programs, ascending. waiting: texts that could run. free: rows of the table."""
    count = min(waiting, free, rows[-1])
    smaller = [size for size in rows if size < count]
    fitting = next(size for size in rows if size >= count)
    return smaller[-1] if smaller and 2 * count < fitting else count
