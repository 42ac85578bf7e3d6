"""Answers requests that are still running when the server's shutdown timeout ends."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.serving import error_responses, sse
from jpaged.serving.error_responses import APIError, error_response

STOPPED = APIError(503, "the server is stopping: send the request again, to another server or later", code="stopping")

# Framing by path. Other streams are COMPLETIONS.
FRAMINGS = {error_responses.MESSAGES: sse.MESSAGES, error_responses.RESPONSES: sse.RESPONSES}


class AnswerWhenStopped:
    """ASGI middleware: when uvicorn cancels a request, its stream ends with an error event, or it is answered with 503.

    Without it, the client's connection would break.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        began = ended = False

        async def watched(message: Message) -> None:
            nonlocal began, ended
            began = began or message["type"] == "http.response.start"
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            # Not raised further: the task ends here, and uvicorn would log the request as failed.
            if not began:
                await error_response(STOPPED, scope)(scope, receive, send)
            elif not ended:
                framing = FRAMINGS.get(scope["path"], sse.COMPLETIONS)
                body = framing.error(STOPPED) + framing.end
                await send({"type": "http.response.body", "body": body, "more_body": False})
