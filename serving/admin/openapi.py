"""Makes the OpenAPI document (3.1) from the server's routes and from the structs that parse and write bodies."""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec
from starlette.routing import Route

from jpaged.serving.schemas import adapters, answers, files, pooling, weights
from jpaged.serving.schemas import messages_answers as messages
from jpaged.serving.schemas import requests as generating
from jpaged.serving.schemas import responses_answers as responses
from jpaged.serving.schemas.messages_requests import CountTokensRequest, MessagesRequest
from jpaged.serving.schemas.requests import SizeLimits
from jpaged.serving.schemas.responses_requests import InputTokensRequest, ResponsesRequest
from jpaged.snapshot import EngineSnapshot
from jpaged.version import __version__

REFERENCE = "#/components/schemas/{name}"
JSON, EVENTS, TEXT, FORM = "application/json", "text/event-stream", "text/plain", "multipart/form-data"
ERRORS = {
    "400": "The request is not valid. `param` names the field.",
    "401": "The key is missing or wrong.",
    "404": "The model is not served here.",
    "413": "The body is too large.",
    "500": "The engine failed on this request.",
    "503": "Too many requests wait, or the server is stopping. `Retry-After` says when to try again.",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """The bodies of one route. None: there is none, or it is not described.

    events: of the stream that `"stream": true` asks for.
    form:   the request is a form with these fields, and not JSON.
    error:  body of an answer with an error status.
    query:  schemas of the query parameters. All of them are optional.
    """

    request: type[SizeLimits] | None = None
    response: type | None = None
    events: tuple[type[msgspec.Struct], ...] = ()
    error: type[msgspec.Struct] = answers.ErrorBody
    query: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict, hash=False)
    form: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRules:
    """The keys that paths of an application require.

    needs_api_key: the server has API keys. Without any, requests may send one.
    open_paths:    require no key.
    admin_paths:   require an admin key.
    """

    needs_api_key: bool = False
    open_paths: frozenset[str] = frozenset()
    admin_paths: frozenset[str] = frozenset()

    def security(self, path: str) -> list[dict[str, list[str]]]:
        """Return the alternatives that a path accepts."""
        if path in self.open_paths:
            return []
        names = ("admin_key", "x_admin_key") if path in self.admin_paths else ("api_key", "x_api_key")
        optional: list[dict[str, list[str]]] = [] if path in self.admin_paths or self.needs_api_key else [{}]
        return [*optional, *({name: []} for name in names)]


# Headers that may have a key.
SECURITY = {
    "api_key": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key."},
    "admin_key": {"type": "http", "scheme": "bearer", "description": "An admin key."},
    "x_admin_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An admin key."},
}

_INSPECT = {"engine": {"type": "integer", "minimum": 0, "default": 0}}
_INFO = {"config_format": {"enum": ["text", "json"], "default": "text"}}
_MODE = {"enum": ["abort", "wait", "keep"], "default": "abort"}
_PAUSE = {"mode": _MODE, "clear_cache": {"type": "boolean", "default": True}}
_SLEEP = {"level": {"enum": [0, 1, 2], "default": 1}, "mode": _MODE}
_WAKE_UP = {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}
_RESET = {"reset_running_requests": {"type": "boolean", "default": False}}
_RETRIEVE = {"stream": {"type": "boolean", "default": False}, "starting_after": {"type": "integer", "minimum": 0}}
_RESPONSE_EVENTS = (
    responses.ResponseEvent, responses.ItemEvent, responses.PartEvent, responses.DeltaEvent, responses.DoneEvent,
)  # fmt: skip
_INPUT_ITEMS = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}

_PAGE = {"after": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}}
_FILES = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 10_000},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "purpose": {"type": "string"},
}
_UPLOAD = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}}

