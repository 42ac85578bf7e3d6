"""POST /invocations, SageMaker's only route for requests: the body's fields say which route answers."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jpaged.serving.body import read_invocation
from jpaged.serving.generation import Server
from jpaged.serving.pooling_schema import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from jpaged.serving.request_schema import ChatRequest, CompletionRequest
from jpaged.serving.routes_chat import answer_chat
from jpaged.serving.routes_completions import answer_completion
from jpaged.serving.routes_embeddings import answer_classify, answer_embedding
from jpaged.serving.routes_scores import answer_rerank, answer_score

_ROUTES: dict[type, Callable[[Request, Any], Awaitable[Response]]] = {
    ChatRequest: answer_chat,
    CompletionRequest: answer_completion,
    EmbeddingRequest: answer_embedding,
    ClassifyRequest: answer_classify,
    ScoreRequest: answer_score,
    RerankRequest: answer_rerank,
}


async def invocations(request: Request) -> Response:
    """Answer a body of any other route that the model can answer."""
    server: Server = request.app.state.server
    model = server.engine.pooling
    body = await read_invocation(request, "generate" if model is None else model.task)
    return await _ROUTES[type(body)](request, body)
