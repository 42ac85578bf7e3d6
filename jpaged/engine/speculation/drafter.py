"""The protocol of a drafter that runs on the host. Users may implement it too."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jpaged.engine.request import Request


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens that may follow a request's known tokens. One object serves all requests of an engine.

    All methods run on the engine's thread, between two steps: their time is added to the time of the step. They must
    return within tens of microseconds, because a step calls `propose` once for each row. They read requests and never
    write to them. A draft that is not accepted costs time and changes no answer.

    A drafter may keep data for a request, with the request as the key, until `note_end`. Nothing announces a new
    request: its first call is `propose`.
    """

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """Propose tokens that may follow `request.token_ids`.

        count: most tokens to propose, at least 1. It includes the tokens in flight, which the device has sampled and
            `request.token_ids` does not have yet.

        Returns at most `count` token ids, in order: 0 <= id < vocabulary size. An empty sequence means no draft.
        Calls with the same known tokens may return different drafts.
        """
        ...

    def note_end(self, request: Request) -> None:
        """Note that a request has ended. The drafter drops the request's data. Unknown requests are ignored."""
        ...

    def forget(self) -> None:
        """Drop all data about all requests: the engine starts over, or has new weights. Running requests go on."""
        ...
