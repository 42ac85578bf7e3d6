"""Finds the struct of a body: by its name, or for /invocations by the body's fields."""

import msgspec

from jpaged.errors import RequestError
from jpaged.serving.schemas import adapters, files, messages_requests, pooling, requests, responses_requests
from jpaged.serving.schemas.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from jpaged.serving.schemas.requests import ChatRequest, CompletionRequest, SizeLimits

INVOCATION = "invocation:"  # followed by the engine's task

_SCORES: dict[str, type[SizeLimits]] = {
    "query": RerankRequest, "queries": ScoreRequest, "text_1": ScoreRequest, "data_1": ScoreRequest,
}  # fmt: skip
_BY_TASK: dict[str, dict[str, type[SizeLimits]]] = {
    "generate": {"messages": ChatRequest, "prompt": CompletionRequest},
    "embed": {"messages": EmbeddingRequest, "input": EmbeddingRequest, **_SCORES},
    "classify": {"messages": ClassifyRequest, "input": ClassifyRequest, **_SCORES},
}
_STRUCTS = vars(requests) | vars(pooling) | vars(responses_requests) | vars(messages_requests) | vars(files)
_STRUCTS |= vars(adapters)


def body_schema(name: str, raw: bytes) -> type[SizeLimits]:
    """Return the struct of a body. name: of the struct, or INVOCATION and a task. Raises RequestError."""
    if not name.startswith(INVOCATION):
        return _STRUCTS[name]
    task = name.removeprefix(INVOCATION)
    by_field = _BY_TASK[task]
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return next(iter(by_field.values()))  # reading the body as any struct raises the error
    found = next((schema for field, schema in by_field.items() if field in fields), None)
    if found is None:
        accepted = f"must have one of the fields {', '.join(by_field)}: the model's task is {task}"
        raise RequestError("body", sorted(fields)[:20], accepted)
    return found
