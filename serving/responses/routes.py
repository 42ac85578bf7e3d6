"""/v1/responses: create, retrieve, list the input, cancel and delete."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Raw
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.errors import RequestError
from jpaged.serving.openai_api import generation
from jpaged.serving.openai_api.chat_run import prepare
from jpaged.serving.openai_api.chat_tools import tools_of
from jpaged.serving.openai_api.chat_turns import turn_of
from jpaged.serving.openai_api.generation import new_id
from jpaged.serving.responses.input import (
    RENAMES,
    chat_request,
    input_items,
    shown_tools,
)
from jpaged.serving.responses.output import ResponseOutput
from jpaged.serving.responses.run import ResponseRun
from jpaged.serving.responses.store import EventLog, ResponseStore, StoredResponse
from jpaged.serving.schemas.responses_answers import (
    DeletedResponse,
    ErrorEvent,
    Event,
    InputItemList,
    InputTokenCount,
    ResponseObject,
)
from jpaged.serving.schemas.responses_requests import InputTokensRequest, ResponsesRequest, check_fields
from jpaged.serving.schemas.typed_items import renamed
from jpaged.serving.server_state import Server
from jpaged.serving.web.auth import OWNER
from jpaged.serving.web.body import read_body
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.error_responses import APIError, error_body
from jpaged.serving.web.list_pages import PageQuery
from jpaged.serving.web.sse import Framing, open_stream, typed_event

MAX_DIGITS = 10  # of a sequence number in a query
MAX_PAGE = 100  # input items, as in OpenAI's API
ADMITTED_SECONDS = 1.0  # maximum wait until the engine's queue accepts a background request
LOGPROBS = "message.output_text.logprobs"


async def create(request: Request) -> Response:
    """Answer text, or a conversation of items."""
    server: Server = request.app.state.server
    store: ResponseStore = request.app.state.responses
    body = await read_body(request, ResponsesRequest)
    owner = request.scope.get(OWNER, b"")
    model = server.model_name(body.model)
    check_fields(body)
    earlier = _earlier(store, owner, body.previous_response_id)
    with renamed(RENAMES):
        run = await run_in_threadpool(_prepared, server, body, model, earlier)
        if body.background:
            return await _start(request, store, owner, run, stream=bool(body.stream))
        if body.stream:
            kept = store if body.store is not False else None
            framing = Framing(typed_event, lambda error: _failed(run, kept, owner, error), b"")
            return await open_stream(request.receive, _streamed(run, kept, owner), framing)
        encoded = await until_disconnect(request.receive, run.whole())
    if body.store is not False:
        store.put(owner, run.shown.id, run.stored())
    return _json(encoded)


async def retrieve(request: Request) -> Response:
    """Return a stored response. stream=true: the events of a background response, after `starting_after`."""
    _refuse_include(request)
    query = request.query_params
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise RequestError("stream", stream, "must be true or false")
    if after is not None and stream == "false":
        raise RequestError("starting_after", after, "only goes with stream=true")
    if after is not None and not (after.isascii() and after.isdecimal() and len(after) < MAX_DIGITS):
        raise RequestError("starting_after", after, "must be the sequence_number of an event")
    stored = _found(request)
    if stream == "false":
        return _json(stored.response)
    if stored.events is None:
        accepted = "only responses that were made with background=true keep their events: retrieve it without stream"
        raise RequestError("stream", True, accepted)
    return await _replay(request, stored.events, 0 if after is None else int(after) + 1)


async def count_input(request: Request) -> Response:
    """Count the tokens of a request's prompt, without running it."""
    server: Server = request.app.state.server
    body = await read_body(request, InputTokensRequest)
    server.model_name(body.model)
    check_fields(body)
    earlier = _earlier(request.app.state.responses, request.scope.get(OWNER, b""), body.previous_response_id)
    length = int(request.headers.get("content-length") or 2**24)  # of the body, close to the length of its texts
    length += 0 if earlier is None else earlier.size
    with renamed(RENAMES):
        work = server.tokenising.run(length, lambda _: _num_input_tokens(server, body, earlier))
        count = await until_disconnect(request.receive, work)
    return _json(msgspec.json.encode(InputTokenCount(count)))


