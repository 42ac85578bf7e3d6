"""The errors a user can meet. Every one says what to change."""

import difflib
import reprlib
from collections.abc import Iterable

SHOWN = 200  # characters of a value that a message repeats


class _Shortened(reprlib.Repr):
    """`repr` that stops early: a prompt may be a list of millions, and a message repeats some of it only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= SHOWN else f"an integer of {x.bit_length():,} bits"


_shortened = _Shortened()


class JPagedError(Exception):
    """Base of all errors that jpaged raises on purpose."""


class RequestError(JPagedError, ValueError):
    """A request that cannot be served as asked: the caller's fault (HTTP 400).

    parameter: name of the offending field, as the caller wrote it.
    value:     what was given.
    accepted:  what would have been accepted, or what to change; completes the message.
    """

    def __init__(self, parameter: str, value: object, accepted: str):
        self.parameter = parameter
        self.value = value
        self.accepted = accepted
        shown = _shortened.repr(value)
        if len(shown) > SHOWN:
            shown = shown[:SHOWN] + "…"
        super().__init__(f"{parameter}={shown}: {accepted}")


class CapacityError(JPagedError):
    """The engine is full at the moment (HTTP 503). `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0):
        self.retry_after = retry_after
        super().__init__(message)


class ModelLoadError(JPagedError):
    """A model cannot be loaded. The message names the file, the tensor or key, and the remedy."""


class EngineError(JPagedError):
    """The engine cannot go on: a bug in jpaged, or a device that failed."""


def unknown_field(parameter: str, name: object, value: object, known: Iterable[str]) -> RequestError:
    """For a field that `parameter`, a mapping of fields, does not have; with the known one that is most alike."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(known)
    return RequestError(f"{parameter}.{name}", value, f"unknown field; {hint}")
