"""The tools of a request, as parsers see them: their names, and the types of their parameters.

Some dialects write values without quotes, so `5` may be a number or a string. The tool's JSON schema decides.
"""

import json
import re
from collections.abc import Mapping, Set
from typing import Any

from jpaged.parsers.json_text import MAX_SCALAR
from jpaged.parsers.pythonic import python_number, read_literal
from jpaged.parsers.scanner import Scanner

MAX_REFERENCES = 32  # nested references and alternatives of a schema that are followed
MAX_SCHEMAS = 256    # parts of a schema that are read for the types of one value
STRING = frozenset({"string"})
CONTAINERS = frozenset({"array", "object"})
NUMBERS = frozenset({"number", "integer"})
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})

_NUMBER = re.compile(r"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?+[0-9]++)?+")
_INTEGER = re.compile(r"-?+(?:0|[1-9][0-9]*+)")


class KnownTools:
    """The tools of a request. schemas: the JSON schema of each tool's parameters; may lack some tools."""

    def __init__(self, names: Set[str], schemas: Mapping[str, Mapping[str, Any]]):
        self._names = names
        self._schemas = schemas

    def __call__(self, name: str) -> bool:
        """Return True if the request has a tool with this name."""
        return name in self._names

    def keys(self, tool: str) -> set[str]:
        """Return the names of a tool's parameters, as a new set."""
        return set(self._schemas.get(tool, {}).get("properties") or ())

    def types(self, tool: str, key: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have. Empty: any type, because the schema does not say."""
        schema = self._schemas.get(tool, {})
        properties = schema.get("properties") or {}
        return schema_types(properties.get(key, schema.get("additionalProperties")), schema)


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows. Empty: it does not say. root: the schema that references point into."""
    return _types(schema, root, 0, {})


def _types(schema: Any, root: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """Each part is read once. Otherwise alternatives that refer to each other would take exponential time.

    known: the types of parts, by their id(). A part that is being read has none yet.
    """
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return frozenset()
    if id(schema) not in known and len(known) < MAX_SCHEMAS:
        known[id(schema)] = frozenset()
        known[id(schema)] = _types_of_part(schema, root, depth, known)
    return known.get(id(schema), frozenset())


def _types_of_part(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]
) -> frozenset[str]:
    given = schema.get("type")
    if given is not None:
        types = frozenset([given] if isinstance(given, str) else given)
        return types | {"null"} if schema.get("nullable") is True else types
    if isinstance(schema.get("$ref"), str):
        return _types(referenced(schema["$ref"], root), root, depth + 1, known)
    if "const" in schema or schema.get("enum"):
        return frozenset(map(_type_of, [schema["const"]] if "const" in schema else schema["enum"]))
    for several in ("anyOf", "oneOf"):
        if schema.get(several):
            parts = [_types(part, root, depth + 1, known) for part in schema[several]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    found = (_types(part, root, depth + 1, known) for part in schema.get("allOf") or ())
    return next(filter(None, found), frozenset())


def referenced(pointer: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that `#/$defs/name` points to. None if there is none."""
    found: Any = root
    for step in pointer.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def json_value(text: str, types: frozenset[str], outer: Scanner) -> str:
    """Return a value that was written without quotes as JSON: of one of `types` if possible, otherwise as it looks.

    Constants, containers and, if the value can only be a number, numbers may be written as in Python. Text that is
    nothing else is a string. outer: the answer's scanner, which counts the syntax tokens.
    """
    word = text.strip()
    allowed = types if "string" in types else TYPES
    if word in ("null", "None") and "null" in allowed:
        return "null"
    number = _NUMBER if "number" in allowed else _INTEGER if "integer" in allowed else None
    if number is not None and len(word) <= MAX_SCALAR and number.fullmatch(word):
        return word
    if types & NUMBERS and "string" not in types and (written := python_number(word)) is not None:
        return written
    if word.lower() in ("true", "false") and "boolean" in allowed:
        return word.lower()
    if (word.startswith("{") and "object" in allowed) or (word.startswith("[") and "array" in allowed):
        scanner, pieces = Scanner(), list[str]()
        scanner.feed(word)
        scanner.ended = True
        scanner.steps = outer.steps
        steps = read_literal(scanner, pieces.append)  # never yields, because the text is complete
        try:
            next(steps)
        except StopIteration as end:
            outer.steps = scanner.steps
            if end.value and not scanner.rest().strip():
                return "".join(pieces)
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {type(None): "null", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
