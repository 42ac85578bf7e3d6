"""200 JSON schemas and 50 regular expressions for generated answers, and schemas with keywords that raise.

Every answer must pass `check_json` or `re.fullmatch`. The corpus is deterministic.
"""

import copy
import json
from typing import Any

import jsonschema

Schema = dict[str, Any]

# Short texts and small numbers, so that an answer finishes even if the model repeats itself inside a text.
S: Schema = {"type": "string", "maxLength": 12}
N: Schema = {"type": "integer", "minimum": -999, "maximum": 9999}


def obj(required: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """Return the schema of an object with these properties and no others, unless `more` allows them."""
    properties = required | (optional or {})
    closed = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return closed | more


def arr(items: Any, low: int = 0, high: int = 3, **more: Any) -> Schema:
    """Return the schema of an array of `low` to `high` items."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high} | more


INTEGERS = [
    {"type": "integer", "minimum": 0, "maximum": 10},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "minimum": 7, "maximum": 7},
    {"type": "integer", "minimum": -1234, "maximum": -98},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000},
    {"type": "integer", "minimum": 95, "maximum": 10500},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 9999},
    {"type": "integer", "multipleOf": 25},
]

NUMBERS = [
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 99.5},
    {"type": "number", "maximum": -0.25},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 50},
    {"type": "number"},
]

STRINGS = [
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "maxLength": 0},
    {"type": "string", "maxLength": 20},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    {"type": "string", "pattern": r"^\w{1,8}$"},
    {"type": "string", "pattern": r"^[^\s\"\\]{1,6}$"},
    {"type": "string", "pattern": "^(red|green|blue)( light)?$"},
    {"type": "string", "pattern": "^a[bc]{0,4}d?$"},
    {"type": "string", "pattern": r"^#[0-9a-fA-F]{6}$"},
    {"type": "string", "pattern": r"^v\d+\.\d{1,2}\.\d{1,2}(-rc\d)?$"},
    {"type": "string", "pattern": "^[äöü]{2}ß?$"},
    {"type": "string", "pattern": r"^(\+\d{1,2} )?\(\d{3}\) \d{3}$"},
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^(yes|no)$|^perhaps$"},
]

FORMATS = [
    {"type": "string", "format": name}
    for name in ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
]

CHOICES = [
    {"enum": ["low", "medium", "high"]},
    {"enum": [1, "one", None, True, [1], {"one": 1}]},
    {"enum": ["", " ", "\n", '"', "\\", "é", "漢", "👍"]},
    {"const": "fixed"},
    {"const": {"a": [1, 2.5, None], "b": {"c": "d"}}},
    {"const": -0.5},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    {"type": ["string", "boolean"], "maxLength": 4},
    {"enum": [f"value_{i:03d}" for i in range(300)]},
]

ARRAYS = [
    arr(N, 0, 0),
    arr(N, 1, 1),
    arr(N, 2, 5),
    arr(S, 3, 3),
    arr({"enum": ["a", "b"]}, 0, 8),
    arr(arr(N, 1, 2), 1, 2),
    arr(arr(arr({"type": "boolean"}, 0, 2), 0, 2), 0, 2),
    {"type": "array", "prefixItems": [N, S, {"type": "boolean"}], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [N, S], "items": {"type": "null"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": "point"}, N, N], "items": False},
    {"type": "array", "items": {"anyOf": [N, S]}, "maxItems": 3},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [N, S], "additionalItems": False},
    arr(obj({"id": N, "tag": {"enum": ["x", "y"]}}), 1, 2),
    {"type": "array", "maxItems": 2},
]

OBJECTS = [
    obj({}),
    obj({}, {"a": N}),
    obj({"a": N}, {"b": S}),
    obj({"a": N, "b": S, "c": {"type": "boolean"}}),
    obj({}, {"a": N, "b": N, "c": N, "d": N}),
    obj({"b": N}, {"a": S, "c": S}),
    obj({"größe": N, "名前": S, "emoji 👍": {"type": "boolean"}}),
    obj({'quo"te': N, "back\\slash": N, "new\nline": N, "": N, "a/b~c": N}),
    obj({"a": obj({"b": obj({"c": obj({"d": N})})})}),
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}, "maxProperties": 2},
    {"type": "object", "properties": {"a": N}, "additionalProperties": S, "required": ["a"], "maxProperties": 2},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": N}, "additionalProperties": False, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^n_[a-z]$": N, "^s_[a-z]$": S},
        "properties": {"id": N},
        "required": ["id"],
        "additionalProperties": False,
        "maxProperties": 3,
    },
    {"type": "object", "properties": {"a": N, "b": False}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "maxProperties": 1},
    {"type": "object", "required": ["x"], "maxProperties": 1},
]

COMBINED = [
    {"anyOf": [N, {"type": "null"}]},
    {"anyOf": [obj({"a": N}), obj({"b": S}), arr(N, 1, 2)]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [obj({"kind": {"const": "cat"}, "lives": N}), obj({"kind": {"const": "dog"}, "name": S})]},
    {"oneOf": [{"type": "null"}, arr({"type": "boolean"}, 1, 2)]},
    {"allOf": [{"type": "object", "properties": {"a": N}, "required": ["a"]}, {"maxProperties": 1}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}, {"multipleOf": 3}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 5}]},
    {
        "allOf": [{"properties": {"a": N}, "required": ["a"]}, {"properties": {"b": S}, "required": ["b"]}],
        "type": "object",
        "maxProperties": 2,
    },
    {"type": "object", "properties": {"a": {"anyOf": [N, S]}, "b": {"anyOf": [S, {"type": "null"}]}},
     "required": ["a", "b"], "additionalProperties": False},
    {"anyOf": [{"allOf": [{"type": "integer"}, {"minimum": 10, "maximum": 20}]}, {"const": "none"}]},
    {"anyOf": [{"enum": ["a", "ab", "abc"]}, {"type": "integer", "minimum": 1, "maximum": 3}]},
]  # fmt: skip

REFERENCES = [
    {"$ref": "#/$defs/n", "$defs": {"n": N}},
    {"$defs": {"p": obj({"x": N, "y": N})}, **obj({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}})},
    {"definitions": {"tag": {"type": "string", "maxLength": 5}}, **arr({"$ref": "#/definitions/tag"}, 1, 3)},
    obj({"value": N}, {"next": {"$ref": "#"}}),
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": obj({"v": N, "children": arr({"$ref": "#/$defs/node"}, 0, 2)})},
    },
    {
        "$ref": "#/$defs/even",
        "$defs": {
            "even": obj({}, {"odd": {"$ref": "#/$defs/odd"}}),
            "odd": obj({"even": {"$ref": "#/$defs/even"}}),
        },
    },
    {
        "$ref": "#/$defs/expr",
        "$defs": {
            "expr": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"$ref": "#/$defs/binary"}]},
            "binary": obj(
                {"op": {"enum": ["+", "*"]}, "left": {"$ref": "#/$defs/expr"}, "right": {"$ref": "#/$defs/expr"}}
            ),
        },
    },
    {"$defs": {"named": {"$anchor": "here", **N}}, **obj({"a": {"$ref": "#here"}})},
    {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer", "maximum": 50}}},
    {"$id": "https://example.com/root", "$ref": "https://example.com/root#/$defs/n", "$defs": {"n": N}},
    {"anyOf": [arr({"$ref": "#"}, 0, 2), {"type": "boolean"}]},
]

_ADDRESS = obj({"street": S, "city": S, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})
_EMAIL = {"type": "string", "format": "email"}
_SQUARE = {"type": "string", "pattern": "^[a-h][1-8]$"}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_LINE = obj(
    {"sku": S, "qty": {"type": "integer", "minimum": 1, "maximum": 99}, "price": {"type": "number", "minimum": 0}}
)
_COORDINATES = {
    "type": "array",
    "prefixItems": [
        {"type": "number", "minimum": -180, "maximum": 180},
        {"type": "number", "minimum": -90, "maximum": 90},
    ],
    "items": False,
    "minItems": 2,
}
EVERYDAY = [
    obj({"name": S, "age": {"type": "integer", "minimum": 0, "maximum": 130}}, {"email": _EMAIL}),
    obj({"name": S, "address": _ADDRESS, "tags": arr(S, 0, 3)}),
    obj({"name": {"const": "get_weather"}, "arguments": obj({"city": S, "unit": {"enum": ["celsius", "kelvin"]}})}),
    obj({"answer": S, "confidence": _SHARE, "sources": arr(N, 0, 3)}),
    obj({"from": _SQUARE, "to": _SQUARE}),
    obj(
        {
            "invoice": {"type": "string", "pattern": r"^INV-\d{4}$"},
            "lines": arr(_LINE, 1, 2),
            "paid": {"type": "boolean"},
        }
    ),
    obj({"sentiment": {"enum": ["positive", "neutral", "negative"]}, "reason": S}),
    obj(
        {
            "method": {"enum": ["GET", "POST"]},
            "path": {"type": "string", "pattern": "^/[a-z/]{0,10}$"},
            "headers": {"type": "object", "additionalProperties": S, "maxProperties": 2},
        }
    ),
    obj({"steps": arr(obj({"explanation": S, "output": S}), 1, 2), "final_answer": S}),
    obj({"id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "date-time"}}),
    obj(
        {
            "title": S,
            "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
            "genres": arr({"enum": ["drama", "comedy"]}, 1, 2),
            "rating": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 10}, {"type": "null"}]},
        }
    ),
    obj(
        {
            "type": {"const": "FeatureCollection"},
            "features": arr(obj({"type": {"const": "Point"}, "coordinates": _COORDINATES}), 0, 1),
        }
    ),
    obj(
        {"host": {"type": "string", "format": "ipv4"}, "port": {"type": "integer", "minimum": 1, "maximum": 65535}},
        {"tls": {"type": "boolean"}},
    ),
]
for _schema in EVERYDAY[:6]:
    _schema |= {"title": "Everyday", "description": "annotations", "$comment": "change nothing", "examples": [{}]}


def schemas() -> dict[str, Schema]:
    """Return 200 schemas by name: all groups, then simple schemas inside objects, arrays, unions and definitions."""
    groups = {
        "integer": INTEGERS, "number": NUMBERS, "string": STRINGS, "format": FORMATS, "choice": CHOICES,
        "array": ARRAYS, "object": OBJECTS, "combined": COMBINED, "reference": REFERENCES, "everyday": EVERYDAY,
    }  # fmt: skip
    named = {f"{group}-{i}": copy.deepcopy(s) for group, members in groups.items() for i, s in enumerate(members)}
    leaves = [*INTEGERS, *NUMBERS, *STRINGS, *FORMATS, *CHOICES]
    wrap = [
        lambda leaf, other: obj({"first": leaf, "second": other}),
        lambda leaf, other: arr(leaf, 1, 2),
        lambda leaf, other: obj({"id": N}, {"first": leaf, "second": other}),
        lambda leaf, other: obj({"list": arr({"anyOf": [leaf, {"type": "null"}]}, 0, 2)}),
        lambda leaf, other: {"$defs": {"leaf": leaf}, **obj({"deep": obj({"er": {"$ref": "#/$defs/leaf"}})})},
        lambda leaf, other: {"type": "array", "prefixItems": [leaf, other], "items": False, "minItems": 2},
    ]
    i = 0
    while len(named) < 200:
        leaf, other = leaves[i * 5 % len(leaves)], leaves[(i * 7 + 3) % len(leaves)]
        named[f"wrapped-{i}"] = copy.deepcopy(wrap[i % len(wrap)](leaf, other))
        i += 1
    return named


# One or two short schemas of each group, for fast tests.
SHORT = (
    "integer-1", "integer-6", "number-1", "string-5", "string-8", "format-0", "format-9", "choice-1", "choice-2",
    "array-2", "array-7", "object-2", "object-6", "object-9", "combined-3", "combined-8", "reference-3", "reference-6",
    "everyday-2", "wrapped-3",
)  # fmt: skip


def check_json(schema: Schema, text: str) -> None:
    """Raise unless a text is JSON that matches the schema, formats included. Uses the `jsonschema` package."""
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = validator.FORMAT_CHECKER
    validator(schema, format_checker=checker).validate(json.loads(text))


# Keywords that cannot be enforced, each in an otherwise valid schema.
REFUSED: dict[str, Schema] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": N},
    "minContains": {"type": "array", "minContains": 2},
    "maxContains": {"type": "array", "maxContains": 2},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": obj({"a": N}, unevaluatedProperties=False),
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "if": {"if": N, "type": "integer"},
    "then": {"then": N, "type": "integer"},
    "else": {"else": N, "type": "integer"},
    "not": {"not": N},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "$dynamicAnchor": {"$dynamicAnchor": "node", "type": "integer"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "$recursiveAnchor": {"$recursiveAnchor": True, "type": "integer"},
    "x-guidance": {"x-guidance": {"lenient": True}, "type": "integer"},
    "format": {"type": "string", "format": "idn-hostname"},
    "$ref": {"$ref": "https://example.com/schema.json"},
}

REGEXES = (
    r"abc", r"a|bc|def", r"[a-z]{3}", r"[A-Z][a-z]{0,7}", r"\d{4}-\d{2}-\d{2}", r"\d{1,3}(\.\d{1,3}){3}",
    r"(yes|no|maybe)", r"-?\d{1,5}(\.\d{1,3})?", r"[0-9a-f]{8}", r"#[0-9A-F]{6}", r"\w{1,10}", r"\w+@\w+\.(com|org)",
    r"[^\s]{1,8}", r"\S{2,5}", r"\D{3}", r"\W{1,3}", r"[\w.-]{1,12}", r"[\d\s]{4}", r"(ab)*c", r"(a|b){2,6}",
    r"x{3}", r"x{2,}y", r"(foo|bar)(baz)?", r"\(\d{3}\) \d{3}-\d{4}", r"https?://[a-z]{2,8}\.(de|com)/", r"[äöüß]{1,4}",
    r"漢[字語]+", r"👍{1,3}", r"a\.b\*c\?d\+e", r"\[\d+\]", r"\{[a-z]:\d\}", r'"[^"\\]{0,10}"',
    r"[a&&b]{1,3}", r"[[~-]{2}",
    r"\t\n\r", r"a.c", r".{1,5}", r"(?:non|capturing)", r"(?P<year>19|20)\d\d", r"^anchored$", r"(?i)case",
    r"lazy.{0,4}?end", r"(((nested)))", r"()empty", r"a?b?c?", r"\x41\u0042", r"[\]\-\\]{2}", r"[^\w]x",
    r"(Mon|Tues|Wednes)day, \d{1,2} (Jan|Feb) \d{4}", r"def [a-z_]{1,8}\((self)?\):",
)  # fmt: skip
