"""/openapi.json and /docs: made from the structs that parse requests, valid, and without anything from elsewhere."""

import html.parser
import re

import httpx
import msgspec
import pytest

from jpaged.frontend.pausing import SLEEP_LEVELS, WAKE_TAGS, PauseMode
from jpaged.serving.admin import openapi
from jpaged.serving.app_options import AppOptions
from jpaged.serving.application import create_app
from jpaged.serving.schemas import messages_requests as messages_schema
from jpaged.serving.schemas import pooling as pooling_schema
from jpaged.serving.schemas import requests as request_schema
from jpaged.serving.schemas import responses_requests as responses_schema
from jpaged.serving.schemas.requests import SizeLimits
from jpaged.serving.server_state import Server
from tests.serving.http_client import CHAT, post


@pytest.fixture
def document(url) -> dict:
    return httpx.get(f"{url}/openapi.json").raise_for_status().json()


def test_every_route_is_described(document, host):
    routes = {re.sub(":path", "", route.path) for route in host[0].app.routes}
    files = {path for path in routes if path.startswith("/ui/") and path != "/ui/"}  # their names change with a build
    assert len(files) > 2
    assert set(document["paths"]) == routes - files
    bodies = {
        name
        for module in (request_schema, pooling_schema, responses_schema, messages_schema)
        for name, struct in vars(module).items()
        if isinstance(struct, type) and issubclass(struct, SizeLimits) and struct.__doc__.startswith("Body of POST")
    }
    posts = [one["post"] for one in document["paths"].values() if "post" in one]
    described = set(re.findall(r"schemas/(\w+)", str([one.get("requestBody") for one in posts])))
    assert bodies <= described
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"].endswith("."), path
            assert {"200", "400", "503"} <= operation["responses"].keys()


def test_keys_are_described(url, document, engine, host):
    """API keys and admin keys apart, each with both headers. Without an API key, a request needs none."""
    schemes = document["components"]["securitySchemes"]
    for kind in ("api", "admin"):
        described = [schemes[f"{kind}_key"]["scheme"], schemes[f"x_{kind}_key"]["name"]]
        assert described == ["bearer", "x-api-key"]
    api, admin = [{"api_key": []}, {"x_api_key": []}], [{"admin_key": []}, {"x_admin_key": []}]
    assert document["paths"]["/v1/models"]["get"]["security"] == [{}, *api]
    assert "/admin/status" not in document["paths"]
    options = AppOptions(api_keys=("talk",), admin_keys=("look",))
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), options)
    paths = httpx.get(f"{url}/openapi.json", headers={"x-api-key": "talk"}).raise_for_status().json()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            address = url + path.replace("{model}", "echo").replace("{response_id}", "x")
            statuses = {
                key: httpx.request(method, address, headers={"x-api-key": key}, follow_redirects=False).status_code
                for key in ("talk", "look", "")
                if not (key == "look" and path.endswith(("/sleep", "/pause")))  # they stop the engine
            }
            wanted = {"talk": api, "look": admin, "": []}
            accepted = {key for key, status in statuses.items() if status != 401}
            described = {key for key in statuses if operation["security"] in ([], wanted[key])}
            assert accepted == described, (path, method, statuses)


def test_links_of_a_response_name_operations(document):
    """From POST /v1/responses to each route that takes the id of any response."""
    links = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["links"]
    taking = {
        operation["operationId"]
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if "{response_id}" in path and not path.endswith("/cancel")  # only for one in the background
    }
    assert {link["operationId"] for link in links.values()} == taking


@pytest.fixture
def admin_paths(engine, host, url) -> dict:
    """Paths of a server that has an admin key."""
    host[0].app = create_app(Server(engine=engine, model_names=("echo",)), AppOptions(admin_keys=("look",)))
    return httpx.get(f"{url}/openapi.json").raise_for_status().json()["paths"]


def query_of(operation: dict) -> dict:
    """Return the schemas of an operation's query parameters by name."""
    return {one["name"]: one["schema"] for one in operation.get("parameters", ()) if one["in"] == "query"}


def test_described_values_are_those_of_the_engine(admin_paths):
    sleep, wake_up = (query_of(admin_paths[f"/admin/{name}"]["post"]) for name in ("sleep", "wake_up"))
    assert sleep["mode"]["enum"] == list(PauseMode)
    assert sleep["level"]["enum"] == list(SLEEP_LEVELS)
    assert wake_up["tags"]["items"]["enum"] == list(WAKE_TAGS)


