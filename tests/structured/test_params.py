"""StructuredOutputsParams: valid and invalid values, alone and in SamplingParams."""

import copy
import dataclasses
import pickle
from collections.abc import Mapping

import pytest

import jpaged
from jpaged import RequestError, SamplingParams
from jpaged.params.sampling import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GOOD = [
    {"json": SCHEMA},
    {"json": '{"type":"integer"}'},
    {"regex": "a+"},
    {"choice": ["a", "b"]},
    {"grammar": 'start: "a"'},
    {"json_object": True},
    {"structural_tag": {"type": "structural_tag"}},
    {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True},
    {"json_object": True, "whitespace_pattern": r"[\n\t ]*"},
    {"json_object": True, "whitespace_pattern": r"(?: |\n\x20{0,4})?"},
    {"json_object": True, "regex": None},
]

BAD = [
    ({}, "structured_outputs"),
    ({"json_object": False}, "structured_outputs"),
    ({"json": SCHEMA, "regex": "a"}, "structured_outputs"),
    ({"json": 3}, "structured_outputs.json"),
    ({"json": {"a": {1, 2}}}, "structured_outputs.json"),
    ({"json": {"minimum": float("nan")}}, "structured_outputs.json"),
    ({"json": "\ud800"}, "structured_outputs.json"),
    ({"json": {"title": "\ud800"}}, "structured_outputs.json"),
    ({"regex": b"a"}, "structured_outputs.regex"),
    ({"regex": "\udfff"}, "structured_outputs.regex"),
    ({"grammar": 1}, "structured_outputs.grammar"),
    ({"choice": []}, "structured_outputs.choice"),
    ({"choice": "ab"}, "structured_outputs.choice"),
    ({"choice": ["a", 1]}, "structured_outputs.choice"),
    ({"json_object": 1}, "structured_outputs.json_object"),
    ({"structural_tag": []}, "structured_outputs.structural_tag"),
    ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
    ({"json": SCHEMA, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
    ({"json_object": True, "disable_additional_properties": True}, "structured_outputs.disable_additional_properties"),
    ({"choice": ["a"], "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
    (
        {"json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "structured_outputs.whitespace_pattern",
    ),
    *(
        ({"json_object": True, "whitespace_pattern": pattern}, "structured_outputs.whitespace_pattern")
        for pattern in ("a?", ".", r"\S", r"\v", "[^ ]", "[ -~]", "[ ?]", "(", "*", '"', r"[\n-z]", "\u00a0", 1)
    ),
]


def too_deep() -> Mapping:
    """Return a mapping nested deeper than `json` can write."""
    inner: dict = {}
    for _ in range(100_000):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize("fields", GOOD)
def test_valid_values_are_accepted(fields: dict):
    params = StructuredOutputsParams(**fields)
    assert params == StructuredOutputsParams.from_fields(fields) == copy.deepcopy(params)
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301
    assert hash(params) == hash(StructuredOutputsParams(**fields))
    assert getattr(params, params.kind) is not None
    sampling = SamplingParams(structured_outputs=fields)
    assert sampling.structured_outputs == params
    assert sampling == SamplingParams(structured_outputs=params)
    hash(sampling)
    assert dataclasses.replace(sampling, temperature=0.5).structured_outputs == params


@pytest.mark.parametrize(("fields", "parameter"), BAD)
def test_invalid_values_raise(fields: dict, parameter: str):
    for make in (lambda: StructuredOutputsParams(**fields), lambda: SamplingParams(structured_outputs=fields)):
        with pytest.raises(RequestError) as caught:
            make()
        assert caught.value.parameter == parameter


def test_unknown_fields_raise_and_are_named():
    with pytest.raises(RequestError, match="did you mean 'regex'") as caught:
        SamplingParams(structured_outputs={"regexp": "a"})
    assert caught.value.parameter == "structured_outputs.regexp"
    for wrong in ("regex", 1, ["regex"]):
        with pytest.raises(RequestError) as caught:
            SamplingParams(structured_outputs=wrong)
        assert caught.value.parameter == "structured_outputs"


def test_a_mapping_is_copied():
    schema = copy.deepcopy(SCHEMA)
    params = StructuredOutputsParams(json=schema)
    schema["properties"].clear()
    assert params == StructuredOutputsParams(json=SCHEMA)
    loop: dict = {}
    loop["loop"] = loop
    for endless in (loop, too_deep()):
        with pytest.raises(RequestError) as caught:
            StructuredOutputsParams(json=endless)
        assert caught.value.parameter == "structured_outputs.json"


def test_a_beam_search_with_a_grammar_raises():
    with pytest.raises(RequestError) as caught:
        SamplingParams(n=2, use_beam_search=True, structured_outputs={"regex": "a"})
    assert caught.value.parameter == "structured_outputs"


def test_importable_from_jpaged():
    assert jpaged.StructuredOutputsParams is StructuredOutputsParams


def test_the_fields_are_those_of_vllm():
    names = {
        "json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace", "disable_additional_properties",
        "whitespace_pattern", "structural_tag",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(StructuredOutputsParams)} == names
