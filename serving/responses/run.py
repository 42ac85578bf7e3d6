"""Generates one response: its events, its final object, and its end after an error."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from msgspec import Raw
from starlette.concurrency import run_in_threadpool

from jpaged.errors import CapacityError, RequestError
from jpaged.serving.openai_api import generation
from jpaged.serving.openai_api.chat_run import ChatRun
from jpaged.serving.responses.output import ResponseOutput
from jpaged.serving.responses.store import StoredResponse
from jpaged.serving.schemas.responses_answers import (
    Event,
    FailureReason,
    IncompleteReason,
    InputDetails,
    OutputDetails,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    Status,
)
from jpaged.serving.web.error_responses import error_body


@dataclasses.dataclass(slots=True)
class ResponseRun:
    """One response that is generated.

    shown:        the response as clients see it, updated while it runs.
    conversation: its input items as JSON, with those of earlier responses.
    encoded:      the response as JSON when it has ended; None before.
    """

    chat: ChatRun
    shown: ResponseObject
    conversation: bytes
    output: ResponseOutput
    encoded: bytes | None = None

    async def events(self, on_admitted: Callable[[], None] | None = None) -> AsyncGenerator[Event, None]:
        """Generate the response, and yield its stream's events. on_admitted: called when the engine has queued it."""
        progress = generation.Progress()
        started = False
        if self.shown.background:
            for name in ("created", "queued"):
                yield self._event(name, msgspec.json.encode(self.shown))
        async with aclosing(self.chat.updates(self.shown.id, progress, on_admitted=on_admitted)) as updates:
            async for new in updates:
                if not started:
                    started = True
                    self.shown.status = "in_progress"
                    for name in ("in_progress",) if self.shown.background else ("created", "in_progress"):
                        yield self._event(name, msgspec.json.encode(self.shown))
                end = _status(new.finish_reason) if new.finish_reason else None
                for event in self.output.feed(new, end):
                    yield event
        await self._finish(progress)
        yield self._event(self.shown.status, self.encoded)

    async def whole(self) -> bytes:
        """Generate the response, and return it as JSON."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        assert self.encoded is not None
        return self.encoded

    def end(self, status: Status, error: Exception | None = None) -> ResponseEvent:
        """End a response that was cancelled or has failed, and return the event."""
        self.shown.status = status
        self.shown.output = self.output.so_far()
        if error is not None:
            code = "rate_limit_exceeded" if isinstance(error, CapacityError) else "server_error"
            code = "invalid_prompt" if isinstance(error, RequestError) else code
            self.shown.error = FailureReason(code, error_body(error)[1]["error"]["message"])
        self.encoded = msgspec.json.encode(self.shown)
        return self._event(status, self.encoded)

    def stored(self) -> StoredResponse:
        """Return the response as it is stored."""
        encoded = self.encoded or msgspec.json.encode(self.shown)
        return StoredResponse(encoded, self.conversation, self.shown.status)

    async def _finish(self, progress: generation.Progress) -> None:
        shown, counted = self.shown, progress.usage()
        reasoning = 0
        if self.output.reasoning_text:
            reasoning = await run_in_threadpool(self._num_tokens, self.output.reasoning_text)
        reason = progress.last[0].outputs[0].finish_reason
        shown.status = _status(reason)
        if shown.status == "incomplete":
            shown.incomplete_details = IncompleteReason("max_output_tokens" if reason == "length" else None)
        shown.completed_at = time.time() if shown.status == "completed" else None
        shown.output = self.output.items
        shown.usage = ResponseUsage(
            counted.prompt_tokens,
            InputDetails(counted.prompt_tokens_details.cached_tokens),
            counted.completion_tokens,
            OutputDetails(min(reasoning, counted.completion_tokens)),
            counted.total_tokens,
        )
        self.encoded = msgspec.json.encode(shown)

    def _num_tokens(self, text: str) -> int:
        return len(self.chat.server.engine.get_tokenizer().encode(text, add_special_tokens=False))

    def _event(self, name: str, encoded: bytes | None) -> ResponseEvent:
        return ResponseEvent(
            type=f"response.{name}", sequence_number=self.output.number(), response=Raw(encoded or b"null")
        )


def _status(finish_reason: str | None) -> Status:
    return "completed" if finish_reason == "stop" else "incomplete"
