"""Reads a request's JSON body into a struct. Errors name the invalid field."""

import difflib
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from jpaged.errors import RequestError
from jpaged.serving.error_responses import APIError, ClientDisconnected
from jpaged.serving.request_schema import EmbeddingRequest, GenerationRequest

Body = TypeVar("Body", bound=GenerationRequest | EmbeddingRequest)

MAX_BODY_BYTES = 32 * 2**20

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*?)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>[^`]*)`")


async def read_body(request: Request, schema: type[Body]) -> Body:
    """Read the body of a request as `schema`.

    Raises RequestError that names the field, APIError with status 413 for a body of more than MAX_BODY_BYTES, and
    ClientDisconnected if the client disconnects before the body's end.
    """
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise APIError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return decode_body(b"".join(chunks), schema)


def decode_body(raw: bytes, schema: type[Body]) -> Body:
    """Decode JSON bytes as `schema`. null means that the field is absent. Raises RequestError that names the field."""
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("body", _shown(raw[:80]), f"must be JSON: {error}") from None
    if not isinstance(document, dict):
        raise RequestError("body", document, "must be a JSON object")
    known = set(schema.__struct_fields__)
    fields = {}
    for name, value in document.items():
        if value is None:
            continue
        if name in known:
            fields[name] = value
        elif name in schema.NEUTRAL:
            _check_neutral(name, value, schema.NEUTRAL[name])
        else:
            close = difflib.get_close_matches(name, known, n=1)
            raise RequestError(name, value, "unknown field" + (f": did you mean {close[0]}?" if close else ""))
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), fields) from None
    except RecursionError:
        raise RequestError("body", _shown(raw[:80]), "is nested too deeply") from None


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    for accepted in neutral:
        if value == accepted and isinstance(value, bool) == isinstance(accepted, bool):
            return
    listed = ", ".join(msgspec.json.encode(accepted).decode() for accepted in neutral)
    raise RequestError(name, value, "not supported yet; leave it out" + (f" or send {listed}" if listed else ""))


def _field_error(message: str, document: dict[str, Any]) -> RequestError:
    """Convert msgspec's message ("Expected `int`, got `str` - at `$.a[0].b`") to a RequestError."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    path = path.split("[...]")[0]  # msgspec does not name the key of a mapping: name the mapping and show it
    value: Any = document
    for key in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, ValueError, IndexError, TypeError):
            break
    field = _FIELD.search(what)
    if field:
        path = f"{path}.{field['name']}" if path else field["name"]
        value = value.get(field["name"]) if isinstance(value, dict) else None
    return RequestError(path or "body", value, what[0].lower() + what[1:].replace("`", "'"))


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
