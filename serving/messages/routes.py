"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens."""

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.serving.messages.input import RENAMES, chat_request
from jpaged.serving.messages.run import MessageRun
from jpaged.serving.openai_api.chat_run import ChatRun, prepare
from jpaged.serving.openai_api.chat_tools import tools_of
from jpaged.serving.openai_api.chat_turns import turn_of
from jpaged.serving.schemas.messages_answers import (
    TokenCount,
)
from jpaged.serving.schemas.messages_requests import CountTokensRequest, MessagesRequest
from jpaged.serving.schemas.typed_items import renamed
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.sse import MESSAGES, open_stream


async def messages(request: Request) -> Response:
    """Answer a conversation in the format of Anthropic's Messages API."""
    server: Server = request.app.state.server
    body = await read_body(request, MessagesRequest)
    model = server.model_name(body.model)
    with renamed(RENAMES):
        run = MessageRun(await run_in_threadpool(_prepared, server, body), model)
        if body.stream:
            return await open_stream(request.receive, run.events(), MESSAGES)
        message = await until_disconnect(request.receive, run.whole())
    return Response(msgspec.json.encode(message), media_type="application/json")


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a request's prompt, without running it."""
    server: Server = request.app.state.server
    body = await read_body(request, CountTokensRequest)
    server.model_name(body.model)
    length = int(request.headers.get("content-length") or 2**24)  # of the body: about that of its texts
    with renamed(RENAMES):
        work = server.tokenising.run(length, lambda _: _count(server, body))
        count = await until_disconnect(request.receive, work)
    return Response(msgspec.json.encode(TokenCount(count)), media_type="application/json")


ROUTES = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]


def _prepared(server: Server, body: MessagesRequest) -> ChatRun:
    return prepare(server, chat_request(server, body))


def _count(server: Server, body: CountTokensRequest) -> int:
    chat = chat_request(server, body)
    turn = turn_of(server, chat, tools_of(chat), None)
    return len(turn.prompt["prompt_token_ids"])
