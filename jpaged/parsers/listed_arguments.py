"""Grammars for forced calls of dialects that write arguments as a list: `city="Oslo", days=3` or `city:<|"|>Oslo<|"|>`.

As `argument_grammar`: the declared properties in their order, and JSON if a schema needs more.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jpaged.parsers.argument_grammar import declared_properties, json_rule, raw_strings, too_long
from jpaged.parsers.call_frame import Tags, literal
from jpaged.parsers.definitions import without_annotations
from jpaged.parsers.known_tools import CONTAINERS, referenced, schema_types

MAX_DEPTH = 16  # of nested objects and lists

_KEY = re.compile(r"[A-Za-z_]\w*")
_LIST_KEYS = {"type", "items"}


class ListedArguments:
    """Grammar of a list of arguments.

    assign:  text between a key and its value.
    between: text between two arguments, and between two items of a list or an object.
    quote:   tag around strings, which are written as they are. "": all values are JSON.
    """

    def __init__(self, assign: str, between: str, quote: str = ""):
        self._assign = assign
        self._between = literal(between)
        self._quote = quote

    def __call__(self, rule: str, schema: Mapping[str, Any], tags: Tags) -> list[str] | None:
        """Return the rules of a tool's arguments, beginning with `rule`. None if they cannot be enforced."""
        return self._object(rule, schema, without_annotations(schema), tags, 0)

    def _object(
        self, rule: str, schema: Mapping[str, Any], root: Mapping[str, Any], tags: Tags, depth: int
    ) -> list[str] | None:
        """Return rules for the properties of an object, without its brackets."""
        properties = declared_properties(schema)
        if properties is None or depth > MAX_DEPTH or not all(map(_KEY.fullmatch, properties)):
            return None
        rules, items = list[str](), list[tuple[str, bool]]()
        for i, (key, given) in enumerate(properties.items()):
            written = self._value(f"{rule}_{i}", given, root, tags, depth + 1)
            if written is None or too_long(rules):
                return None
            rules += written
            items.append((f"{literal(key + self._assign)} {rule}_{i}", key in (schema.get("required") or [])))
        return [f"{rule}: {rule}_first_0", *_separated(rule, items, self._between), *rules]

    def _value(
        self, rule: str, schema: Any, root: Mapping[str, Any], tags: Tags, depth: int
    ) -> list[str] | None:
        if depth > MAX_DEPTH:
            return None
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and self._quote:
            return self._value(rule, referenced(schema["$ref"], root), root, tags, depth + 1)
        strings = raw_strings(schema, root) if self._quote else None
        if strings is not None:
            quote = tags.lark(self._quote)
            if strings:
                values = " | ".join(map(literal, strings))
                return None if any(self._quote in text for text in strings) else [f"{rule}: {quote} ({values}) {quote}"]
            if tags.has_special(self._quote):
                return [f"{rule}: {quote} {rule}_text", f"{rule}_text: TEXT {quote}"]
            return [f"{rule}: {quote} {rule}_text", f"{rule}_text[lazy]: TEXT {literal(self._quote)}"]
        types = schema_types(schema, root)
        if not self._quote:
            given = schema if isinstance(schema, Mapping) else {}
            shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return [f"{rule}: {json_rule({**given, **shared})}"]
        if not types or "string" in types or not isinstance(schema, Mapping):
            return None
        if not types & CONTAINERS:
            return [f"{rule}: {json_rule(schema)}"]
        if types == {"array"} and schema.keys() <= _LIST_KEYS:
            item = self._value(f"{rule}_item", schema.get("items"), root, tags, depth + 1)
            one = f"{rule}_item"
            return None if item is None else [f'{rule}: "[" ({one} ({self._between} {one})*)? "]"', *item]
        if types == {"object"}:
            inner = self._object(f"{rule}_in", schema, root, tags, depth)
            return None if inner is None else [f'{rule}: "{{" {rule}_in "}}"', *inner]
        return None


def _separated(rule: str, items: list[tuple[str, bool]], between: str) -> Iterator[str]:
    """Yield rules for items in their order, with `between` between two of them. `rule_first_0` is the whole list.

    items: Lark of each, and whether it is required.
    """
    for i, (item, required) in enumerate(items):
        first, more = ("", "") if required else (f" | {rule}_first_{i + 1}", f" | {rule}_more_{i + 1}")
        yield f"{rule}_first_{i}: {item} {rule}_more_{i + 1}{first}"
        if i:
            yield f"{rule}_more_{i}: {between} {item} {rule}_more_{i + 1}{more}"
    yield f"{rule}_first_{len(items)}: {literal('')}"
    if items:
        yield f"{rule}_more_{len(items)}: {literal('')}"
