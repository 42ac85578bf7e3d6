"""Answers requests that are still running when the server's shutdown timeout ends."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.serving.web.error_responses import STOPPED, error_response


class AnswerWhenStopped:
    """ASGI middleware that answers 503 when uvicorn cancels a request without an answer. Its connection would break.

    `EventStream` ends a stream itself, with an error event. The connection of a partly sent JSON body is closed.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = began or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            # Not raised further: the task ends here, and uvicorn would log the request as failed.
            if not began:
                await error_response(STOPPED, scope)(scope, receive, send)
