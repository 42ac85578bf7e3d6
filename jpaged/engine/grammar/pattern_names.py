"""Finite `patternProperties`: their names become `properties`.

llguidance may write a name of a pattern more than once. If the pattern matches few names, all of them may be
used up when the grammar demands another one. Then the answer fails, or has a name twice. `properties` are written once.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from re import _constants as ops  # ty: ignore
from re import _parser  # ty: ignore
from typing import Any

MAX_NAMES = 256       # of one pattern; a pattern with more names is not expanded
MAX_NAME = 256        # characters of a name
MAX_PROPERTIES = 400  # of an object with these names; llguidance refuses objects of many more optional properties
WORK = 32_768         # limit per schema document; takes at most 20 ms
PARSE = 12            # work for each character of a pattern; it takes up to 6 us
_BEGIN, _END = "\ufdd0", "\ufdd1"  # ^ and $: no text has these characters (Unicode calls them noncharacters)


@dataclasses.dataclass(slots=True)
class Budget:
    """Work left for the patterns of a document. Patterns that need more are not expanded."""

    left: int = WORK

    def take(self, work: int) -> bool:
        """Subtract work. Returns False, and subtracts nothing, if less is left."""
        if work > self.left:
            return False
        self.left -= work
        return True


def expand_finite_patterns(schema: dict[str, Any], budget: Budget) -> None:
    """Append the names of finite patterns to `properties`. Changes the schema in place.

    A property that a pattern matches too must follow both schemas, which `allOf` combines. budget: of the document.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    schema["properties"] = properties = dict(properties)
    for pattern, value in list(patterns.items()):
        names = finite_names(pattern, budget)
        if names is None or len(properties) + len(names) > MAX_PROPERTIES or _may_repeat(schema, names):
            continue
        # The grammar's text has the schema once for each name.
        copies = len(names) - 1
        if copies > 0 and not budget.take(copies * _characters(value, budget.left // copies + 1)):
            continue
        del patterns[pattern]
        for name in names:
            properties[name] = _both(properties.get(name, True), value)
    if not patterns:
        del schema["patternProperties"]
    _require_all(schema)


def finite_names(pattern: str, budget: Budget) -> list[str] | None:
    """Return the names that a pattern matches, in its own order.

    None for more than MAX_NAMES, a name of more than MAX_NAME characters, too much work, or any other pattern.
    """
    if not pattern.startswith(("^", "(")) or not pattern.endswith(("$", ")")) or not budget.take(PARSE * len(pattern)):
        return None
    try:
        parsed = _parser.parse(pattern)
        texts = _texts(parsed, budget)
    except Exception:  # not valid in Python, or nested too deep: llguidance reports what is not valid in its dialect
        return None
    if texts is None or parsed.state.flags != _parser.parse("").state.flags:
        return None
    names = []
    for text in texts:
        name = text[1:-1]
        if len(text) < 2 or text[0] != _BEGIN or text[-1] != _END or _BEGIN in name or _END in name:
            return None  # more text may come before or after it
        names.append(name)
    return list(dict.fromkeys(names))


def _characters(value: Any, most: int) -> int:
    """Approximate number of characters of a JSON value, or a number above `most`."""
    count, waiting = 0, [value]
    while waiting and count <= most:
        one = waiting.pop()
        count += 4 + (len(one) if isinstance(one, str) else 0)
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return count


def _may_repeat(schema: dict[str, Any], names: list[str]) -> bool:
    """True if the pattern must stay, because llguidance counts optional properties only if a pattern has their names.

    It counts a name that is written twice as two, which is wrong only for `minProperties`.
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


def _texts(items: Iterable[Any], budget: Budget) -> list[str] | None:
    """All texts of a sequence of parsed items. None if there are too many, or an item is not of a known kind."""
    made = [""]
    for item in items:
        texts = _item(item, budget)
        made = None if texts is None else _joined(made, texts, budget)
        if made is None:
            return None
    return made


def _joined(first: list[str], second: list[str], budget: Budget) -> list[str] | None:
    """All texts of `first`, each followed by each text of `second`."""
    count = len(first) * len(second)
    if count > MAX_NAMES or not budget.take(count + 1):
        return None
    made = [before + after for before, after in itertools.product(first, second)]
    return made if all(len(text) <= MAX_NAME + 2 for text in made) else None


def _item(item: Any, budget: Budget) -> list[str] | None:
    op, value = item
    if op is ops.LITERAL:
        return _range(value, value)
    if op is ops.AT and value is ops.AT_BEGINNING:
        return [_BEGIN]
    if op is ops.AT and value is ops.AT_END:
        return [_END]
    if op is ops.SUBPATTERN:
        _, added, removed, inner = value
        return None if added or removed else _texts(inner, budget)
    if op is ops.BRANCH:
        return _union(_texts(branch, budget) for branch in value[1])
    if op is ops.IN:
        return _union(map(_class_item, value))
    if op is ops.MAX_REPEAT and value[1] is not ops.MAXREPEAT and value[1] <= MAX_NAMES:
        return _repeated(*value, budget)
    return None


def _repeated(lowest: int, highest: int, items: Iterable[Any], budget: Budget) -> list[str] | None:
    """All texts that match `lowest` to `highest` repetitions of `items`. None if there are too many."""
    once = _texts(items, budget)
    if once is None:
        return None
    times: list[str] | None = [""]
    found: list[str] = []
    for count in range(highest + 1):
        if times is None or len(found) + len(times) > MAX_NAMES:
            return None
        if count >= lowest:
            found += times
        if count < highest:
            times = _joined(times, once, budget)
    return found


def _class_item(item: Any) -> list[str] | None:
    op, value = item
    if op is ops.LITERAL:
        return _range(value, value)
    return _range(*value) if op is ops.RANGE else None


def _range(first: int, last: int) -> list[str] | None:
    """The characters of these codes. None if there are too many, or one stands for ^ or $."""
    if last - first >= MAX_NAMES or (first <= ord(_END) and last >= ord(_BEGIN)):
        return None
    return [chr(code) for code in range(first, last + 1)]


def _union(parts: Iterable[list[str] | None]) -> list[str] | None:
    made: list[str] = []
    for part in parts:
        if part is None or len(made) + len(part) > MAX_NAMES:
            return None
        made += part
    return made