def test_query_parameters_are_described(admin_paths, url):
    """The admin routes name their parameters in an error: those are described."""
    paths, key = admin_paths, {"x-api-key": "look"}
    for path, methods in paths.items():
        for method, operation in methods.items():
            query = query_of(operation)
            admin = {"admin_key": []} in operation["security"]
            if admin and method == "post" and path != "/admin/drain":
                refused = httpx.post(url + path, params={"no_such": "1"}, headers=key)
                assert refused.status_code == 400
                known = re.search(r"known: ((?:\w|, )+), got ", refused.json()["error"]["message"])
                assert known is not None
                assert set(known[1].split(", ")) - {"none"} == set(query), path
    listed = {one["name"] for one in paths["/v1/responses/{response_id}/input_items"]["get"]["parameters"]}
    assert listed == {"response_id", "limit", "order", "after"}


def test_all_references_exist_and_unknown_fields_are_excluded(document):
    names = document["components"]["schemas"]
    text = str(document)
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= set(names)
    chat = names["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["messages"]
    assert chat["properties"]["chat_template"]["enum"] == [None]
    assert chat["properties"]["watermarking"]["enum"] == [None, False]
    struct = request_schema.ChatRequest
    assert set(chat["properties"]) == {*struct.__struct_fields__, *struct.NEUTRAL}


def test_answers_have_the_documented_fields(document, url):
    """Every field of real answers is in the document, and all required ones are there."""
    names = document["components"]["schemas"]

    def check(schema: dict, value: object, where: str) -> None:
        if "$ref" in schema:
            schema = names[schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            options = [one for one in schema["anyOf"] if (one.get("type") == "null") == (value is None)]
            schema = next((one for one in options if "$ref" in one or one.get("type") != "null"), {})
            return check(schema, value, where) if value is not None else None
        if isinstance(value, dict) and "properties" in schema:
            assert set(value) <= set(schema["properties"]), where
            assert set(schema.get("required", ())) <= set(value), where
            for key, one in value.items():
                check(schema["properties"][key], one, f"{where}.{key}")
        elif isinstance(value, list) and "items" in schema:
            for one in value:
                check(schema["items"], one, where)
        return None

    for path, body in {
        "/v1/completions": {"prompt": "ab", "max_tokens": 1, "logprobs": 1, "echo": True, "return_token_ids": True},
        "/v1/chat/completions": CHAT | {"max_tokens": 1, "logprobs": True, "return_prompt_text": True},
        "/v1/responses": {"input": "ab", "max_output_tokens": 2},
        "/v1/messages": CHAT | {"max_tokens": 2},
        "/v1/messages/count_tokens": CHAT,
        "/v1/embeddings": {"input": "ab"},
        "/tokenize": {"prompt": "ab"},
        "/detokenize": {"tokens": [97]},
    }.items():
        response = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        check(response, post(url, path, body).raise_for_status().json(), path)
    refused = post(url, "/tokenize", {}).json()
    check({"$ref": "#/components/schemas/ErrorBody"}, refused, "error")
    check({"$ref": "#/components/schemas/MessageErrorBody"}, post(url, "/v1/messages", {}).json(), "error")


def test_the_page_works_offline(url, document):
    page = httpx.get(f"{url}/docs").raise_for_status()
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    tags: list[tuple[str, dict]] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append((tag, dict(attrs)))

    Reader().feed(page.text)
    assert {"script", "link", "img", "iframe", "object", "form"}.isdisjoint(tag for tag, _ in tags)
    assert all(not attrs.keys() & {"src", "style", "onclick"} for _, attrs in tags)
    links = {attrs["href"] for tag, attrs in tags if tag == "a"}
    ids = {f"#{attrs['id']}" for _, attrs in tags if "id" in attrs}
    assert links <= {*ids, "openapi.json"}
    for path in document["paths"]:
        assert path in page.text


def test_a_route_without_a_description_is_listed():
    from starlette.routing import Route

    async def other(request):
        """Do something."""

    made = openapi.openapi([Route("/other/{name}", other, methods=["POST"])])
    operation = made["paths"]["/other/{name}"]["post"]
    assert operation["summary"] == "Do something."
    assert operation["parameters"][0]["name"] == "name"
    assert msgspec.json.encode(made)
