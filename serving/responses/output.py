"""Makes the items of a response, and the events of its stream, from the text of an answer."""

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, Raw

from jpaged.parsers.answer import AnswerDelta, ToolCallDelta
from jpaged.parsers.answer_parser import AnswerReader
from jpaged.serving.openai_api.generation import Update, new_id
from jpaged.serving.responses.logprobs import EncodedToken, WaitingTokens, joined
from jpaged.serving.schemas.responses_answers import (
    EMPTY,
    DeltaEvent,
    DoneEvent,
    Event,
    ItemEvent,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartEvent,
    ReasoningText,
    Status,
)

_PREFIXES = {"output_text": "msg", "reasoning_text": "rs", "function_call_arguments": "fc"}


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenItem:
    """An item that is being generated. kind: its text's name in the types of events."""

    kind: str
    index: int
    id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = dataclasses.field(default_factory=list)
    tokens: list[EncodedToken] = dataclasses.field(default_factory=list)

    def item(self, status: Status, *, text: str | None = None) -> OutputItem:
        """Return the item as it is when it begins (text is None) or ends."""
        if self.kind == "function_call_arguments":
            return OutputCall(
                id=self.id, call_id=self.call_id, name=self.name, arguments=text or "", status=status
            )
        if self.kind == "reasoning_text":
            return OutputReasoning(
                id=self.id, content=[] if text is None else [ReasoningText(text=text)], status=status
            )
        return OutputMessage(id=self.id, content=[] if text is None else [self.text_part(text)], status=status)

    def text_part(self, text: str) -> OutputText:
        """Return the content of a message."""
        return OutputText(text=text, logprobs=joined([token.in_item for token in self.tokens]))


class ResponseOutput:
    """The output of one response: items in the order in which the model begins them.

    reader:    reads the answer.
    reasoning: return the reasoning. False drops it.
    top:       log-probabilities per token of the text; None: none.
    """

    def __init__(self, reader: AnswerReader, *, reasoning: bool, top: int | None):
        self._parser = reader.new()
        self._reasoning = reasoning
        self._tokens = None if top is None else WaitingTokens(top)
        self._open: _OpenItem | None = None
        self._sequence = -1
        self.items: list[OutputItem] = []
        self.reasoning_text = ""

    def number(self) -> int:
        """Return the sequence number of the next event."""
        self._sequence += 1
        return self._sequence

    def so_far(self) -> list[OutputItem]:
        """Return the items of a response that ends early: the open one is incomplete, with its text so far."""
        if self._open is None:
            return self.items
        return [*self.items, self._open.item("incomplete", text="".join(self._open.pieces))]

    def feed(self, new: Update, end: Status | None) -> Iterator[Event]:
        """Add an update of the answer, and yield its events. end: the response's status if this is the last update."""
        if self._tokens is not None:
            self._tokens.add(new)
        yield from self._add(self._parser.feed(new.text, new.special_offsets))
        if end is None:
            return
        yield from self._add(self._parser.finish())
        if self._open is None and not self.items:
            yield from self._text("output_text", "")
        if self._tokens is not None and self._open is not None and self._open.kind == "output_text":
            yield from self._text("output_text", "", self._tokens.take_all())
        yield from self._close("completed" if end == "completed" else "incomplete")

    def _add(self, delta: AnswerDelta) -> Iterator[Event]:
        if delta.reasoning:
            self.reasoning_text += delta.reasoning
            if self._tokens is not None:
                self._tokens.take(delta.reasoning)
            if self._reasoning:
                yield from self._text("reasoning_text", delta.reasoning)
        if delta.content:
            tokens = self._tokens.take(delta.content) if self._tokens is not None else []
            yield from self._text("output_text", delta.content, tokens)
        for call in delta.tool_calls:
            if self._tokens is not None:
                self._tokens.take_all()
            yield from self._call(call)

    def _text(self, kind: str, text: str, tokens: Sequence[EncodedToken] = ()) -> Iterator[Event]:
        """Add text to the open item of this kind. If there is none, close the open item and begin one."""
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._begin(_OpenItem(kind, len(self.items), new_id(_PREFIXES[kind])))
        item = self._current
        item.pieces.append(text)
        logprobs: Raw | msgspec.UnsetType = UNSET
        if kind == "output_text":
            logprobs = joined([token.in_event for token in tokens])
            item.tokens.extend(tokens)
        if text or tokens:
            yield DeltaEvent(
                type=f"response.{kind}.delta", sequence_number=self.number(), item_id=item.id, output_index=item.index,
                content_index=0, delta=text, logprobs=logprobs,
            )  # fmt: skip

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id:
            yield from self._close("completed")
            kind = "function_call_arguments"
            yield from self._begin(_OpenItem(kind, len(self.items), new_id("fc"), call.id, call.name or ""))
        item = self._current
        item.pieces.append(call.arguments)
        if call.arguments:
            yield DeltaEvent(
                type="response.function_call_arguments.delta", sequence_number=self.number(), item_id=item.id,
                output_index=item.index, delta=call.arguments,
            )  # fmt: skip

    @property
    def _current(self) -> _OpenItem:
        assert self._open is not None
        return self._open

    def _begin(self, item: _OpenItem) -> Iterator[Event]:
        self._open = item
        added = "response.output_item.added"
        yield ItemEvent(
            type=added, sequence_number=self.number(), output_index=item.index, item=item.item("in_progress")
        )
        if item.kind != "function_call_arguments":
            part = ReasoningText(text="") if item.kind == "reasoning_text" else OutputText(text="", logprobs=EMPTY)
            yield PartEvent(
                type="response.content_part.added", sequence_number=self.number(), item_id=item.id,
                output_index=item.index, part=part,
            )  # fmt: skip

    def _close(self, status: Status) -> Iterator[Event]:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.pieces)
        whole = item.item(status, text=text)
        self.items.append(whole)
        is_call = item.kind == "function_call_arguments"
        yield DoneEvent(
            type=f"response.{item.kind}.done", sequence_number=self.number(), item_id=item.id, output_index=item.index,
            content_index=UNSET if is_call else 0, text=UNSET if is_call else text,
            arguments=text if is_call else UNSET,
            logprobs=joined([token.in_event for token in item.tokens]) if item.kind == "output_text" else UNSET,
        )  # fmt: skip
        if not is_call:
            part = ReasoningText(text=text) if item.kind == "reasoning_text" else item.text_part(text)
            yield PartEvent(
                type="response.content_part.done", sequence_number=self.number(), item_id=item.id,
                output_index=item.index, part=part,
            )  # fmt: skip
        done = "response.output_item.done"
        yield ItemEvent(type=done, sequence_number=self.number(), output_index=item.index, item=whole)
