"""The errors that jpaged raises on purpose. Each message says what to change."""

import difflib
import reprlib
from collections.abc import Iterable

SHOWN = 200  # characters of a value that a message repeats
LONGEST = 2000  # characters of the message of a ModelLoadError
MAX_INTEGER = 2**31 - 1  # largest integer of any parameter but seed: larger ones do not fit into the device's int32


class _Shortened(reprlib.Repr):
    """A `repr` of limited length: a prompt may be a list of millions of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= SHOWN else f"an integer of {x.bit_length():,} bits"


_shortened = _Shortened()


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, cut to SHOWN characters."""
    return _cut(_shortened.repr(value))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text for a message, cut to SHOWN characters; its type if it has no text."""
    lines = str(error).strip().splitlines()
    return _cut(lines[0] if lines else type(error).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


# A reason that starts with one of these words is a sentence about the parameter, and follows it without a colon.
_VERBS = frozenset({
    "allows", "and", "are", "cannot", "comes", "cuts", "does", "draws", "gives", "goes", "hands", "has", "have", "is",
    "leaves", "mixes", "must", "needs", "sets", "takes", "uses",
})  # fmt: skip


class JPagedError(Exception):
    """Base of all errors that jpaged raises on purpose."""


class RequestError(JPagedError, ValueError):
    """A request with an invalid parameter (HTTP 400).

    parameter: name of the field, as the caller wrote it.
    value:     the invalid value.
    accepted:  the reason: the problem, the accepted values, or the change to make.

    The message is "parameter reason, got value", as in "temperature must be at least 0, got -1.0". The value is last,
    because it may be long.
    """

    def __init__(self, parameter: str, value: object, accepted: str):
        self.parameter = _cut(parameter)  # a request may have a field with a name of megabytes
        self.value = value
        self.accepted = accepted
        verb = accepted.partition(" ")[0] in _VERBS
        self.without_value = f"{self.parameter}{'' if verb else ':'} {accepted}"  # the message in logs
        missing = value is None and not verb  # "model: name a model"
        super().__init__(self.without_value + ("" if missing else f", got {shown(value)}"))

    def __reduce__(self) -> tuple[type["RequestError"], tuple[str, object, str]]:
        """Copying and pickling call the constructor again."""
        return type(self), (self.parameter, self.value, self.accepted)


class CapacityError(JPagedError):
    """The queue is full (HTTP 503). `retry_after`: seconds after which to try again."""

    def __init__(self, message: str, retry_after: float = 1.0):
        self.retry_after = retry_after
        super().__init__(message)


class ModelLoadError(JPagedError):
    """A model cannot be loaded. The message names the file, the tensor or key, and what to change.

    The middle of a long message is left out: the names and values of a hostile checkpoint may have megabytes.
    """

    def __init__(self, message: str):
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
        super().__init__(message)


class EngineError(JPagedError):
    """The engine failed: a bug in jpaged, or a device error."""


class NoWeightsError(EngineError):
    """The engine has no weights, or not all of them, until the next `update_weights` (HTTP 503)."""

class LogitsError(EngineError):
    """The model returned NaN or infinite logits for a request."""

    message = (
        "the model's logits are not finite (NaN or infinity): its weights are damaged, or numbers exceed the dtype. "
        "Fetch the model again, or use dtype=bfloat16 or float32"
    )

    def __init__(self) -> None:
        super().__init__(self.message)


def unknown_field(parameter: str, name: object, value: object, known: Iterable[str]) -> RequestError:
    """Make the error for an unknown field `name` of the mapping `parameter`. It suggests the most similar field."""
    known = list(known)
    close = difflib.get_close_matches(str(name)[:SHOWN], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(known)
    return RequestError(f"{parameter}.{name}", value, f"unknown field; {hint}")


def unknown_name(parameter: str, name: object, known: Iterable[str], more: str = "") -> RequestError:
    """Make the error for a name that is not among `known`. It lists them, and suggests the most similar one."""
    known = list(known)
    close = difflib.get_close_matches(str(name)[:SHOWN], known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return RequestError(parameter, name, f"must be one of {', '.join(known)}{hint}{more}")
