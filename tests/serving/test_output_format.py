"""response_format and structured_outputs reach the engine as StructuredOutputsParams; errors name them as sent."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from jpaged.errors import RequestError
from jpaged.params.structured_outputs import StructuredOutputsParams
from jpaged.serving.application import create_app
from jpaged.serving.openai_api.generation import named_as_sent
from jpaged.serving.openai_api.output_format import names_as_sent
from jpaged.serving.schemas.requests import ChatRequest, CompletionRequest
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import decode_body
from tests.serving import fake_engine
from tests.support.http_server import running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
}

GOOD = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        StructuredOutputsParams(json=SCHEMA),
    ),
    ({"response_format": TAG}, StructuredOutputsParams(structural_tag=TAG)),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=["a", "b"])),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"),
    ),
]  # fmt: skip

ROUTES = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
]


def of_schema(**fields: object) -> dict:
    """A response_format of type json_schema, whose json_schema has these fields."""
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (of_schema(schema=SCHEMA), "response_format.json_schema.name"),
    (of_schema(name="a b", schema=SCHEMA), "response_format.json_schema.name"),
    (of_schema(name="a"), "response_format.json_schema.schema"),
    (of_schema(name="a", schema=[1]), "response_format.json_schema.schema"),
    (of_schema(name="a", schema=SCHEMA, strict="yes"), "response_format.json_schema.strict"),
    (of_schema(name="a", schema=SCHEMA, description=1), "response_format.json_schema.description"),
    (of_schema(name="a", schema=SCHEMA, strikt=True), "response_format.json_schema.strikt"),
    ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    ({"structured_outputs": ["regex"]}, "structured_outputs"),
]


@pytest.fixture(scope="module")
def engine() -> Any:
    """One engine for all tests of this file."""
    return fake_engine.FakeEngine()


@pytest.fixture(scope="module")
def url(engine: Any) -> Iterator[str]:
    """One server for all tests of this file."""
    with running(create_app(Server(engine=engine, model_names=("echo",)))) as base:
        yield base


@pytest.mark.parametrize(("route", "rest"), ROUTES)
@pytest.mark.parametrize(("fields", "expected"), GOOD)
def test_structured_outputs_reach_the_engine(url: str, engine, route: str, rest: dict, fields: dict, expected: object):
    assert httpx.post(url + route, json=rest | fields).status_code == 200
    assert engine.seen_params[-1].structured_outputs == expected


@pytest.mark.parametrize(("route", "rest"), ROUTES)
@pytest.mark.parametrize(("fields", "parameter"), BAD)
def test_bad_formats_are_refused(url: str, route: str, rest: dict, fields: dict, parameter: str):
    answer = httpx.post(url + route, json=rest | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter


@pytest.mark.parametrize(
    ("fields", "raised", "named"),
    [
        (of_schema(name="a", schema={}), "structured_outputs.json", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs.json_object", "response_format"),
        (
            {"response_format": TAG},
            "structured_outputs.structural_tag.structures[0].schema",
            "response_format.structures[0].schema",
        ),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs.json", "structured_outputs.json"),
        ({"response_format": {"type": "text"}}, "temperature", "temperature"),
    ],
)
def test_the_engines_errors_are_named_as_sent(fields: dict, raised: str, named: str):
    for route, schema in zip(ROUTES, (CompletionRequest, ChatRequest), strict=True):
        body = decode_body(msgspec.json.encode(route[1] | fields), schema)
        with pytest.raises(RequestError) as caught, named_as_sent(names_as_sent(body)):
            raise RequestError(raised, 1, "no")
        assert caught.value.parameter == named
