"""Converts the text of a chat answer to OpenAI's message, or to the delta of a stream event."""

import dataclasses

from msgspec import UNSET

from jpaged.parsers import answer as parsed
from jpaged.parsers.answer import AnswerDelta
from jpaged.parsers.answer_parser import AnswerParser, AnswerReader
from jpaged.parsers.tool_formats import call_id
from jpaged.serving.openai_api.chat_tools import ChatTools
from jpaged.serving.openai_api.custom_input import CustomInput
from jpaged.serving.openai_api.generation import Update
from jpaged.serving.schemas.answers import (
    AssistantMessage,
    CustomCall,
    CustomCallDelta,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)


@dataclasses.dataclass(slots=True)
class _State:
    """Parser state of one answer. inputs: of custom tool calls, by index. raw: the `ChatTools.raw` call has begun."""

    parser: AnswerParser
    inputs: dict[int, CustomInput] = dataclasses.field(default_factory=dict)
    raw: bool = False


class ChatAnswers:
    """The answers of one request, with a parser for each.

    tools:     the request's tools, which decide the format of calls.
    reasoning: return the reasoning. False drops it.
    before:    text before every answer's content, with `echo`.
    """

    def __init__(self, reader: AnswerReader, tools: ChatTools, *, reasoning: bool = True, before: str = ""):
        self._reader = reader
        self._tools = tools
        self._reasoning = reasoning
        self._before = before
        self._states: dict[int, _State] = {}

    def message(self, choice: int, text: str, special_offsets: list[int] | None = None) -> AssistantMessage:
        """Return the message of a complete answer. special_offsets: as in CompletionOutput."""
        answer = self._state(choice).parser.read(text, special_offsets)
        message = AssistantMessage(content=answer.content)
        if self._tools.raw is not None:
            call = CustomCall(self._tools.raw, answer.content or "")
            message.content, message.tool_calls = None, [ToolCall(id=call_id(), type="custom", custom=call)]
        elif answer.tool_calls and self._tools.legacy:
            first = answer.tool_calls[0]
            message.function_call = FunctionCall(first.name, first.arguments)
        elif answer.tool_calls:
            message.tool_calls = [self._call(call) for call in answer.tool_calls]
        elif answer.reasoning is None or not self._reasoning:
            message.content = answer.content or ""
        if self._before:
            message.content = self._before + (message.content or "")
        if self._reasoning and answer.reasoning:
            message.reasoning = message.reasoning_content = answer.reasoning
        return message

    def delta(self, new: Update) -> Delta | None:
        """Return the delta of an update, or None if nothing is new. The first delta of an answer has its role."""
        first = new.choice not in self._states
        state = self._state(new.choice)
        delta = state.parser.feed(new.text, new.special_offsets)
        ended = new.finish_reason is not None
        if ended:
            end = state.parser.finish()
            delta = AnswerDelta(delta.reasoning + end.reasoning, delta.content + end.content, delta.tool_calls)
            delta.tool_calls += end.tool_calls
        reasoning = delta.reasoning if self._reasoning else ""
        content = (self._before if first else "") + delta.content
        if self._tools.raw is not None:
            calls, content = self._raw_call(state, delta.content, ended=ended), self._before if first else ""
        else:
            calls = [one for call in delta.tool_calls if (one := self._call_delta(state, call)) is not None]
            calls += self._rests(state) if ended else []
        if not (reasoning or content or calls) and not first:
            return None
        made = Delta(role="assistant" if first else UNSET)
        if content or (first and not (reasoning or calls)):
            made.content = content
        if reasoning:
            made.reasoning = made.reasoning_content = reasoning
        if calls and self._tools.legacy:
            made.function_call = calls[0].function
        elif calls:
            made.tool_calls = calls
        return made

    def finish_reason(self, choice: int, reason: str | None) -> str | None:
        """Return 'tool_calls' or 'function_call' after a complete call that the request did not name, else `reason`."""
        called = choice in self._states and (self._tools.raw is not None or self._states[choice].parser.called)
        if reason != "stop" or not called or self._tools.named:
            return reason
        return "function_call" if self._tools.legacy else "tool_calls"

    def _call(self, call: parsed.ToolCall) -> ToolCall:
        if call.name not in self._tools.custom:
            return ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments))
        reader = CustomInput()
        return ToolCall(
            id=call.id, type="custom", custom=CustomCall(call.name, reader.feed(call.arguments) + reader.finish())
        )

    def _call_delta(self, state: _State, call: parsed.ToolCallDelta) -> ToolCallDelta | None:
        """Return the delta of a call; None if its input has nothing new."""
        if call.name in self._tools.custom:
            state.inputs[call.index] = CustomInput()
        reader = state.inputs.get(call.index)
        if reader is None:
            function = FunctionCallDelta(call.name or UNSET, call.arguments)
            kind = "function" if call.id else UNSET
            return ToolCallDelta(index=call.index, id=call.id or UNSET, type=kind, function=function)
        new = reader.feed(call.arguments)
        if not (call.id or new):
            return None
        # The delta of a custom tool has no type: OpenAI's stream events have only functions.
        return ToolCallDelta(index=call.index, id=call.id or UNSET, custom=CustomCallDelta(call.name or UNSET, new))

    def _rests(self, state: _State) -> list[ToolCallDelta]:
        """Return the last deltas of custom tools' inputs, at the end of an answer."""
        rests = [(index, reader.finish()) for index, reader in state.inputs.items()]
        return [ToolCallDelta(index=index, custom=CustomCallDelta(input=rest)) for index, rest in rests if rest]

    def _raw_call(self, state: _State, text: str, *, ended: bool) -> list[ToolCallDelta]:
        """Return the delta of a call whose input is the whole answer."""
        if not state.raw and (text or ended):
            state.raw = True
            return [ToolCallDelta(index=0, id=call_id(), custom=CustomCallDelta(self._tools.raw or UNSET, text))]
        return [ToolCallDelta(index=0, custom=CustomCallDelta(input=text))] if text else []

    def _state(self, choice: int) -> _State:
        if choice not in self._states:
            self._states[choice] = _State(self._reader.new())
        return self._states[choice]
