"""Reads a request's JSON body into a struct. Errors name the invalid field.

A body of more than `INLINE_BYTES` is checked by a child process first (`body_process.py`), because checking holds the
interpreter's lock. The server itself only decodes bodies that are within all limits.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from jpaged.errors import SHOWN, CapacityError, RequestError
from jpaged.serving.schemas.bodies import INVOCATION, body_schema
from jpaged.serving.schemas.ignored_fields import ignored_fields, log_ignored
from jpaged.serving.schemas.requests import SizeLimits
from jpaged.serving.web.address import address_key
from jpaged.serving.web.body_process import check_in_process
from jpaged.serving.web.body_size import count_values
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.error_responses import APIError, ClientDisconnected

Body = TypeVar("Body", bound=SizeLimits)

MAX_BODY_BYTES = 16 * 2**20  # decoding that many bytes takes at most 60 ms
INLINE_BYTES = 256 * 1024  # decoding this many bytes takes at most 10 ms
MAX_WAITING_BYTES = 512 * 2**20  # of all bodies above INLINE_BYTES that are being received or checked
MAX_FIELDS = 1_000  # of the body itself; the API has about 100
MAX_FIELD_NAME = 64  # characters of a name for which a similar one is suggested
MAX_SHOWN_BYTES = 65_536  # a longer value is not decoded for an error message
MAX_MESSAGE = 4_096  # characters read at each end of msgspec's message, which contains the whole wrong value

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*?)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")
_LENGTH = re.compile(r"^Expected `(?P<type>array|object|str)` of length (?P<sign><=|>=) (?P<limit>\d+)$")
_UNITS = {"array": "items", "object": "entries", "str": "characters"}
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


async def read_body(request: Request, schema: type[Body]) -> Body:
    """Read the body of a request as `schema`.

    Raises RequestError that names the field, and APIError 413 for a body of more than MAX_BODY_BYTES. Raises
    CapacityError if other requests have too many large bodies, and ClientDisconnected if the client has left.
    """
    return await _read(request, schema.__name__, lambda raw: schema)


async def read_invocation(request: Request, task: str) -> SizeLimits:
    """Read a body as the struct that its fields determine. task: of the engine. Errors as `read_body`."""
    name = INVOCATION + task
    return await _read(request, name, lambda raw: body_schema(name, raw))


async def _read(request: Request, name: str, choose: Callable[[bytes], type[Body]]) -> Body:
    """Read a body as the struct that `choose` returns for it. name: of the struct, for `body_schema`."""
    too_large = APIError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > MAX_BODY_BYTES):
        raise too_large
    chunks, size = [], 0
    with _LargeBody(address_key(request.client.host) if request.client else "") as large:
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise too_large
                if size > INLINE_BYTES:
                    large.grow(size)
                chunks.append(chunk)
        except ClientDisconnect:
            raise ClientDisconnected from None
        raw = b"".join(chunks)
        chunks.clear()
        if len(raw) <= INLINE_BYTES:
            schema = choose(raw)
            body = decode_body(raw, schema)
            log_ignored(ignored_fields(raw, schema))
            return body
        log_ignored(await until_disconnect(request.receive, check_in_process(raw, name)))
        return msgspec.json.decode(raw, type=choose(raw))


class _LargeBody:
    """Counts the bytes of a large body until it is decoded. Small bodies are not counted.

    An address may have at most the number of bytes that stay free. So the first gets half of all, the next a quarter.
    """

    sizes: ClassVar[Counter[str]] = Counter()  # address -> bytes of its large bodies

    def __init__(self, address: str) -> None:
        self._address = address
        self._size = 0

    def grow(self, size: int) -> None:
        """Count the body with `size` bytes. Raises CapacityError if the bodies of its address have too many."""
        self.sizes[self._address] += size - self._size
        self._size = size
        free = MAX_WAITING_BYTES - self.sizes.total()
        if self.sizes[self._address] > free:
            held = f"the server is reading large bodies, which leave {max(free, 0):,} bytes for one address"
            raise CapacityError(f"{held}: send a smaller body, or send it later")

    def __enter__(self) -> "_LargeBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.sizes[self._address] -= self._size
        if not self.sizes[self._address]:
            del self.sizes[self._address]


def decode_body(raw: bytes, schema: type[Body]) -> Body:
    """Decode JSON bytes as `schema`. null means that the field is absent. Raises RequestError that names the field."""
    large = len(raw) > INLINE_BYTES
    if large:
        _check_counts("body", raw, schema.MAX_BODY_VALUES)
    fields = _fields(raw)
    for name, value in fields.items():
        if name in schema.__struct_fields__:
            _check_size(name, value, schema, counted=large)
        elif bytes(value) != b"null":
            _check_other(name, value, schema)
    try:
        return msgspec.json.decode(raw, type=schema)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), fields, schema) from None
    except _DECODE_ERRORS as error:
        raise _not_json(raw, error) from None


def _fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """Return the JSON of each field of the body, without decoding or copying it."""
    try:
        raw.decode()  # checks UTF-8: msgspec does not check text that it skips
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise RequestError("body", _shown(raw), "must be a JSON object") from None
    except _DECODE_ERRORS as error:
        raise _not_json(raw, error) from None


def _check_counts(name: str, raw: bytes, limit: int) -> None:
    counts = count_values(raw)
    if counts.values > limit:
        raise RequestError(name, f"{len(raw):,} bytes", f"has {counts.values:,} values, at most {limit:,}")
    if name == "body" and counts.fields > MAX_FIELDS:
        raise RequestError(name, f"{len(raw):,} bytes", f"has {counts.fields:,} fields, at most {MAX_FIELDS:,}")


def _check_size(name: str, raw: msgspec.Raw, schema: type[Body], *, counted: bool) -> None:
    """Check the size of a known field before it is decoded. counted: the body is so large that values are counted."""
    view = memoryview(raw)
    most = schema.MAX_BYTES.get(name, MAX_BODY_BYTES)
    if len(view) > most:
        raise RequestError(name, f"{len(view):,} bytes", f"must have at most {most:,} bytes")
    if counted and len(view) > schema.MAX_VALUES:
        _check_counts(name, bytes(view), schema.MANY_VALUES.get(name, schema.MAX_VALUES))


def _check_other(name: str, raw: msgspec.Raw, schema: type[Body]) -> None:
    """Refuse an unknown field, and a field that is not supported yet if its value is not neutral."""
    value = _value(raw)
    if name in schema.NEUTRAL and (name not in schema.MISPLACED or value in schema.NEUTRAL[name]):
        _check_neutral(name, value, schema.NEUTRAL[name])
        return
    if name in schema.MISPLACED:
        raise RequestError(name, value, f"is a field of {schema.MISPLACED[name]}: send the request there")
    if name.startswith("guided_"):  # vLLM's names before 0.12
        kind = name.removeprefix("guided_")[:MAX_FIELD_NAME]
        raise RequestError(name, value, f'not a field any more: send structured_outputs: {{"{kind}": ...}}')
    close = difflib.get_close_matches(name, schema.__struct_fields__, n=1) if len(name) <= MAX_FIELD_NAME else []
    raise RequestError(name, value, "unknown field" + (f" (did you mean {close[0]}?)" if close else ""))


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    for accepted in neutral:
        if value == accepted and isinstance(value, bool) == isinstance(accepted, bool):
            return
    listed = ", ".join(msgspec.json.encode(accepted).decode() for accepted in neutral)
    state = "is for the operator, who sets --chat-template" if name == "chat_template" else "is not supported yet"
    raise RequestError(name, value, f"{state}: leave it out" + (f", or send {listed}" if listed else ""))


def _field_error(message: str, fields: dict[str, msgspec.Raw], schema: type[Body]) -> RequestError:
    """Convert msgspec's message ("Expected `int`, got `str` - at `$.a[0].b`") to a RequestError."""
    if len(message) > 2 * MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}...{message[-MAX_MESSAGE:]}"
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    path = path.split("[...]")[0]  # msgspec does not name the key of a mapping: name the mapping and show it
    first, *keys = re.findall(r"[^.\[\]]+", path) or [""]
    value: Any = _value(fields[first]) if first in fields else {}
    for key in keys:
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, ValueError, IndexError, TypeError):
            break
    field = _FIELD.search(what)
    if field:
        path = f"{path}.{field['name']}" if path else field["name"]
        value = value.get(field["name"]) if isinstance(value, dict) else None
    reason = what[0].lower() + what[1:].replace("`", "'")
    if what.startswith("Invalid enum value"):
        choices = [repr(choice) for choice in _choices(msgspec.inspect.type_info(schema), [first, *keys])]
        reason = f"must be {'one of ' * (len(choices) > 1)}{', '.join(choices)}"
    if length := _LENGTH.match(what):
        bound = "at most" if length["sign"] == "<=" else "at least"
        reason = f"must have {bound} {int(length['limit']):,} {_UNITS[length['type']]}"
    return RequestError(path or "body", value, reason)


