"""Counts the requests that wait, so that a full queue refuses a request without waiting for the running step.

Called by: `EngineThread` and `EngineThreads` on any thread; `EngineLoop` on the engine's thread.
Owns: the published length of the queue, and the requests that count as queued before the engine has them.
Never: submits a command, or ends a request.
"""

from jpaged.engine.engine import Engine
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.scheduling.admission import QueueLength
from jpaged.frontend.commands import CommandQueue
from jpaged.frontend.live_requests import LiveRequests


class Arrivals:
    """Length of an engine's queue, as other threads see it. The lock of `commands` guards it."""

    def __init__(self, engine: Engine, commands: CommandQueue, requests: LiveRequests):
        self._engine = engine
        self._commands = commands
        self._requests = requests
        self._queue = QueueLength(-engine.runner.max_num_seqs)  # after the last step or command
        self._arriving = QueueLength()    # requests that count as queued, but are not queued yet
        self._reserved: set[str] = set()  # ids of arriving requests without an Add command yet

    @property
    def num_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._requests.live) + self._arriving.queued

    def check_room(self, num_tokens: int = 0) -> None:
        """Raise CapacityError if the queue has no room for a prompt of `num_tokens` tokens; EngineError if it ended.

        It reads the queue's length after the last step, so it does not wait for the running step.
        """
        self._commands.check_open()
        admission = self._engine.admission
        if admission.has_limits:
            admission.check_length(self._length(), num_tokens)

    def has_room(self, num_tokens: int = 0) -> bool:
        """Return True if `check_room` would not raise CapacityError. Counts no refused request."""
        admission = self._engine.admission
        if not admission.has_limits:
            return True
        with self._commands.changed:  # a request moves from `_arriving` to `_queue` under this lock
            return admission.has_room(self._length(), num_tokens)

    def reserve(self, request_group: RequestGroup) -> None:
        """Count a request as queued until `cancel`, or until `claim` and `note_queued`. Raises as `check_room`."""
        with self._commands.changed:
            self._count(request_group)
            self._reserved.add(request_group.request_id)

    def cancel(self, request_group: RequestGroup) -> None:
        """End the reservation of a request that was not claimed."""
        with self._commands.changed:
            if request_group.request_id in self._reserved:
                self._reserved.remove(request_group.request_id)
                self._arriving = self._arriving.plus(-1, -len(request_group.prompt_token_ids))

    def claim(self, request_group: RequestGroup) -> None:
        """Use the reservation of a request, or count the request now. The caller holds the lock. As `check_room`."""
        if request_group.request_id in self._reserved:
            self._commands.check_open()
            self._reserved.remove(request_group.request_id)
        else:
            self._count(request_group)

    def _count(self, request_group: RequestGroup) -> None:
        tokens = len(request_group.prompt_token_ids)
        self.check_room(tokens)
        self._arriving = self._arriving.plus(1, tokens)

    def _length(self) -> QueueLength:
        """Length of the queue after the last step, plus the requests that have arrived since."""
        arriving = self._arriving
        return self._queue.plus(arriving.queued, arriving.num_tokens)

    # -- on the engine's thread -----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Update the length of the queue that other threads read."""
        if self._engine.admission.has_limits:
            self._queue = self._queue_length()

    def note_queued(self, request_group: RequestGroup) -> None:
        """Count a request as queued instead of arriving."""
        queue = self._queue_length()
        with self._commands.changed:
            self._arriving = self._arriving.plus(-1, -len(request_group.prompt_token_ids))
            self._queue = queue

    def _queue_length(self) -> QueueLength:
        """Length of the queue, including held requests."""
        if not self._engine.admission.has_limits:
            return QueueLength()
        length, held = self._engine.admission.queue_length(), self._requests.held.values()
        tokens = sum(len(add.request_group.prompt_token_ids) for add in held)
        return length.plus(len(held), tokens)
