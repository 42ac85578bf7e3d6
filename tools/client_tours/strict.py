"""Validate the raw JSON of every answer and every stream event strictly, with the official client's own types.

`Recorder` and `AsyncRecorder` are transports of httpx2, the HTTP library of the official clients. They copy answers.
`Validator.validate` checks the copies: strict types, no missing field, and no extra field outside `known_extras`.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pydantic
from checks import Checks


@dataclasses.dataclass
class Answer:
    """A recorded answer. If the client stopped reading a stream early, its body ends anywhere."""

    method: str
    path: str
    status: int
    content_type: str
    body: bytearray = dataclasses.field(default_factory=bytearray)


class _Copy(httpx2.SyncByteStream):
    def __init__(self, stream: Any, answer: Answer):
        self._stream, self._answer = stream, answer

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._answer.body += part
            yield part

    def close(self) -> None:
        self._stream.close()


class _AsyncCopy(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, answer: Answer):
        self._stream, self._answer = stream, answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._answer.body += part
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _answer(request: Any, response: Any) -> Answer:
    content_type = response.headers.get("content-type", "")
    return Answer(request.method, request.url.path, response.status_code, content_type)


class Recorder(httpx2.BaseTransport):

    def __init__(self, answers: list[Answer]):
        self._inner, self._answers = httpx2.HTTPTransport(), answers

    def handle_request(self, request: Any) -> Any:
        response = self._inner.handle_request(request)
        self._answers.append(_answer(request, response))
        response.stream = _Copy(response.stream, self._answers[-1])
        return response

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


class AsyncRecorder(httpx2.AsyncBaseTransport):
    """The asyncio version of `Recorder`."""

    def __init__(self, answers: list[Answer]):
        self._inner, self._answers = httpx2.AsyncHTTPTransport(), answers

    async def handle_async_request(self, request: Any) -> Any:
        """Send the request and return its answer, which is copied while the client reads it."""
        response = await self._inner.handle_async_request(request)
        self._answers.append(_answer(request, response))
        response.stream = _AsyncCopy(response.stream, self._answers[-1])
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


@dataclasses.dataclass(frozen=True)
class Route:
    """Types of the answers of one route."""

    method: str
    path: str  # a regular expression
    body: Any = None
    event: Callable[[dict[str, Any]], Any] | None = None  # type of a stream's event
    prepare: Callable[[dict[str, Any], bool], dict[str, Any]] | None = None  # (document, is an event) before validation


class Validator:
    """Validates and counts recorded answers. `extras` collects the known extra fields that appeared."""

    def __init__(self, routes: list[Route], error: Any, known_extras: set[str]):
        self._routes, self._error, self._known = routes, error, known_extras
        self.bodies = self.events = self.errors = 0
        self.extras: set[str] = set()

    def validate(self, answers: list[Answer]) -> None:
        """Validate the answers and clear the list. Raises AssertionError or pydantic's ValidationError."""
        taken = answers.copy()
        answers.clear()
        for answer in taken:
            if answer.status >= 400:
                self._strict(self._error, json.loads(answer.body))
                self.errors += 1
                continue
            assert answer.status == 200, f"{answer.path}: status {answer.status}"
            route = next(
                (r for r in self._routes if r.method == answer.method and re.fullmatch(r.path, answer.path)), None
            )
            assert route is not None, f"no type is known for {answer.method} {answer.path}"
            if answer.content_type.startswith("text/event-stream"):
                self._stream(route, answer)
            else:
                assert answer.content_type.startswith("application/json"), answer.content_type
                self._document(route, route.body, json.loads(answer.body), is_event=False)
                self.bodies += 1

    def _stream(self, route: Route, answer: Answer) -> None:
        assert route.event is not None, f"{answer.path} has no stream"
        for block in bytes(answer.body).split(b"\n\n")[:-1]:
            for line in block.decode().split("\n"):
                field, _, data = line.partition(": ")
                assert field in ("data", "event"), f"unknown line of a stream: {line!r}"
                if field == "data" and data != "[DONE]":
                    document = json.loads(data)
                    if "error" in document and "type" not in document:
                        raise AssertionError(f"the stream has an error: {document}")
                    self._document(route, route.event(document), document, is_event=True)
                    self.events += 1

    def _document(self, route: Route, kind: Any, document: dict[str, Any], *, is_event: bool) -> None:
        if route.prepare is not None:
            document = route.prepare(document, is_event)
        self._strict(kind, document)

    def _strict(self, kind: Any, document: dict[str, Any]) -> None:
        made = pydantic.TypeAdapter(kind).validate_json(json.dumps(document), strict=True)
        unknown = {name for name in _extras(made) if name not in self._known}
        assert not unknown, f"fields that the client's types lack: {sorted(unknown)}"
        self.extras |= set(_extras(made))


def _extras(value: Any) -> Iterator[str]:
    """Yield TYPE.FIELD for each extra field, in all objects of the value."""
    if isinstance(value, pydantic.BaseModel):
        for name in value.model_extra or ():
            yield f"{type(value).__name__}.{name}"
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _extras(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _extras(item)


class StrictChecks(Checks):
    """Checks that also validate every answer that the block received. `answers` is for the recorders."""

    def __init__(self, routes: list[Route], error: Any, known_extras: set[str]):
        super().__init__()
        self.answers: list[Answer] = []
        self._validator = Validator(routes, error, known_extras)

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Record the block as passed if it raises nothing and all its answers are valid."""
        with super().check(name):
            try:
                yield
                assert self.answers, "no answer was recorded"
                self._validator.validate(self.answers)
            finally:
                self.answers.clear()

    def write(self) -> None:
        """Write the result file, with the number of validated answers and the known extra fields that appeared."""
        found = self._validator
        self.extra["validated"] = {"bodies": found.bodies, "events": found.events, "errors": found.errors}
        self.extra["known_extra_fields"] = sorted(found.extras)
        super().write()
