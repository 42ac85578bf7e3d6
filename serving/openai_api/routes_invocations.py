"""POST /invocations, SageMaker's only route for requests: the body's fields say which route answers."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jpaged.serving.openai_api.routes_chat import answer_chat
from jpaged.serving.openai_api.routes_completions import answer_completion
from jpaged.serving.openai_api.routes_embeddings import answer_classify, answer_embedding
from jpaged.serving.openai_api.routes_scores import answer_rerank, answer_score
from jpaged.serving.schemas.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from jpaged.serving.schemas.requests import ChatRequest, CompletionRequest
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_invocation

_ROUTES: dict[type, Callable[[Request, Any], Awaitable[Response]]] = {
    ChatRequest: answer_chat,
    CompletionRequest: answer_completion,
    EmbeddingRequest: answer_embedding,
    ClassifyRequest: answer_classify,
    ScoreRequest: answer_score,
    RerankRequest: answer_rerank,
}


async def invocations(request: Request) -> Response:
    """Answer the body of another route. Its fields and the model's task choose the route."""
    server: Server = request.app.state.server
    model = server.engine.pooling
    body = await read_invocation(request, "generate" if model is None else model.task)
    return await _ROUTES[type(body)](request, body)