async def delete(request: Request) -> Response:
    """Delete a stored response. If it runs in the background, it is cancelled first."""
    response_id = request.path_params["response_id"]
    store: ResponseStore = request.app.state.responses
    await store.delete(request.scope.get(OWNER, b""), response_id)
    return _json(msgspec.json.encode(DeletedResponse(response_id)))


async def cancel(request: Request) -> Response:
    """Cancel a response that runs in the background. One that has ended stays as it is."""
    store: ResponseStore = request.app.state.responses
    stored = _found(request)
    if stored.events is None:
        accepted = "only a response that was made with background=true can be cancelled: close the connection"
        raise RequestError("response_id", request.path_params["response_id"], accepted)
    await store.cancel(stored)
    return _json(stored.response)


async def list_input(request: Request) -> Response:
    """Return a page of the input items of a stored response, with those of earlier responses."""
    _refuse_include(request)
    query = PageQuery.read(request.query_params, 20, MAX_PAGE)
    stored = _found(request)
    page = await run_in_threadpool(_page, stored.conversation, query)
    return _json(msgspec.json.encode(page))


ROUTES = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input, methods=["POST"]),
    Route("/v1/responses/{response_id}", retrieve),
    Route("/v1/responses/{response_id}", delete, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", cancel, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", list_input),
]


def _earlier(store: ResponseStore, owner: bytes, response_id: str | None) -> StoredResponse | None:
    """Return the response that the request continues. Raises APIError 404, or RequestError if it has no answer."""
    if response_id is None:
        return None
    try:
        earlier = store.get(owner, response_id)
    except APIError as error:
        raise APIError(error.status, str(error), param="previous_response_id", code=error.code) from None
    if earlier.status not in ("completed", "incomplete"):
        accepted = f"the response is {earlier.status}: continue one that is completed or incomplete"
        raise RequestError("previous_response_id", response_id, accepted)
    return earlier


