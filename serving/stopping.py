"""What a client is told whose request outlives the server: an answer, not a connection that breaks."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.serving.error_responses import APIError, error_body, error_response
from jpaged.serving.sse import DONE, event

STOPPED = APIError(503, "the server is stopping: send the request again, to another server or later", code="stopping")


class AnswerWhenStopped:
    """Uvicorn cancels what runs when the time to stop is over: streams then end with an error event, others get 503."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        began = ended = False

        async def watched(message: Message) -> None:
            nonlocal began, ended
            began = began or message["type"] == "http.response.start"
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            # the task ends here, so nothing is lost by not raising further; uvicorn would log it as a failure
            if not began:
                await error_response(STOPPED)(scope, receive, send)
            elif not ended:
                body = event(error_body(STOPPED)[1]) + DONE
                await send({"type": "http.response.body", "body": body, "more_body": False})
