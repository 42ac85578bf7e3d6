"""Converts objects to the structs of their `type`, and renames errors' parameters to the request's fields."""

import functools
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from jpaged.errors import RequestError
from jpaged.serving.schemas.ignored_fields import log_ignored

T = TypeVar("T", bound=msgspec.Struct)

REFUSED = frozenset({"encrypted_content"})  # content that would be lost

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*?)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")


def read_item(where: str, given: Any, kinds: Mapping[str, type[T]], default: str | None = None) -> T:
    """Convert one object of a history to the struct of its type. Raises RequestError that names the field.

    Unknown fields are ignored, and logged once, except those in `REFUSED`.

    where:   name of the object in the request, for errors.
    kinds:   structs by type.
    default: the type of an object without one. None: it must have one.
    """
    if not isinstance(given, Mapping):
        raise RequestError(where, given, "must be an object")
    kind = given.get("type") or default
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(f"{where}.type", kind, f"is not supported here: must be one of {', '.join(kinds)}")
    struct = kinds[kind]
    unknown = {name for name in given.keys() - _names(struct) if given[name] is not None}
    if unknown:
        _refuse(where, given, unknown & REFUSED)
        log_ignored(unknown)
    return _convert(where, given, struct)


def convert(where: str, given: Any, struct: type[T]) -> T:
    """Convert decoded JSON to a struct. null means absent. Raises RequestError that names a wrong or unknown field."""
    _refuse(where, given, given.keys() - _names(struct))
    return _convert(where, given, struct)


def _refuse(where: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if given[name] is not None:
            raise RequestError(f"{where}.{name}", given[name], "is not supported here: leave it out")


def _convert(where: str, given: Any, struct: type[T]) -> T:
    if None in given.values():
        given = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(given, struct)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        what, path = (match["what"], match["path"]) if match else (str(error), None)
        if missing := _MISSING.match(what):
            path, what = missing["name"], "Is missing"
        reason = what[0].lower() + what[1:].replace("`", "'")
        raise RequestError(f"{where}.{path}" if path else where, given.get(path), reason) from None


@functools.cache
def _names(struct: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of a struct's fields in JSON. Listing the fields takes 25 us: too much for 40,000 parts."""
    return frozenset(name for field in msgspec.structs.fields(struct) for name in (field.name, field.encode_name))


@contextmanager
def renamed(rules: Sequence[tuple[str, str]]) -> Generator[None]:
    """Context manager that renames a RequestError's parameter by the first rule that matches: (regex, replacement)."""
    try:
        yield
    except RequestError as error:
        for pattern, replacement in rules:
            name, count = re.subn(pattern, replacement, error.parameter)
            if count:
                raise RequestError(name, error.value, error.accepted) from None
        raise
