"""Converts the text of a chat answer to OpenAI's message, or to the delta of a stream event."""

from msgspec import UNSET

from jpaged.answers.answer import AnswerDelta
from jpaged.answers.parser import AnswerParser, AnswerReader
from jpaged.serving.generation import Update
from jpaged.serving.response_schema import (
    AssistantMessage,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)


class ChatAnswers:
    """The answers of one request, with a parser for each.

    named: the request names the tool to call. As in OpenAI's API, the answer then ends with 'stop'.
    """

    def __init__(self, reader: AnswerReader, *, named: bool):
        self._reader = reader
        self._named = named
        self._parsers: dict[int, AnswerParser] = {}

    def message(self, choice: int, text: str) -> AssistantMessage:
        """Return the message of a complete answer."""
        answer = self._parser(choice).read([text])
        calls = [ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in answer.tool_calls]
        plain = not calls and answer.reasoning is None
        return AssistantMessage(
            content=answer.content or "" if plain else answer.content,
            reasoning=answer.reasoning or UNSET,
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def delta(self, new: Update) -> Delta | None:
        """Return the delta of an update, or None if nothing is new. The first delta of an answer has its role."""
        first = new.choice not in self._parsers
        parser = self._parser(new.choice)
        delta = parser.feed(new.text)
        if new.finish_reason is not None:
            end = parser.finish()
            delta = AnswerDelta(delta.reasoning + end.reasoning, delta.content + end.content, delta.tool_calls)
            delta.tool_calls += end.tool_calls
        if not delta and not first:
            return None
        role_only = first and not (delta.reasoning or delta.tool_calls)
        return Delta(
            role="assistant" if first else UNSET,
            content=delta.content if delta.content or role_only else UNSET,
            reasoning=delta.reasoning or UNSET,
            reasoning_content=delta.reasoning or UNSET,
            tool_calls=[
                ToolCallDelta(
                    index=call.index,
                    id=call.id or UNSET,
                    type="function" if call.id else UNSET,
                    function=FunctionCallDelta(call.name or UNSET, call.arguments),
                )
                for call in delta.tool_calls
            ]
            or UNSET,
        )

    def finish_reason(self, choice: int, reason: str | None) -> str | None:
        """Return 'tool_calls' for an answer that stopped after a complete tool call, else the engine's reason."""
        called = choice in self._parsers and self._parsers[choice].called
        return "tool_calls" if reason == "stop" and called and not self._named else reason

    def _parser(self, choice: int) -> AnswerParser:
        if choice not in self._parsers:
            self._parsers[choice] = self._reader.new()
        return self._parsers[choice]