def _choices(found: msgspec.inspect.Type, path: list[str]) -> list[Any]:
    """Return the values that a field accepts, if it is a choice. path: the body's field, and the keys inside it."""
    match found:
        case msgspec.inspect.UnionType():
            return [value for each in found.types for value in _choices(each, path)]
        case msgspec.inspect.Metadata():
            return _choices(found.type, path)
        case msgspec.inspect.LiteralType() if not path:
            return list(found.values)
        case msgspec.inspect.BoolType() if not path:
            return [True, False]
        case msgspec.inspect.ListType() if path:
            return _choices(found.item_type, path[1:] if path[0].isdigit() else path)
        case msgspec.inspect.StructType() if path:
            types = [each.type for each in found.fields if each.encode_name == path[0]]
            return [value for each in types for value in _choices(each, path[1:])]
    return []


def _value(raw: msgspec.Raw) -> Any:
    """Return the value of a field for an error message: decoded, or the beginning of its JSON."""
    view = memoryview(raw)
    if len(view) > MAX_SHOWN_BYTES:
        return _shown(bytes(view[: SHOWN + 1]))
    try:
        return msgspec.json.decode(raw)
    except _DECODE_ERRORS as error:
        raise _not_json(bytes(view), error) from None


def _not_json(raw: bytes, error: Exception) -> RequestError:
    accepted = "is nested too deeply" if isinstance(error, RecursionError) else f"must be JSON: {error}"
    return RequestError("body", _shown(raw[:80]), accepted)


def _shown(raw: bytes) -> str:
    return raw[: SHOWN + 1].decode("utf-8", errors="replace")
