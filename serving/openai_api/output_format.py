"""Converts `response_format` and `structured_outputs` to StructuredOutputsParams.

`response_format` is OpenAI's field, with vLLM's structural tags; `structured_outputs` is vLLM's.
"""

import re
from typing import Any

from jpaged.errors import RequestError
from jpaged.params.structured_outputs import StructuredOutputsParams
from jpaged.serving.schemas.requests import GenerationRequest

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers"},
}
SCHEMA = "response_format.json_schema.schema"


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Return the structure that the answer must have; None for any text. Raises RequestError that names the field."""
    if request.response_format is None:
        given = request.structured_outputs
        return None if given is None else StructuredOutputsParams.from_fields(given)
    if request.structured_outputs is not None:
        accepted = "and structured_outputs exclude each other: leave one of them out"
        raise RequestError("response_format", request.response_format, accepted)
    return _response_format(request.response_format)


def names_as_sent(request: GenerationRequest) -> dict[str, str]:
    """Map the engine's parameter names to the names that this request used."""
    if request.response_format is None:
        return {}
    return {
        "structured_outputs.json": SCHEMA,
        "structured_outputs.json_object": "response_format",
        "structured_outputs.structural_tag": "response_format",
        "structured_outputs": "response_format",
    }


def _response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind not in _TYPES:
        raise RequestError("response_format.type", kind, f"must be one of {', '.join(_TYPES)}")
    for key in given.keys() - _KEYS[kind]:
        raise RequestError(f"response_format.{key}", given[key], f"unknown field of type {kind}")
    match kind:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=_schema(given.get("json_schema")))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=given)
        case _:
            return None


def _schema(given: Any) -> dict[str, Any]:
    """Return the schema of `json_schema`. It is always enforced, with `strict` or without."""
    parameter = "response_format.json_schema"
    if not isinstance(given, dict):
        raise RequestError(parameter, given, "must be an object with name and schema")
    for key in given.keys() - {"name", "schema", "strict", "description"}:
        raise RequestError(f"{parameter}.{key}", given[key], "unknown field")
    name, schema, strict = given.get("name"), given.get("schema"), given.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{parameter}.name", name, "must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{parameter}.strict", strict, "must be true or false")
    if not isinstance(given.get("description", ""), str):
        raise RequestError(f"{parameter}.description", given["description"], "must be a string")
    if not isinstance(schema, dict):
        raise RequestError(f"{parameter}.schema", schema, "must be a JSON schema: an object")
    return schema