# By path, or by method and path where the methods of a path differ.
OPERATIONS = {
    "/v1/completions": Operation(generating.CompletionRequest, answers.Completion, (answers.Completion,)),
    "/v1/chat/completions": Operation(
        generating.ChatRequest, answers.ChatCompletion, (answers.ChatCompletionChunk,)
    ),
    "/inference/v1/generate": Operation(generating.TokensRequest, answers.TokensAnswer, (answers.TokensAnswer,)),
    "/v1/chat/completions/batch": Operation(generating.BatchChatRequest, answers.ChatCompletion),
    "/v1/embeddings": Operation(pooling.EmbeddingRequest, answers.EmbeddingList),
    "/pooling": Operation(pooling.PoolingRequest, answers.PooledList),
    "/classify": Operation(pooling.ClassifyRequest, answers.ClassificationList),
    **dict.fromkeys(("/score", "/v1/score"), Operation(pooling.ScoreRequest, answers.ScoreList)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), Operation(pooling.RerankRequest, answers.Ranking)),
    "/tokenize": Operation(pooling.TokenizeRequest, answers.TokenList),
    "/tokenizer_info": Operation(response=answers.TokenizerInfo),
    "/detokenize": Operation(pooling.DetokenizeRequest, answers.DetokenizedText),
    "/v1/responses": Operation(ResponsesRequest, responses.ResponseObject, _RESPONSE_EVENTS),
    "/v1/responses/input_tokens": Operation(InputTokensRequest, responses.InputTokenCount),
    "/v1/responses/{response_id}": Operation(
        response=responses.ResponseObject, events=_RESPONSE_EVENTS, query=_RETRIEVE
    ),
    "delete /v1/responses/{response_id}": Operation(response=responses.DeletedResponse),
    "/v1/responses/{response_id}/cancel": Operation(response=responses.ResponseObject),
    "/v1/responses/{response_id}/input_items": Operation(response=responses.InputItemList, query=_INPUT_ITEMS),
    "/v1/messages": Operation(
        MessagesRequest, messages.MessageObject, get_args(messages.MessageEvent), messages.MessageErrorBody
    ),
    "/v1/messages/count_tokens": Operation(
        CountTokensRequest, messages.TokenCount, error=messages.MessageErrorBody
    ),
    "post /v1/files": Operation(response=files.FileObject, form=_UPLOAD),
    "/v1/files": Operation(response=files.FileList, query=_FILES),
    "/v1/files/{file_id}": Operation(response=files.FileObject),
    "delete /v1/files/{file_id}": Operation(response=files.DeletedFile),
    "post /v1/batches": Operation(files.CreateBatch, files.BatchObject),
    "/v1/batches": Operation(response=files.BatchList, query=_PAGE),
    "/v1/batches/{batch_id}": Operation(response=files.BatchObject),
    "/v1/batches/{batch_id}/cancel": Operation(response=files.BatchObject),
    "/v1/models": Operation(response=answers.ModelList),
    "/v1/models/{model}": Operation(response=answers.ModelCard),
    "/load": Operation(response=answers.ServerLoad),
    "/version": Operation(response=answers.Version),
    "/admin/inspect": Operation(response=EngineSnapshot, query=_INSPECT),
    **dict.fromkeys(("/admin/status", "/admin/drain"), Operation(response=answers.ServerStatus)),
    **dict.fromkeys(
        ("/admin/server_info", "/server_info", "/get_server_info"), Operation(response=answers.ServerInfo, query=_INFO)
    ),
    **dict.fromkeys(answers.MODEL_INFO_PATHS, Operation(response=answers.ServedModelInfo)),
    **dict.fromkeys(("/admin/pause", "/pause"), Operation(response=answers.Done, query=_PAUSE)),
    **dict.fromkeys(("/admin/resume", "/resume"), Operation(response=answers.Done)),
    **dict.fromkeys(("/admin/sleep", "/sleep"), Operation(response=answers.Done, query=_SLEEP)),
    **dict.fromkeys(("/admin/wake_up", "/wake_up"), Operation(response=answers.Done, query=_WAKE_UP)),
    **dict.fromkeys(
        ("/admin/reset_prefix_cache", "/reset_prefix_cache"), Operation(response=answers.CacheReset, query=_RESET)
    ),
    **dict.fromkeys(
        ("/admin/profile/start", "/start_profile", "/admin/profile/stop", "/stop_profile"),
        Operation(response=answers.Done),
    ),
    "/v1/load_lora_adapter": Operation(adapters.LoadAdapterRequest),
    "/v1/unload_lora_adapter": Operation(adapters.UnloadAdapterRequest),
    **dict.fromkeys(weights.VERSION_PATHS, Operation(response=weights.WeightVersionAnswer)),
    "/update_weights_from_disk": Operation(weights.UpdateFromDiskRequest, weights.WeightsUpdated),
    "/update_weights": Operation(weights.UpdateWeightsRequest, weights.WeightsUpdated),
    "/is_paused": Operation(response=answers.IsPaused),
    "/is_sleeping": Operation(response=answers.IsSleeping),
}


