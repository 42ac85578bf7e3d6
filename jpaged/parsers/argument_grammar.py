"""Grammars for forced calls of dialects that have a tag around each argument, and strings without quotes.

The grammar writes the declared properties, in their order. Schemas that need more cannot be enforced in such a dialect:
then the call is forced in JSON.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jpaged.parsers.call_frame import Tags, literal
from jpaged.parsers.definitions import without_annotations
from jpaged.parsers.known_tools import referenced, schema_types

# White space as chat templates and `json.dumps` write it. Models were trained on it, and it is bounded.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_RULES_LENGTH = 65_536  # characters; the default of `max_grammar_bytes`, over which a grammar is refused
SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})

_KEY = re.compile(r"[^<>\"\n]{1,256}")  # as the parser reads it
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}


def declared_properties(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the properties of an object's schema without annotations. None if it has other rules than them."""
    root = without_annotations(schema)
    properties, required = root.get("properties") or {}, root.get("required") or []
    if not root.keys() <= _OBJECT_KEYS or not set(required) <= properties.keys():
        return None
    return dict(properties)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return Lark for a value in JSON."""
    return "%json " + json.dumps({**schema, "x-guidance": SPACING})


def raw_strings(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[str] | None:
    """Return the strings that a schema allows as they are, without quotes; [] for any text.

    None if it allows no strings, or not all its rules hold for every text that is written so.
    """
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and depth < 8:
        return raw_strings(referenced(schema["$ref"], root), root, depth + 1)
    if schema in (None, True, {}):
        return []
    types = schema_types(schema, root)
    if not isinstance(schema, Mapping) or "string" not in types:
        return None
    given = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if given is not None:
        return list(given) if schema.keys() <= {"type", "enum", "const"} and types == {"string"} else None
    parts = schema.get("anyOf") or schema.get("oneOf") or [schema]
    simple = all(isinstance(part, Mapping) and part.keys() <= {"type", "nullable"} for part in parts)
    plain = schema.keys() <= {"type", "nullable", "anyOf", "oneOf"}
    return [] if simple and plain and types <= SCALARS else None


def too_long(rules: list[str]) -> bool:
    """True if a grammar with these rules is over its limit, so that more of them are not worth writing."""
    return sum(map(len, rules)) > MAX_RULES_LENGTH


class TaggedArguments:
    """Grammar of arguments with a tag around each: `opening VALUE closing` for each property.

    string, other: opening texts of a string without quotes, and of JSON; `$` is the key.
    closing:       text after a value. `end` in it ends a string: a string without quotes cannot contain it.
    """

    def __init__(self, string: str, closing: str, end: str, *, other: str | None = None):
        self._openings = {True: string, False: string if other is None else other}
        self._closing = closing
        self._end = end

    def __call__(self, rule: str, schema: Mapping[str, Any], tags: Tags) -> list[str] | None:
        """Return the rules of a tool's arguments, beginning with `rule`. None if they cannot be enforced."""
        properties = declared_properties(schema)
        if properties is None:
            return None
        root, required = without_annotations(schema), schema.get("required") or []
        names, rules = list[str](), list[str]()
        for i, (key, given) in enumerate(properties.items()):
            written = self._property(f"{rule}_{i}", key, given, root, tags)
            if written is None or too_long(rules):
                return None
            names.append(f"{rule}_{i}" if key in required else f"{rule}_{i}?")
            rules += written
        return [f"{rule}: {' '.join(names) or literal('')}", *rules]

    def _property(self, rule: str, key: str, schema: Any, root: Mapping[str, Any], tags: Tags) -> list[str] | None:
        if not _KEY.fullmatch(key):
            return None
        strings = raw_strings(schema, root)
        opening = tags.lark(self._openings[strings is not None].replace("$", key))
        after = self._closing.partition(self._end)[2]
        rest = f" {tags.lark(after)}" if after else ""
        if strings is None:
            if "string" in schema_types(schema, root) or not schema_types(schema, root):
                return None
            full = {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}}
            return [f"{rule}: {opening} {rule}_value {tags.lark(self._closing)}", f"{rule}_value: {json_rule(full)}"]
        if strings:
            if any(self._end in text or text != text.strip() for text in strings):
                return None
            values = " | ".join(map(literal, strings))
            return [f"{rule}: {opening} ({values}) {tags.lark(self._closing)}"]
        if tags.has_special(self._end):
            text = f"{rule}_text: TEXT {tags.lark(self._end)}"
        else:
            text = f"{rule}_text[lazy]: TEXT {literal(self._end)}"
        return [f"{rule}: {opening} {rule}_text{rest}", text]


TEXT_RULE = r"TEXT: /(.|\n)*/"
