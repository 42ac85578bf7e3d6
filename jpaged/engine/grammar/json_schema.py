"""Checks a request's JSON schema against limits and supported keywords, and rewrites it for llguidance.

llguidance would report most of these errors itself, but later and in its own words. Here the check takes a millisecond,
before anything runs. A keyword that restricts the answer and cannot be enforced is an error, because the answer might
not follow it. A keyword that no draft defines is an annotation, as the JSON Schema specification says.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from jpaged.engine.grammar.limits import GrammarLimits
from jpaged.engine.grammar.pattern_names import Budget, expand_finite_patterns
from jpaged.engine.grammar.regex_dialect import to_rust
from jpaged.errors import RequestError
from jpaged.params.structured_outputs import REFUSED_KEYWORDS

FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")

# Extra patterns for formats, because parsers reject these values: the year 0 (Python's datetime does not have it), and
# leap seconds (llguidance would allow them in any minute).
_NARROWED = {
    "date": "^(?:[1-9]|0[1-9]|00[1-9]|000[1-9])",
    "time": "^.{6}[0-5]",
    "date-time": "^(?:[1-9].{16}|0[1-9].{15}|00[1-9].{14}|000[1-9].{13})[0-5]",
}

# Keywords with subschemas: a map from any name to a schema, a list of schemas, or one schema.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")

_CONTAINERS_A_LEVEL = 4  # braces and brackets for one level of schemas; llguidance's parser accepts 128 in total


def prepare(text: str, limits: GrammarLimits, parameter: str, *, close_objects: bool = False) -> dict[str, Any]:
    """Return the checked schema, with regular expressions in Rust's dialect.

    close_objects: set `additionalProperties` to False in schemas with properties that do not set it.
    Raises RequestError for text that is too large, not supported, or not a JSON schema.
    """
    check_size(text, limits, parameter)
    return prepare_document(parse(text, limits, parameter), limits, parameter, close_objects=close_objects)


def check_size(text: str, limits: GrammarLimits, parameter: str) -> None:
    """Raise RequestError for text of more than `max_grammar_bytes` bytes."""
    size = len(text.encode())
    if size > limits.max_grammar_bytes:
        raise RequestError(
            parameter, text, f"has {size:,} bytes, at most {limits.max_grammar_bytes:,} (max_grammar_bytes)"
        )


def parse(text: str, limits: GrammarLimits, parameter: str) -> Any:
    """Parse JSON text. Raises RequestError if it is not JSON, or is nested too deep to check."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise RequestError(parameter, text, f"must be JSON: {error}") from None
    except RecursionError:
        raise _too_deep(parameter, text, limits) from None
    level, containers = _containers([document]), 0
    while level:
        containers += 1
        if containers > _CONTAINERS_A_LEVEL * limits.max_grammar_depth:
            raise _too_deep(parameter, text, limits)
        level = [
            child for value in level for child in _containers(value.values() if isinstance(value, dict) else value)
        ]
    return document


def prepare_document(
    document: Any, limits: GrammarLimits, parameter: str, *, close_objects: bool = False
) -> dict[str, Any]:
    """Like `prepare`, for a parsed schema. Changes `document` in place."""
    if document is True:
        return {}
    if not isinstance(document, dict):
        raise RequestError(parameter, document, "must be a JSON schema (an object)")
    schemas = list(_subschemas(document, limits, parameter))
    identifiers = {schema[key] for _, schema in schemas for key in ("$id", "id") if isinstance(schema.get(key), str)}
    for where, schema in schemas:
        _check(schema, where, identifiers, limits, parameter)
    budget = Budget()
    for _, schema in reversed(schemas):  # subschemas first, so that a pattern's schema has its final size
        _rewrite(schema, close_objects, budget)
    return document


