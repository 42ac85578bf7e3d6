"""Messages between the engine's process and a front end.

A frame is 4 bytes of length, 1 byte of kind, and the content:

TOKENS:  int32[2, N]: numbers of requests, and a new token of each. For plain streams, which are nearly all.
MESSAGE: a pickled message of this module. The engine's process accepts the classes of ALLOWED only, because a front end
         reads what strangers send.
"""

import dataclasses
import pickle
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from jpaged import unpickling
from jpaged.engine.engine import Output
from jpaged.errors import CapacityError, EngineError, JPagedError, ModelLoadError, NoWeightsError, RequestError
from jpaged.lora.request import LoRARequest
from jpaged.params.pooling import PoolingParams
from jpaged.params.sampling import SamplingParams

TOKENS, MESSAGE = 0, 1
HEAD = struct.Struct("<IB")
MAX_BYTES = 2**30  # of a frame: a longer one is an error of the program


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """Add a request. number: of the request in its front end. takes_tokens: the front end makes the text."""

    number: int
    request_id: str
    takes_tokens: bool
    prompt: dict[str, Any]  # token ids, and the salt and the prediction
    params: SamplingParams | PoolingParams
    client: str
    priority: int = 0
    refuse_cut: bool = False
    lora_request: LoRARequest | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """End a request. Its final output follows, unless the front end has forgotten it."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """A stop string has ended an answer after `num_tokens` tokens. Later tokens do not count."""

    number: int
    index: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the engine. identity: of the answer."""

    identity: int
    name: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call, or its error."""

    identity: int
    value: Any = None
    error: JPagedError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """Outputs and errors of requests, by number. None: the engine has accepted the request."""

    pairs: tuple[tuple[int, Output | JPagedError | None], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Draining:
    """All front ends begin or end to drain. From one of them, and then to all."""

    draining: bool


@dataclasses.dataclass(frozen=True, slots=True)
class AskReport:
    """The engine's process asks a front end for its report."""

    identity: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reported:
    """The report of a front end, for the one that asks. The engine's process does not read it."""

    identity: int
    report: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Fatal:
    """The engine has ended by itself. Nothing follows."""

    error: JPagedError


# Classes that a front end may send.
ALLOWED = {
    *(("jpaged.frontend.remote.messages", name) for name in ("Begin", "Abort", "Stop", "Call", "Draining", "Reported")),
    ("jpaged.lora.request", "LoRARequest"),
    ("jpaged.params.pooling", "PoolingParams"),
    ("jpaged.params.pooling", "PoolingTask"),
    ("jpaged.params.sampling", "SamplingParams"),
    ("jpaged.params.sampling", "RequestOutputKind"),
    ("jpaged.params.structured_outputs", "StructuredOutputsParams"),
    ("jpaged.params.reasoning_tags", "ReasoningTags"),
    ("jpaged.params.repetition_detection", "RepetitionDetectionParams"),
}


def message_of_front_end(content: bytes | memoryview) -> Any:
    """Return the message of a front end. Raises UnpicklingError for anything else."""
    return unpickling.load(content, ALLOWED, "a front end may not send {}")


def message_of_engine(content: bytes | memoryview) -> Any:
    """Return a message of the engine's process, which a front end trusts: its parent."""
    return pickle.loads(content)  # noqa: S301


def portable(error: JPagedError) -> JPagedError:
    """An error as another process can read it: of a class of `jpaged.errors`."""
    if isinstance(error.__cause__, NoWeightsError):  # of a failed step: the server answers with the cause
        return NoWeightsError(str(error.__cause__))
    if isinstance(error, CapacityError):  # the engine's own class, for a full queue
        return CapacityError(str(error), error.retry_after)
    if type(error) in (RequestError, EngineError, NoWeightsError, ModelLoadError):
        return error
    return EngineError(str(error))


def frame(message: object) -> bytes:
    """Return the frame of a message."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(content), MESSAGE) + content


def token_frame(numbers: Sequence[int], token_ids: Sequence[int]) -> bytes:
    """Return the frame of a step's tokens. numbers: of the request of each token."""
    content = array("i", numbers)
    content.extend(token_ids)
    return HEAD.pack(len(content) * content.itemsize, TOKENS) + content.tobytes()


def tokens_of(content: bytes | memoryview) -> tuple[Sequence[int], Sequence[int]]:
    """The numbers and the token ids of a TOKENS frame."""
    values = array("i")
    values.frombytes(content)
    count = len(values) // 2
    return values[:count], values[count:]


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and the content of each frame that `data` completes. Raises ValueError for a bad length.

        A caller that stops early gets the other frames from the next call.
        """
        rest = self._rest
        rest += data
        start, end = 0, len(rest)
        try:
            while end - start >= HEAD.size:
                length, kind = HEAD.unpack_from(rest, start)
                if length > MAX_BYTES:
                    raise ValueError(f"a frame of {length:,} bytes")
                first, stop = start + HEAD.size, start + HEAD.size + length
                if stop > end:
                    break
                start = stop
                yield kind, bytes(rest[first:stop])
        finally:
            del rest[:start]

    def rest(self) -> bytes:
        """The bytes of a frame that is not complete."""
        return bytes(self._rest)
