"""Converts a chat request to a `ChatTurn`: its messages, its tools and its template variables."""

from typing import Any

import msgspec

from jpaged.answers.definitions import ToolChoice, checked_tools
from jpaged.chat.prompt import RenderOptions, template_text, template_variables
from jpaged.chat.turn import ChatTurn, chat_turn
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.serving.generation import Server
from jpaged.serving.request_schema import ChatMessage, ChatRequest, NamedToolChoice
from jpaged.text.encoder import TokenLimit

MAX_KWARG_CHARACTERS = 1_000
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


def turn_of(server: Server, body: ChatRequest, params: SamplingParams) -> ChatTurn:
    """Render the request's conversation. Raises RequestError that names the field.

    params: say how many tokens of the prompt are kept.
    """
    tokenizer = server.engine.get_tokenizer()
    if body.add_special_tokens and tokenizer is not None and len(tokenizer.encode("")):
        accepted = "the chat template writes the special tokens already: leave it out"
        raise RequestError("add_special_tokens", True, accepted)
    tools = checked_tools(body.tools or [])
    return chat_turn(
        tokenizer,
        [_message(message) for message in body.messages],
        server.chat,
        tools=tools,
        tool_choice=_choice(body, bool(tools)),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        options=RenderOptions(
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            documents=body.documents,
            chat_template_kwargs=_template_kwargs(server, tokenizer, body, bool(tools)),
        ),
        limit=TokenLimit.of_prompt(server.engine.max_model_len, params),
    )


def _message(message: ChatMessage) -> dict[str, Any]:
    given = {name: getattr(message, name) for name in MESSAGE_FIELDS}
    return {name: msgspec.to_builtins(value) for name, value in given.items() if value is not None}


def _choice(body: ChatRequest, has_tools: bool) -> ToolChoice:
    if isinstance(body.tool_choice, NamedToolChoice):
        return ToolChoice("named", body.tool_choice.function.name)
    if body.tool_choice is None or (body.tool_choice == "auto" and not has_tools):
        return ToolChoice("auto" if has_tools else "none")
    return ToolChoice(body.tool_choice)


def _template_kwargs(server: Server, tokenizer: Any, body: ChatRequest, has_tools: bool) -> dict[str, Any]:
    """Return the template variables that the request sets. Raises RequestError for one that it may not set."""
    given = dict(body.chat_template_kwargs or {})
    for name, value in given.items():
        if name not in server.template_kwargs:
            names = ", ".join(server.template_kwargs) or "none"
            accepted = f"requests may set {names} (see --chat-template-kwargs)"
            raise RequestError(f"chat_template_kwargs.{name}", value, accepted)
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARACTERS:
            accepted = f"must have at most {MAX_KWARG_CHARACTERS} characters"
            raise RequestError(f"chat_template_kwargs.{name}", value, accepted)
    if body.reasoning_effort is not None:
        read = template_variables(template_text(tokenizer, server.chat.chat_template, with_tools=has_tools))
        name, value = _effort(body.reasoning_effort, read)
        if given.setdefault(name, value) != value:
            accepted = f"chat_template_kwargs says {name}={given[name]!r}: give one of them"
            raise RequestError("reasoning_effort", body.reasoning_effort, accepted)
    return given


def _effort(effort: str, read: frozenset[str]) -> tuple[str, Any]:
    """Return the template variable that reasoning_effort sets, and its value.

    It is `reasoning_effort`, or a variable that only switches reasoning on and off. Raises RequestError if the template
    reads neither.
    """
    if "reasoning_effort" in read:
        return "reasoning_effort", effort
    for name in ("enable_thinking", "thinking"):
        if name in read:
            return name, effort != "none"
    accepted = "the model's chat template does not use it: leave it out"
    raise RequestError("reasoning_effort", effort, accepted)
