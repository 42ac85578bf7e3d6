"""Tool definitions: valid ones are accepted, invalid ones raise an error that names the place."""

import time

import pytest

from jpaged.errors import RequestError
from jpaged.parsers.definitions import MAX_PARAMETER_BYTES, MAX_TOOLS, checked_tools

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": ["integer", "null"], "minimum": 1},
        "place": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"const": 3}]}, "maxItems": 5.0},
    },
    "$defs": {"place": {"type": "object", "additionalProperties": False}},
    "required": ["city"],
}


def function(parameters=WEATHER, name="get_weather", **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def test_definitions_in_openai_format_are_accepted():
    weather, now = checked_tools([
        function(description="Weather of a city.", strict=True),
        {"type": "function", "function": {"name": "now"}},
    ])
    assert weather.parameters == WEATHER
    assert weather.definition["function"] == {
        "name": "get_weather", "description": "Weather of a city.", "parameters": WEATHER,
    }  # fmt: skip
    assert now.parameters["properties"] == {}
    assert checked_tools([function({})])[0].parameters == {"type": "object"}


def nested(depth: int):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "parameter", "accepted"),
    [
        ("x", "tools", "list"),
        ([3], "tools[0]", "function"),
        ([{"type": "function"}], "tools[0]", "function"),
        ([{"type": "web_search", "function": {"name": "a"}}], "tools[0]", "function"),
        ([function(), function(name="b"), function()], "tools[2].function.name", "differ"),
        ([function(name="a b")], "tools[0].function.name", "letters"),
        ([function(name="")], "tools[0].function.name", "letters"),
        ([function(name=3)], "tools[0].function.name", "letters"),
        ([function(name="a" * 65)], "tools[0].function.name", "64"),
        ([function(description=3)], "tools[0].function.description", "string"),
        ([function(strict="yes")], "tools[0].function.strict", "true or false"),
        ([function(colour="red")], "tools[0].function.colour", "unknown"),
        ([function("string")], "tools[0].function.parameters", "JSON schema"),
        ([function([])], "tools[0].function.parameters", "JSON schema"),
        ([function({"type": "array"})], "tools[0].function.parameters", '"object"'),
        ([function({"type": ["object"]})], "tools[0].function.parameters", '"object"'),
        ([function({"properties": []})], "tools[0].function.parameters", "properties must be"),
        ([function({"properties": {"a": "int"}})], "tools[0].function.parameters", "properties.a must be"),
        ([function({"properties": {"a": {"type": "int"}}})], "tools[0].function.parameters", "properties.a.type"),
        ([function({"properties": {"a": {"type": [{}]}}})], "tools[0].function.parameters", "properties.a.type"),
        ([function({"properties": {"a": {"enum": []}}})], "tools[0].function.parameters", "properties.a.enum"),
        ([function({"properties": {"a": {"enum": [1] * 10_001}}})], "tools[0].function.parameters", "10,000"),
        ([function({"properties": {"a": {"minimum": "0"}}})], "tools[0].function.parameters", "a.minimum"),
        ([function({"properties": {"a": {"minLength": -1}}})], "tools[0].function.parameters", "a.minLength"),
        ([function({"properties": {"a": {"anyOf": []}}})], "tools[0].function.parameters", "a.anyOf"),
        ([function({"properties": {"a": {"anyOf": [{}, 3]}}})], "tools[0].function.parameters", "anyOf[1]"),
        ([function({"properties": {"a": {"pattern": 3}}})], "tools[0].function.parameters", "a.pattern"),
        ([function({"$ref": "https://example.org/schema"})], "tools[0].function.parameters", "are not read"),
        ([function({"required": "city"})], "tools[0].function.parameters", "required"),
        ([function(nested(33))], "tools[0].function.parameters", "deeper than 32"),
        ([function({"anyOf": [{"not": True}] * 9_000})], "tools[0].function.parameters", "10,000 subschemas"),
        ([function({"title": float("nan")})], "tools[0].function.parameters", "JSON"),
        ([function({"title": "x" * MAX_PARAMETER_BYTES})], "tools[0].function.parameters", "65,536"),
        ([function(name=f"t{i}") for i in range(MAX_TOOLS + 1)], "tools", "128"),
    ],
)
def test_an_invalid_definition_raises_an_error_that_names_the_place(tools, parameter, accepted):
    with pytest.raises(RequestError) as caught:
        checked_tools(tools)
    assert caught.value.parameter == parameter
    assert accepted in caught.value.accepted
    assert len(str(caught.value)) < 1_000


def test_a_schema_of_60_000_levels_raises_without_being_walked():
    schema = {}
    for _ in range(60_000):
        schema = {"not": schema}
    began = time.process_time()
    with pytest.raises(RequestError, match="deeper than 32"):
        checked_tools([function({"properties": {"a": schema}})])
    assert time.process_time() - began < 5  # not a measurement: walking the schema would never end
