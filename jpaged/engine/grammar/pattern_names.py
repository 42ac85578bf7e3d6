"""Finite `patternProperties`: their names become `properties`.

llguidance may write each of the names that a pattern matches again and again. If the pattern matches few names, all of
them may be written already when the grammar demands another one. Then the answer would fail, or have a name twice.
`properties` are written once each.
"""

import itertools
from collections.abc import Iterable
from re import _constants as ops  # ty: ignore
from re import _parser  # ty: ignore
from typing import Any

MAX_NAMES = 256  # of one pattern; a pattern of more names stays a pattern
_BEGIN, _END = object(), object()  # ^ and $

_Text = tuple[Any, ...]  # characters, _BEGIN and _END


def expand_finite_patterns(schema: dict[str, Any]) -> None:
    """Move the names of finite patterns to `properties`, after those that are there. Changes the schema in place.

    A property that a pattern matches as well must follow both schemas, so its pattern stays in `allOf`.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    for pattern in list(patterns):
        names = finite_names(pattern)
        if names is None or _may_repeat(schema, names):
            continue
        value = patterns.pop(pattern)
        properties = {**properties, **{name: _both(properties.get(name, True), value) for name in names}}
    schema["properties"] = properties
    if not patterns:
        del schema["patternProperties"]
    _require_all(schema)


def finite_names(pattern: str) -> list[str] | None:
    """Return the names that a pattern matches, in its own order. None for more than MAX_NAMES, or any other pattern."""
    try:
        parsed = _parser.parse(pattern)
    except Exception:  # not valid in Python: llguidance reports what is not valid in its dialect
        return None
    if parsed.state.flags != _parser.parse("").state.flags:
        return None
    texts = _texts(parsed)
    if texts is None:
        return None
    names = []
    for text in texts:
        if text[:1] != (_BEGIN,) or text[-1:] != (_END,) or len(text) < 2:
            return None  # more text may come before or after it
        inner = [part for part in text if part is not _BEGIN and part is not _END]
        if text != (_BEGIN, *inner, _END):
            return None
        names.append("".join(inner))
    return list(dict.fromkeys(names))


def _may_repeat(schema: dict[str, Any], names: list[str]) -> bool:
    """True if the pattern stays: llguidance counts optional properties only if a pattern has their names.

    It counts a name twice that is written twice, which is wrong only for `minProperties`.
    """
    if "minProperties" not in schema and "maxProperties" not in schema:
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if all(name in properties for name in names):
        return False
    one = schema.get("maxProperties") == 1 and not properties and not required
    return one or schema.get("minProperties", 0) <= len(required)


def _both(first: Any, second: Any) -> Any:
    if first is True or first == {}:
        return second
    return {"allOf": [first, second]}


def _require_all(schema: dict[str, Any]) -> None:
    """Require all names if `minProperties` does, because llguidance counts properties only if all are required."""
    count, names = schema.get("minProperties"), schema["properties"]
    if count == len(names) and schema.get("additionalProperties") is False and "patternProperties" not in schema:
        schema["required"] = list(dict.fromkeys([*schema.get("required", []), *names]))


def _texts(items: Iterable[Any]) -> list[_Text] | None:
    """All texts of a sequence of parsed items. None if there are too many, or an item is not of a known kind."""
    made: list[_Text] = [()]
    for item in items:
        texts = _item(item)
        if texts is None or len(made) * len(texts) > MAX_NAMES:
            return None
        made = [before + text for before, text in itertools.product(made, texts)]
    return made


def _item(item: Any) -> list[_Text] | None:
    op, value = item
    if op is ops.LITERAL:
        return [(chr(value),)]
    if op is ops.AT and value is ops.AT_BEGINNING:
        return [(_BEGIN,)]
    if op is ops.AT and value is ops.AT_END:
        return [(_END,)]
    if op is ops.SUBPATTERN:
        _, added, removed, inner = value
        return None if added or removed else _texts(inner)
    if op is ops.BRANCH:
        return _union(map(_texts, value[1]))
    if op is ops.IN:
        return _union(map(_class_item, value))
    if op is ops.MAX_REPEAT and value[1] is not ops.MAXREPEAT and value[1] <= MAX_NAMES:
        lowest, highest, inner = value
        return _union(_texts(list(inner) * count) for count in range(lowest, highest + 1))
    return None


def _class_item(item: Any) -> list[_Text] | None:
    op, value = item
    if op is ops.LITERAL:
        return [(chr(value),)]
    if op is ops.RANGE and value[1] - value[0] < MAX_NAMES:
        return [(chr(code),) for code in range(value[0], value[1] + 1)]
    return None


def _union(parts: Iterable[list[_Text] | None]) -> list[_Text] | None:
    made: list[_Text] = []
    for part in parts:
        if part is None or len(made) + len(part) > MAX_NAMES:
            return None
        made += part
    return made
