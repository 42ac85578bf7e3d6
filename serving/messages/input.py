"""Converts the body of POST /v1/messages to a chat request."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jpaged.chat.prompt import template_text, template_variables
from jpaged.errors import RequestError
from jpaged.serving.schemas.messages_requests import (
    ASSISTANT_BLOCKS,
    TEXT_ONLY,
    USER_BLOCKS,
    CountTokensRequest,
    MessagesRequest,
    MessageToolChoice,
    MessageTurn,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from jpaged.serving.schemas.requests import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    MessageToolCall,
    NamedFunction,
    ToolChoiceObject,
)
from jpaged.serving.schemas.typed_items import convert, read_item
from jpaged.serving.server_state import Server

# Parameter names of the chat request -> names of the body. The first match applies.
RENAMES = (
    (r"^prompt(_token_ids)?$", "messages"),
    (r"^(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function\b", r"\1"),
    (r"^tool_choice\.function\b", "tool_choice"),
    (r"^structured_outputs\.grammar$", "tools"),
    (r"^response_format(\.json_schema)?\b", "output_config.format"),
    (r"^reasoning_effort$", "output_config.effort"),
    (r"^thinking_token_budget$", "thinking.budget_tokens"),
    (r"^stop\b", "stop_sequences"),
)


def chat_request(server: Server, body: CountTokensRequest) -> ChatRequest:
    """Return the request as a chat. Raises RequestError that names the field."""
    messages = []
    if body.system:
        messages.append(ChatMessage(role="system", content=_joined("system", body.system)))
    for i, turn in enumerate(body.messages):
        messages += _messages(f"messages[{i}]", turn)
    choice, output = body.tool_choice, body.output_config
    tools = [_tool(f"tools[{i}]", given) for i, given in enumerate(body.tools or [])]
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        tools=tools or None,
        tool_choice=None if choice is None else _tool_choice(choice, tools),
        parallel_tool_calls=not choice.disable_parallel_tool_use if choice is not None else None,
        reasoning_effort=output.effort if output is not None else None,
        response_format=_format(output.format) if output is not None else None,
        chat_template_kwargs=_template_kwargs(server, body),
        thinking_token_budget=body.thinking.budget_tokens if body.thinking is not None else None,
    )
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:  # the beginning of the answer
        chat.add_generation_prompt, chat.continue_final_message = False, True
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        for name in ("stream", "temperature", "top_k", "top_p", "cache_salt", "priority", "vllm_xargs"):
            setattr(chat, name, getattr(body, name))
    return chat


def _messages(where: str, turn: MessageTurn) -> list[ChatMessage]:
    """Return one message of the body as messages of a chat: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    if turn.role == "assistant":
        return [_assistant(f"{where}.content", turn.content)]
    if turn.role == "system":
        return [ChatMessage(role="system", content=_joined(f"{where}.content", turn.content))]
    made: list[ChatMessage] = []
    texts: list[str] = []
    for i, given in enumerate(turn.content):
        place = f"{where}.content[{i}]"
        block = read_item(place, given, USER_BLOCKS)
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                made.append(ChatMessage(role="user", content="\n".join(texts)))
                texts = []
            text = ("Error: " if block.is_error else "") + _joined(f"{place}.content", block.content)
            made.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=text))
    if texts or not made:
        made.append(ChatMessage(role="user", content="\n".join(texts)))
    return made


def _assistant(where: str, content: Sequence[dict[str, Any]]) -> ChatMessage:
    texts, thinking, calls = [], [], []
    for i, given in enumerate(content):
        block = read_item(f"{where}[{i}]", given, ASSISTANT_BLOCKS)
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thinking.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = CalledFunction(block.name, msgspec.json.encode(block.input).decode())
            calls.append(MessageToolCall(id=block.id, type="function", function=function))
    message = ChatMessage(role="assistant", content="".join(texts), tool_calls=calls or None)
    if thinking:
        message.reasoning = message.reasoning_content = "".join(thinking)
    return message


def _joined(where: str, content: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    blocks = [read_item(f"{where}[{i}]", given, TEXT_ONLY) for i, given in enumerate(content)]
    return "\n".join(block.text for block in blocks)


def _tool(where: str, given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type", "custom") not in ("custom", None):
        accepted = "only tools of the client run here, not Anthropic's: must be custom"
        raise RequestError(f"{where}.type", given["type"], accepted)
    tool = convert(where, given, ToolDefinition)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(given: MessageToolChoice, tools: Sequence[Any]) -> Any:
    if given.type == "tool":
        if given.name is None:
            raise RequestError("tool_choice.name", None, "is missing: type tool needs the name of the tool")
        return ToolChoiceObject(type="function", function=NamedFunction(given.name))
    if given.name is not None:
        raise RequestError("tool_choice.name", given.name, f"only goes with type tool, not with {given.type}")
    return {"any": "required", "auto": "auto", "none": "none"}[given.type]


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or given.keys() != {"type", "schema"}:
        raise RequestError("output_config.format", given, 'must be {"type": "json_schema", "schema": {...}}')
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _template_kwargs(server: Server, body: CountTokensRequest) -> dict[str, Any] | None:
    """Return the request's template variables, and the template's thinking switch if it has one."""
    if body.thinking is None:
        return body.chat_template_kwargs
    wanted = body.thinking.type != "disabled"
    if wanted and server.chat.reasoning is None:
        accepted = "needs a server with --reasoning-parser or --reasoning-tags: leave it out, or send disabled"
        raise RequestError("thinking.type", body.thinking.type, accepted)
    if body.thinking.type == "enabled" and body.thinking.budget_tokens is None:
        raise RequestError("thinking.budget_tokens", None, "is missing: send a number of tokens, or type adaptive")
    if body.thinking.type != "enabled" and body.thinking.budget_tokens is not None:
        raise RequestError("thinking.budget_tokens", body.thinking.budget_tokens, "only goes with type enabled")
    chat_template = server.chat_of(body.model).chat_template
    template = template_text(server.engine.get_tokenizer(), chat_template, with_tools=bool(body.tools))
    read = template_variables(template) & {"enable_thinking", "thinking"} & set(server.template_kwargs)
    return {**dict.fromkeys(read, wanted), **(body.chat_template_kwargs or {})}