def _rewrite(schema: dict, close_objects: bool, budget: Budget) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = to_rust(schema["pattern"])
    narrowed = _NARROWED.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if narrowed is not None and isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append({"pattern": narrowed})
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    expand_finite_patterns(schema, budget)
    if close_objects and ("properties" in schema or "patternProperties" in schema):
        schema.setdefault("additionalProperties", False)


def _subschemas(document: dict, limits: GrammarLimits, parameter: str) -> Iterator[tuple[str, dict]]:
    """Yield (path, schema) for the document and every subschema. Raises RequestError for one nested too deep."""
    waiting: list[tuple[str, Any, int]] = [("#", document, 1)]
    while waiting:
        where, schema, depth = waiting.pop()
        if not isinstance(schema, dict):
            continue  # True or False; llguidance reports anything else
        if depth > limits.max_grammar_depth:
            raise _too_deep(parameter, where, limits)
        if not schema:
            continue  # nothing to check, and one request may have 20,000 of them
        yield where, schema
        for key, value in schema.items():
            if isinstance(value, dict):
                if key in _MAPS:
                    waiting += [(_inside(where, key, name), child, depth + 1) for name, child in value.items()]
                elif key in _SINGLE:
                    waiting.append((_inside(where, key), value, depth + 1))
            elif isinstance(value, list) and key in _LISTS:
                waiting += [(_inside(where, key, index), child, depth + 1) for index, child in enumerate(value)]


def _inside(where: str, key: str, name: object = "") -> str:
    """Path of a subschema, cut to about 150 characters: 10,000 schemas may be under one name of 30,000 letters."""
    if len(where) > 100:
        where = "…" + where[-100:]
    return f"{where}/{key}/{str(name)[:40]}" if name != "" else f"{where}/{key}"


def _check(schema: dict, where: str, identifiers: set[str], limits: GrammarLimits, parameter: str) -> None:
    for key in schema.keys() & REFUSED_KEYWORDS:
        if key != "uniqueItems" or schema[key] is not False:
            how = "use whitespace_pattern or disable_any_whitespace" if key == "x-guidance" else "leave it out"
            raise RequestError(parameter, {key: schema[key]}, f"{where}: the keyword {key} is not supported: {how}")
    enum = schema.get("enum")
    if isinstance(enum, list) and len(enum) > limits.max_grammar_enum:
        raise RequestError(
            parameter,
            {"enum": enum},
            f"{where}: {len(enum):,} values, at most {limits.max_grammar_enum:,} (max_grammar_enum)",
        )
    for pattern in (schema.get("pattern"), *_names(schema.get("patternProperties"))):
        if isinstance(pattern, str):
            check_regex(pattern, limits, parameter, f"{where}: ")
    types = schema.get("type", "string")
    about_strings = types == "string" or (isinstance(types, list) and "string" in types)
    if about_strings and "format" in schema and schema["format"] not in FORMATS:
        accepted = f"{where}: this format is not supported: leave it out, or use one of {', '.join(FORMATS)}"
        raise RequestError(parameter, {"format": schema["format"]}, accepted)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        base = reference.partition("#")[0]
        if base and base not in identifiers:
            accepted = f"{where}: other documents are not read: put the schema under $defs and use #/$defs/NAME"
            raise RequestError(parameter, {"$ref": reference}, accepted)


def check_regex(pattern: str, limits: GrammarLimits, parameter: str, where: str = "") -> None:
    """Raise RequestError for a regular expression of more than `max_regex_bytes` bytes."""
    size = len(pattern.encode())
    if size > limits.max_regex_bytes:
        most = limits.max_regex_bytes
        accepted = f"{where}a regular expression of {size:,} bytes, at most {most:,} (max_regex_bytes)"
        raise RequestError(parameter, pattern, accepted)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _too_deep(parameter: str, value: object, limits: GrammarLimits) -> RequestError:
    accepted = f"is nested deeper than {limits.max_grammar_depth} schemas (max_grammar_depth)"
    return RequestError(parameter, value, accepted)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
