"""Checks the tool definitions of a request, before anything runs. Errors name the path in the definition."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError
from jpaged.params.structured_outputs import REFUSED_KEYWORDS

MAX_TOOLS = 128
MAX_PARAMETER_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMAS = 10_000  # subschemas of one definition, because checking takes time; 64 KiB have no room for more
MAX_ENUM = 10_000
EXAMPLE = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}'

_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,64}")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# Keywords with subschemas: one schema, a list of schemas, or a map of schemas. Then keywords with numbers.
_ONE = (
    "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "propertyNames", "contains",
    "not", "if", "then", "else",
)  # fmt: skip
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A tool. parameters: JSON schema of the arguments, of type object. definition: OpenAI's form, for templates."""

    name: str
    parameters: dict[str, Any]
    definition: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools. mode: none, auto, required or named. name: the tool of mode named."""

    mode: str = "auto"
    name: str | None = None

    @property
    def forced(self) -> bool:
        """True if the answer must be a call."""
        return self.mode in ("required", "named")


def checked_tools(tools: Any) -> tuple[Tool, ...]:
    """Check tool definitions in OpenAI's format. Raises RequestError that names tools[i] and the accepted value."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise RequestError("tools", tools, f"must be a list of tools like {EXAMPLE}")
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"{len(tools)} tools", f"must be at most {MAX_TOOLS}")
    checked: list[Tool] = []
    for i, tool in enumerate(tools):
        made = _checked(f"tools[{i}]", tool)
        if any(other.name == made.name for other in checked):
            raise RequestError(f"tools[{i}].function.name", made.name, "must differ from the names of the other tools")
        checked.append(made)
    return tuple(checked)


def checked_tool_choice(given: Any) -> ToolChoice | None:
    """Check OpenAI's `tool_choice`: none, auto, required, or a function by name. Returns None for None."""
    if given is None or isinstance(given, ToolChoice):
        return given
    if isinstance(given, str) and given in ("none", "auto", "required"):
        return ToolChoice(given)
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        accepted = 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}'
        raise RequestError("tool_choice", given, accepted)
    return ToolChoice("named", function["name"])


def check_enforced(where: str, schema: Mapping[str, Any]) -> None:
    """Raise RequestError if a checked schema has a keyword that cannot be enforced in a forced call."""
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        for key, value in one.items():
            if key in REFUSED_KEYWORDS and (key != "uniqueItems" or value is not False):
                accepted = f"{key} cannot be enforced in a forced call: leave it out, or do not force the call"
                raise RequestError(where, {key: value}, accepted)
            if key in _MAPPINGS:
                waiting += value.values()
            elif key in _LISTS or key == "items":
                waiting += value if isinstance(value, list) else [value]
            elif key in _ONE:
                waiting.append(value)


def without_annotations(schema: Any) -> Any:
    """Return a checked schema without annotations (descriptions, titles, examples), often most of its bytes."""
    if not isinstance(schema, Mapping):
        return schema
    made = {}
    for key, value in schema.items():
        if key in ("description", "title", "examples", "default", "$comment"):
            continue
        if key in _ONE:
            value = without_annotations(value)
        elif key in _LISTS or key == "items":
            is_list = isinstance(value, list)
            value = [without_annotations(one) for one in value] if is_list else without_annotations(value)
        elif key in _MAPPINGS:
            value = {name: without_annotations(one) for name, one in value.items()}
        made[key] = value
    return made


def _checked(where: str, tool: Any) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise RequestError(where, tool, f"must be a function like {EXAMPLE}")
    function = tool["function"]
    for name in (*tool, *function):
        if name not in ("type", "function", "name", "description", "parameters", "strict"):
            raise RequestError(f"{where}.function.{name}", function.get(name, tool.get(name)), "unknown field")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        accepted = "must be 1 to 64 letters (a to z), digits, underscores, hyphens and dots"
        raise RequestError(f"{where}.function.name", name, accepted)
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.function.description", description, "must be a string")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise RequestError(f"{where}.function.strict", function["strict"], "must be true or false")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    _check_parameters(f"{where}.function.parameters", parameters)
    definition = {"name": name, "description": description or "", "parameters": parameters}
    return Tool(name, {"type": "object", **parameters}, {"type": "function", "function": definition})


def _check_parameters(where: str, schema: Any) -> None:
    if not isinstance(schema, Mapping):
        raise RequestError(where, schema, "must be a JSON schema of type object")
    if schema.get("type", "object") != "object":
        accepted = 'must be a JSON schema with the type "object": its properties are the arguments'
        raise RequestError(where, schema, accepted)
    error = _schema_error(schema, "", 0, itertools.count())
    if error is not None:
        raise RequestError(where, schema, f"is not a JSON schema: {error[:500]}")
    try:
        size = len(json.dumps(schema, allow_nan=False).encode())
    except (TypeError, ValueError) as cause:
        raise RequestError(where, schema, f"must be JSON: {cause}") from None
    if size > MAX_PARAMETER_BYTES:
        raise RequestError(where, f"{size:,} bytes", f"must be at most {MAX_PARAMETER_BYTES:,} bytes as JSON")


def _schema_error(schema: Any, path: str, depth: int, count: Iterator[int]) -> str | None:
    """Return the first error of a schema, with its path, or None. count: counts the checked subschemas."""
    if next(count) > MAX_SCHEMAS:
        return f"it has more than {MAX_SCHEMAS:,} subschemas"
    if isinstance(schema, bool):
        return None
    at = path or "the schema"
    if not isinstance(schema, Mapping):
        return f"{at} must be an object, true or false"
    if depth > MAX_SCHEMA_DEPTH:
        return f"it is nested deeper than {MAX_SCHEMA_DEPTH} levels"
    prefix = f"{path}." if path else ""
    for key, value in schema.items():
        where = f"{prefix}{key}"
        error = None
        if key == "type":
            kinds = value if isinstance(value, list) and value else [value]
            if not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
                error = f"{where} must be one of {', '.join(_TYPES)}, or a list of these"
        elif key in _ONE or (key == "items" and not isinstance(value, list)):
            error = _schema_error(value, where, depth + 1, count)
        elif key in _LISTS or key == "items":
            if not isinstance(value, list) or not value:
                error = f"{where} must be a list of schemas"
            else:
                errors = (_schema_error(one, f"{where}[{i}]", depth + 1, count) for i, one in enumerate(value))
                error = next(filter(None, errors), None)
        elif key in _MAPPINGS:
            if not isinstance(value, Mapping):
                error = f"{where} must be an object of schemas"
            else:
                errors = (_schema_error(one, f"{where}.{name}", depth + 1, count) for name, one in value.items())
                error = next(filter(None, errors), None)
        elif key in ("required", "enum", *_NUMBERS, *_COUNTS, "pattern", "$ref"):
            error = _value_error(key, value, where)
        if error:
            return error
    return None


def _value_error(key: str, value: Any, where: str) -> str | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "required":
        good = isinstance(value, list) and all(isinstance(name, str) for name in value)
        return None if good else f"{where} must be a list of property names"
    if key == "enum":
        good = isinstance(value, list) and 0 < len(value) <= MAX_ENUM
        return None if good else f"{where} must be a list of 1 to {MAX_ENUM:,} values"
    if key in _NUMBERS:
        return None if number else f"{where} must be a number"
    if key in _COUNTS:
        return None if number and int(value) == value >= 0 else f"{where} must be an integer from 0"
    if not isinstance(value, str):
        return f"{where} must be a string"
    remote = key == "$ref" and not value.startswith("#")
    return f"{where} must begin with #: other documents are not read" if remote else None

