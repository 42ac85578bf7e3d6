"""`Requester`: the client of a request that waits for a grammar. Clients take turns. Ended requests are dropped."""

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar

# The server sets it for each request: the client's API key or its address. "": a caller in this process.
current_client: ContextVar[str] = ContextVar("jpaged_client", default="")


@dataclasses.dataclass(frozen=True, slots=True)
class Requester:
    """A request that waits for work. has_left: returns True once the request has ended; any thread may call it."""

    client: str = ""
    has_left: Callable[[], bool] = lambda: False


ANYONE = Requester()  # never leaves
