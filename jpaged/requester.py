"""Who made a request: work that a request waits for is shared fairly between clients, and dropped when they leave."""

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar

# The server sets it for each request: the client's API key or its address. "": a caller in this process.
current_client: ContextVar[str] = ContextVar("jpaged_client", default="")


@dataclasses.dataclass(frozen=True, slots=True)
class Requester:
    """A request that waits for work.

    client:   its client: clients take turns.
    has_left: returns True once the request has ended. Any thread calls it.
    """

    client: str = ""
    has_left: Callable[[], bool] = lambda: False


ANYONE = Requester()  # never leaves
