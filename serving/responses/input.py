"""Converts the body of POST /v1/responses to a chat request, and its input to the items that are stored."""

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError
from jpaged.serving.openai_api.generation import new_id
from jpaged.serving.schemas.requests import (
    AllowedTools,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    GenerationRequest,
    MessageToolCall,
    NamedFunction,
    ToolChoiceObject,
)
from jpaged.serving.schemas.responses_requests import (
    ITEMS,
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    TextPart,
)
from jpaged.serving.schemas.typed_items import read_item

Item = dict[str, Any]  # an item of the API as JSON: it is stored, listed and rendered in this form

# Parameter names of the chat request -> names of the body. The first match applies.
RENAMES = (
    (r"^messages\b.*", "input"),
    (r"^prompt(_token_ids)?$", "input"),
    (r"^(tools\[\d+\])\.function\b", r"\1"),
    (r"^tool_choice\.(function|allowed_tools)\b", "tool_choice"),
    (r"^structured_outputs\.grammar$", "tools"),
    (r"^response_format\.json_schema\b", "text.format"),
    (r"^response_format\b", "text.format"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^verbosity$", "text.verbosity"),
    (r"^logprobs$", "top_logprobs"),
)

_TOOL_KEYS = {"type", "name", "description", "parameters", "strict"}
_FORMAT_KEYS = {"name", "schema", "strict", "description"}
_COPIED = tuple(name for name in GenerationRequest.__struct_fields__ if name not in ("response_format", "metadata"))


def input_items(body: ResponsesRequest) -> list[Item]:
    """Return the items of the request's own input, each with an id. Raises RequestError that names the field."""
    if isinstance(body.input, str):
        return [_message("user", [{"type": "input_text", "text": body.input}])]
    return [_item(f"input[{i}]", given) for i, given in enumerate(body.input)]


def chat_request(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """Return the request as a chat. items: the whole conversation. Raises RequestError that names the field."""
    if not items:
        raise RequestError("input", [], "must not be empty")
    before = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    text, reasoning = body.text, body.reasoning
    chat = ChatRequest(
        messages=before + _messages(items),
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        thinking_token_budget=body.thinking_token_budget,
        reasoning_effort=reasoning.effort if reasoning is not None else None,
        verbosity=text.verbosity if text is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_format(text.format) if text is not None else None,
        **{name: getattr(body, name) for name in _COPIED},
    )
    chat.max_tokens = body.max_output_tokens
    # Stream also in the background, because the first token changes the response's status.
    chat.stream = bool(body.stream or body.background)
    return chat


def _item(where: str, given: Mapping[str, Any]) -> Item:
    """Check one item of the input, and return it as it is stored."""
    item = read_item(where, given, ITEMS, "message" if "role" in given else None)
    match item:
        case MessageItem(role="assistant"):
            return _message("assistant", _parts(f"{where}.content", item.content, "output_text"))
        case MessageItem():
            return _message(item.role, _parts(f"{where}.content", item.content, "input_text"))
        case CallItem():
            made = {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {"id": new_id("fc"), **made, "status": "completed"}
        case CallOutputItem():
            output = item.output
            if not isinstance(output, str):
                output = "\n".join(part["text"] for part in _parts(f"{where}.output", output, "input_text"))
            made = {"type": "function_call_output", "call_id": item.call_id, "output": output}
            return {"id": new_id("fco"), **made, "status": "completed"}
        case ReasoningItem():
            texts = [_reasoning_text(f"{where}.content[{i}]", part) for i, part in enumerate(item.content)]
            content = [{"type": "reasoning_text", "text": text} for text in texts]
            return {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": "completed"}
        case _:
            raise AssertionError(type(item))


def _message(role: str, content: list[Item]) -> Item:
    return {"id": new_id("msg"), "type": "message", "role": role, "content": content, "status": "completed"}


def _parts(where: str, content: str | list[dict[str, Any]], kind: str) -> list[Item]:
    """Return the text of a message as parts of one kind: `input_text` or `output_text`."""
    kinds = {"input_text": TextPart, "output_text": TextPart, "refusal": RefusalPart}
    if isinstance(content, str):
        texts = [content]
    else:
        parts = [read_item(f"{where}[{i}]", part, kinds) for i, part in enumerate(content)]
        texts = [part.refusal if isinstance(part, RefusalPart) else part.text for part in parts]
    extra: Item = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **extra} for text in texts]


def _reasoning_text(where: str, part: Mapping[str, Any]) -> str:
    if not isinstance(part.get("text"), str) or part.get("type") != "reasoning_text":
        raise RequestError(where, part, 'must be {"type": "reasoning_text", "text": "..."}')
    return part["text"]


def _messages(items: Sequence[Item]) -> list[ChatMessage]:
    """Return the messages of a conversation. Reasoning, text and calls of one answer become one message."""
    made: list[ChatMessage] = []
    answer: ChatMessage | None = None  # the assistant's message that the next item may belong to
    for item in items:
        kind, role = item["type"], item.get("role", "assistant")
        if kind == "function_call_output":
            made.append(ChatMessage(role="tool", tool_call_id=item["call_id"], content=item["output"]))
            answer = None
        elif role != "assistant":
            made.append(ChatMessage(role=role, content=_text(item)))
            answer = None
        else:
            begins = kind != "function_call" and answer is not None and (answer.content or answer.tool_calls)
            if answer is None or begins or (kind == "reasoning" and answer.reasoning):
                answer = ChatMessage(role="assistant")
                made.append(answer)
            _add(answer, item)
    return made


def _add(answer: ChatMessage, item: Item) -> None:
    """Add an item of the assistant to its message."""
    match item["type"]:
        case "reasoning":
            answer.reasoning = answer.reasoning_content = _text(item)
            answer.content = ""
        case "function_call":
            call = CalledFunction(item["name"], item["arguments"])
            made = MessageToolCall(id=item["call_id"], type="function", function=call)
            answer.tool_calls = [*(answer.tool_calls or []), made]
        case _:
            answer.content = _text(item)


def _text(item: Item) -> str:
    return "\n".join(part["text"] for part in item.get("content") or [])


def shown_tools(body: ResponsesRequest) -> list[Item]:
    """Return the tools as an answer shows them."""
    empty = {"description": None, "parameters": None, "strict": None}
    return [empty | {key: value for key, value in tool.items() if key in _TOOL_KEYS} for tool in body.tools or []]


def _tool(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in the format of a chat request."""
    if given.get("type") != "function":
        accepted = "only functions of the client run here, not hosted tools: must be function"
        raise RequestError(f"{where}.type", given.get("type"), accepted)
    for key in given.keys() - _TOOL_KEYS:
        if given[key] is not None:
            raise RequestError(f"{where}.{key}", given[key], "is not supported here: leave it out")
    function = {key: given[key] for key in _TOOL_KEYS - {"type"} if given.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: str | dict[str, Any] | None) -> Any:
    if given is None or isinstance(given, str):
        return given
    match given:
        case {"type": "function", "name": str(name)}:
            return ToolChoiceObject(type="function", function=NamedFunction(name))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            if all(isinstance(one, dict) for one in tools):
                named = [{"type": one.get("type"), "function": one} for one in tools]
                return ToolChoiceObject(type="allowed_tools", allowed_tools=AllowedTools(mode, named))
    accepted = (
        'must be none, auto, required, {"type": "function", "name": "f"}, or {"type": "allowed_tools", "mode": "auto", '
        '"tools": [{"type": "function", "name": "f"}]}'
    )
    raise RequestError("tool_choice", given, accepted)


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` as `response_format` of a chat request."""
    if given is None or given.get("type") != "json_schema":
        return given
    for key in given.keys() - _FORMAT_KEYS - {"type"}:
        raise RequestError(f"text.format.{key}", given[key], "unknown field of type json_schema")
    return {"type": "json_schema", "json_schema": {key: given[key] for key in _FORMAT_KEYS & given.keys()}}