def _prepared(server: Server, body: ResponsesRequest, model: str, earlier: StoredResponse | None) -> ResponseRun:
    """Render a request. Takes time that grows with the conversation: run it in a thread. Raises RequestError."""
    items = _conversation(body, earlier)
    top = (body.top_logprobs or 0) if body.top_logprobs or LOGPROBS in (body.include or ()) else None
    chat = chat_request(body, items)
    run = prepare(server, chat, logprobs=top, drop_oldest=body.truncation == "auto")
    text = {"format": (body.text and body.text.format) or {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    effort = body.reasoning.effort if body.reasoning is not None else None
    shown = ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="queued",
        background=bool(body.background),
        instructions=_raw(body.instructions),
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=_raw(body.metadata or {}),
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=_raw({"effort": effort, "summary": None}),
        safety_identifier=body.safety_identifier,
        service_tier=generation.TIER,
        temperature=run.params.temperature,
        text=_raw(text),
        tool_choice=_raw(body.tool_choice or "auto"),
        tools=_raw(shown_tools(body)),
        top_logprobs=body.top_logprobs or 0,
        top_p=run.params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
    if top is not None and body.logprob_token_ids:
        top = len(body.logprob_token_ids) + 1  # those, and the token's own
    output = ResponseOutput(run.turn.reader, reasoning=body.include_reasoning is not False, top=top)
    return ResponseRun(run, shown, msgspec.json.encode(items), output)


def _conversation(body: ResponsesRequest, earlier: StoredResponse | None) -> list[dict[str, Any]]:
    """Return all items of the prompt. earlier: the response that the request continues."""
    before: list[dict[str, Any]] = []
    if earlier is not None:
        before = msgspec.json.decode(earlier.conversation) + msgspec.json.decode(earlier.response)["output"]
    return before + input_items(body)


def _num_input_tokens(server: Server, body: ResponsesRequest, earlier: StoredResponse | None) -> int:
    chat = chat_request(body, _conversation(body, earlier))
    return len(turn_of(server, chat, tools_of(chat), None).prompt["prompt_token_ids"])


async def _streamed(run: ResponseRun, store: ResponseStore | None, owner: bytes) -> AsyncGenerator[Event, None]:
    """Yield the events of a response, and store it before the last one."""
    with renamed(RENAMES):
        async with aclosing(run.events()) as events:
            async for event in events:
                if run.encoded is not None and store is not None:
                    store.put(owner, run.shown.id, run.stored())
                yield event


def _failed(run: ResponseRun, store: ResponseStore | None, owner: bytes, error: Exception) -> bytes:
    """Store a response whose stream fails, and return the last event of the stream."""
    if run.encoded is not None:  # its last event was sent
        return b""
    failed = run.end("failed", error)
    if store is not None:
        store.put(owner, run.shown.id, run.stored())
    return typed_event(failed)


async def _start(
    request: Request, store: ResponseStore, owner: bytes, run: ResponseRun, *, stream: bool
) -> Response:
    """Start a response in the background, and return it with the status `queued`. stream: return its events.

    Raises the error of a request that the engine refuses, such as CapacityError for a full queue. If the engine takes
    longer than `ADMITTED_SECONDS`, to compile a grammar or programs, the stored response shows the error later.
    """
    queued = run.stored()
    first, queued.events = queued.response, EventLog()
    admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    store.start(owner, run.shown.id, queued, _in_background(store, owner, run, queued, admitted))
    await asyncio.wait({admitted}, timeout=ADMITTED_SECONDS)
    if admitted.done():
        admitted.result()
    admitted.cancel()
    return await _replay(request, queued.events, 0) if stream else _json(first)


async def _replay(request: Request, log: EventLog, start: int) -> Response:
    """Return the stream of a response in the background, from the sequence number `start` on."""
    if not log.has_more(start):
        return Response(b"", media_type="text/event-stream")
    framing = Framing(lambda encoded: encoded, lambda error: _error_event(error, log), b"")
    return await open_stream(request.receive, log.events(start), framing)


def _error_event(error: Exception, log: EventLog) -> bytes:
    """Encode the last event of a stream that ends before its response does."""
    details = error_body(error)[1]["error"]
    code, message = details["code"], details["message"]
    return typed_event(ErrorEvent(code=code, message=message, param=details["param"], sequence_number=len(log)))


async def _in_background(
    store: ResponseStore, owner: bytes, run: ResponseRun, stored: StoredResponse, admitted: asyncio.Future[None]
) -> None:
    """Generate a response and store it. admitted: receives the error of a request that the engine refuses."""

    def on_admitted() -> None:
        if not admitted.done():
            admitted.set_result(None)

    log = stored.events
    assert log is not None
    try:
        with renamed(RENAMES):
            async with aclosing(run.events(on_admitted)) as events:
                async for event in events:
                    log.add(typed_event(event))
                    if event.type == "response.in_progress":
                        stored.response, stored.status = msgspec.json.encode(run.shown), run.shown.status
    except asyncio.CancelledError:
        run.end("cancelled")  # OpenAI's API has no event for it
    except Exception as error:
        if not admitted.done():
            log.end()
            store.forget(owner, run.shown.id)
            admitted.set_exception(error)
            return
        log.add(typed_event(run.end("failed", error)))
    on_admitted()
    log.end()
    ended = run.stored()
    stored.response, stored.status = ended.response, ended.status
    store.put(owner, run.shown.id, stored)


def _found(request: Request) -> StoredResponse:
    store: ResponseStore = request.app.state.responses
    return store.get(request.scope.get(OWNER, b""), request.path_params["response_id"])


def _refuse_include(request: Request) -> None:
    """Raise RequestError for a query parameter `include`."""
    for name in ("include", "include[]"):
        if name in request.query_params:
            raise RequestError(name, request.query_params[name], "send it when the response is made: leave it out")


def _page(conversation: bytes, query: PageQuery) -> InputItemList:
    items: list[dict[str, Any]] = msgspec.json.decode(conversation)
    page, has_more = query.cut(items, lambda item: item["id"], "an input item of this response")
    return InputItemList(
        data=[_raw(item) for item in page],
        first_id=page[0]["id"] if page else "",
        last_id=page[-1]["id"] if page else "",
        has_more=has_more,
    )


def _raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def _json(encoded: bytes) -> Response:
    return Response(encoded, media_type="application/json")
