"""Generates one message of Anthropic's API: its content, and the events of its stream."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec

from jpaged.outputs import CompletionOutput
from jpaged.parsers.answer import AnswerDelta, ToolCallDelta
from jpaged.serving.openai_api import generation
from jpaged.serving.openai_api.chat_run import ChatRun
from jpaged.serving.openai_api.generation import new_id
from jpaged.serving.schemas.messages_answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Content,
    ContentDelta,
    MessageDelta,
    MessageEvent,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopDelta,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenBlock:
    """A block that is being generated. call_id and name: of a call."""

    kind: str  # text, thinking, tool_use
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = dataclasses.field(default_factory=list)

    def content(self) -> Content:
        """Return the block with the text so far."""
        text = "".join(self.pieces)
        if self.kind == "tool_use":
            return ToolUseContent(id=self.call_id, name=self.name, input=_object(text))
        return ThinkingContent(thinking=text) if self.kind == "thinking" else TextContent(text=text)

    def delta(self, text: str) -> BlockDelta:
        """Return the event of new text."""
        match self.kind:
            case "tool_use":
                delta = ContentDelta(type="input_json_delta", partial_json=text)
            case "thinking":
                delta = ContentDelta(type="thinking_delta", thinking=text)
            case _:
                delta = ContentDelta(type="text_delta", text=text)
        return BlockDelta(index=self.index, delta=delta)


class MessageRun:
    """One message that is generated. `message` is complete after the last event."""

    def __init__(self, run: ChatRun, model: str):
        self._run = run
        self._parser = run.turn.reader.new()
        self._open: _OpenBlock | None = None
        self.message = MessageObject(
            id=new_id("msg"), model=model, content=[], usage=MessageUsage(
                input_tokens=run.prompt_tokens, cache_read_input_tokens=0, output_tokens=0
            )
        )  # fmt: skip

    async def events(self) -> AsyncGenerator[MessageEvent, None]:
        """Generate the message, and yield the events of its stream."""
        progress = generation.Progress()
        started = False
        async with aclosing(self._run.updates(self.message.id, progress)) as updates:
            async for new in updates:
                if not started:
                    started = True
                    usage = _usage(progress)
                    usage.output_tokens = 0
                    yield MessageStart(message=msgspec.structs.replace(self.message, content=[], usage=usage))
                    yield Ping()
                delta = self._parser.feed(new.text, new.special_offsets)
                for event in self._add(delta):
                    yield event
                if new.finish_reason is not None:
                    for event in self._add(self._parser.finish()):
                        yield event
                    for event in self._close():
                        yield event
        output = progress.last[0].outputs[0]
        self.message.usage = _usage(progress)
        self.message.stop_reason = self._stop_reason(output)
        if self.message.stop_reason == "stop_sequence":
            self.message.stop_sequence = str(output.stop_reason)
        end = StopDelta(self.message.stop_reason, self.message.stop_sequence)
        yield MessageDelta(delta=end, usage=self.message.usage)
        yield MessageStop()

    async def whole(self) -> MessageObject:
        """Generate the message, and return it."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.message

    def _add(self, delta: AnswerDelta) -> Iterator[MessageEvent]:
        if delta.reasoning:
            yield from self._text("thinking", delta.reasoning)
        if delta.content:
            yield from self._text("text", delta.content)
        for call in delta.tool_calls:
            yield from self._call(call)

    def _text(self, kind: str, text: str) -> Iterator[MessageEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield from self._begin(_OpenBlock(kind, len(self.message.content)))
        assert self._open is not None
        self._open.pieces.append(text)
        yield self._open.delta(text)

    def _call(self, call: ToolCallDelta) -> Iterator[MessageEvent]:
        if call.id:
            yield from self._close()
            yield from self._begin(_OpenBlock("tool_use", len(self.message.content), call.id, call.name or ""))
        assert self._open is not None
        self._open.pieces.append(call.arguments)
        if call.arguments:
            yield self._open.delta(call.arguments)

    def _begin(self, block: _OpenBlock) -> Iterator[MessageEvent]:
        self._open = block
        yield BlockStart(index=block.index, content_block=block.content())

    def _close(self) -> Iterator[MessageEvent]:
        """End the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return
        self.message.content.append(block.content())
        if block.kind == "thinking":
            yield BlockDelta(index=block.index, delta=ContentDelta(type="signature_delta", signature=""))
        yield BlockStop(index=block.index)

    def _stop_reason(self, output: CompletionOutput) -> StopReason:
        if output.finish_reason == "length":
            return "max_tokens"
        if output.finish_reason == "stop" and isinstance(output.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if self._parser.called else "end_turn"


def _usage(progress: generation.Progress) -> MessageUsage:
    counted = progress.usage()
    cached = counted.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=counted.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=counted.completion_tokens,
    )


def _object(text: str) -> dict[str, object]:
    """Return the arguments of a call; empty if they are not a JSON object."""
    try:
        read = json.loads(text)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