def openapi(routes: Iterable[Any], rules: KeyRules = KeyRules()) -> dict[str, Any]:
    """Return the document. routes: of the application. Bodies are described only for paths in OPERATIONS."""
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operation = _operation(path, method.lower(), route)
                paths.setdefault(path, {})[method.lower()] = operation | {"security": rules.security(path)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": __version__, "description": "The API of a jpaged server."},
        "paths": paths,
        "components": {
            "schemas": _schemas(OPERATIONS.values()),
            "securitySchemes": SECURITY,
        },
    }


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    about = OPERATIONS.get(f"{method} {path}") or OPERATIONS.get(path, Operation())
    summary = (inspect.getdoc(route.endpoint) or "").partition("\n")[0]
    answered = _responses(path, about)
    if about.request is ResponsesRequest:
        answered["200"]["links"] = _links()
    made: dict[str, Any] = {"operationId": _operation_id(method, path), "summary": summary, "responses": answered}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in about.query.items()]
    if parameters:
        made["parameters"] = parameters
    if method == "post" and about.request is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(about.request)}}}
    elif about.form:
        form = {"type": "object", "properties": dict(about.form), "required": list(about.form)}
        made["requestBody"] = {"required": True, "content": {FORM: {"schema": form}}}
    elif path == "/invocations":
        bodies = [_reference(one.request) for one in dict.fromkeys(OPERATIONS.values()) if one.request]
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": {"anyOf": bodies}}}}
    return made


def _links() -> dict[str, Any]:
    """Return links from a new response to the operations that take its id."""
    path = "/v1/responses/{response_id}"
    taking = {"retrieve": ("get", path), "delete": ("delete", path), "list_input": ("get", f"{path}/input_items")}
    return {
        name: {"operationId": _operation_id(method, to), "parameters": {"response_id": "$response.body#/id"}}
        for name, (method, to) in taking.items()
    }


def _operation_id(method: str, path: str) -> str:
    return re.sub(r"\W+", "_", f"{method}{path}").strip("_")


def _responses(path: str, about: Operation) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success."}
    if about.response is not None:
        success["content"] = {JSON: {"schema": _reference(about.response)}}
    if about.events:
        refs = [_reference(event) for event in about.events]
        schema: dict[str, Any] = {"anyOf": refs} if len(refs) > 1 else dict(refs[0])
        success["content"] = success.get("content", {}) | {EVENTS: {"schema": schema}}
    content = {JSON: {"schema": _reference(about.error)}}
    errors = {status: {"description": said, "content": content} for status, said in ERRORS.items()}
    if path in ("/health", "/ping", "/ready"):  # 503 while programs are compiled has a line of text
        line = {"schema": {"type": "string"}}
        errors["503"] = {"description": "Not ready, or not healthy.", "content": {TEXT: line, **content}}
    return {"200": success, **errors}


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of all bodies. Bodies of requests allow no additional fields."""
    requests = list(dict.fromkeys(one.request for one in operations if one.request is not None))
    others = [one for about in operations for one in (about.response, *about.events) if one is not None]
    errors = [about.error for about in operations]
    structs: Sequence[type] = list(dict.fromkeys([*requests, *others, *errors, answers.ErrorBody]))
    _, schemas = msgspec.json.schema_components(structs, ref_template=REFERENCE)
    for request in requests:
        schema = schemas[request.__name__]
        schema["additionalProperties"] = False
        for name, neutral in request.NEUTRAL.items():
            said = "Not supported yet: only neutral values are accepted."
            schema["properties"][name] = {"enum": [None, *neutral], "description": said}
    return dict(sorted(schemas.items()))


def _reference(struct: type | None) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=struct.__name__ if struct is not None else "")}
