"""Unknown fields of messages, which clients copy from other APIs. They are ignored, and each name is logged once.

Unknown fields of the body itself are errors, because they ask for something. Those of a message describe it.
"""

import functools
import logging
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

logger = logging.getLogger("jpaged.serving")

MAX_NAMES = 256  # that are logged by one server
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
    """Return the names of unknown fields of the messages of a body, and of their parts and calls. At most MAX_NAMES.

    raw: a body that was decoded as `schema` without an error.
    """
    if MESSAGES not in schema.__struct_fields__:
        return []
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    found: set[str] = set()
    if MESSAGES in fields:
        _visit(fields[MESSAGES], _levels(schema).fields[MESSAGES], found)
    return sorted(found)


class _Level(NamedTuple):
    """The fields of objects at one place of a message. fields: with those of the objects below, if they have any."""

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
    """Return the fields of a type, and of the objects below it. Nothing is below a field of any JSON."""
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
