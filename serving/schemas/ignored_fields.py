"""Unknown fields of messages, which clients copy from other APIs. They are ignored, and each name is logged once.

Unknown fields of the body itself are errors, because they ask for something. Fields of a message only describe it.
"""

import functools
import logging
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

logger = logging.getLogger("jpaged.serving")

MAX_NAMES = 256  # logged by one server
MAX_CHARACTERS = 64  # of a name
MESSAGES = "messages"  # the field of a body

_logged: set[str] = set()


def log_ignored(names: Collection[str]) -> None:
    """Log names of fields that are ignored, each once."""
    for name in names:
        shown = "".join(char if char.isprintable() else "?" for char in name[:MAX_CHARACTERS])
        if shown not in _logged and len(_logged) < MAX_NAMES:
            _logged.add(shown)
            logger.info("ignored the field %s of a message: it is not known here (logged once)", shown)


def ignored_fields(raw: bytes, schema: type[msgspec.Struct]) -> list[str]:
    """Return up to MAX_NAMES unknown fields of a body's messages, parts and calls. raw: a valid body of `schema`."""
    if MESSAGES not in schema.__struct_fields__:
        return []
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    found: set[str] = set()
    if MESSAGES in fields:
        _visit(fields[MESSAGES], _levels(schema).fields[MESSAGES], found)
    return sorted(found)


class _Level(NamedTuple):
    """Known fields of the objects at one level of a message. fields: each with the level of the objects in it."""

    fields: "dict[str, _Level]"


def _visit(raw: msgspec.Raw, level: _Level, found: set[str]) -> None:
    """Add the unknown fields of an object, or of objects in lists."""
    if not level.fields:
        return
    first = memoryview(raw)[0]
    if first == ord("["):
        for one in msgspec.json.decode(raw, type=list[msgspec.Raw]):
            _visit(one, level, found)
    if first != ord("{"):
        return
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        below = level.fields.get(name)
        if below is not None:
            _visit(value, below, found)
        elif len(found) < MAX_NAMES and bytes(value) != b"null":
            found.add(name[:MAX_CHARACTERS])


@functools.cache
def _levels(schema: type[msgspec.Struct]) -> _Level:
    return _level(msgspec.inspect.type_info(schema))


def _level(kind: Any) -> _Level:
    """Return the known fields of a type, and of nested objects. A field of any JSON type has none."""
    match kind:
        case msgspec.inspect.Metadata():
            return _level(kind.type)
        case msgspec.inspect.ListType():
            return _level(kind.item_type)
        case msgspec.inspect.UnionType():
            return _Level({name: level for each in kind.types for name, level in _level(each).fields.items()})
        case msgspec.inspect.StructType():
            return _Level({field.encode_name: _level(field.type) for field in kind.fields})
    return _Level({})
