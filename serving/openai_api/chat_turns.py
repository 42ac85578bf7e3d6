"""Converts a chat request to a `ChatTurn`: its messages, its tools and its template variables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jpaged.chat.prompt import RenderOptions, chat_prompt, log_unread, template_text, template_variables
from jpaged.chat.turn import ChatTurn, chat_turn
from jpaged.errors import RequestError
from jpaged.params.sampling import SamplingParams
from jpaged.parsers.definitions import Tool
from jpaged.serving.openai_api.chat_tools import INPUT, ChatTools
from jpaged.serving.schemas.pooling import PooledInput, TokenizeRequest
from jpaged.serving.schemas.requests import ChatMessage, ChatRequest, MessageToolCall
from jpaged.serving.server_state import Server
from jpaged.text.encoder import TokenLimit

MAX_KWARG_CHARACTERS = 1_000
THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that only switch reasoning on and off
TEMPLATE_WRITES_SPECIAL = "the chat template writes the special tokens already: leave it out"
MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning", "reasoning_content", "refusal")


def turn_of(server: Server, body: ChatRequest, tools: ChatTools, params: SamplingParams | None) -> ChatTurn:
    """Render the request's conversation. Raises RequestError that names the field.

    params: limit the prompt's tokens, as in `TokenLimit.of_prompt`. None: no limit.
    """
    tokenizer = server.engine.get_tokenizer()
    if body.add_special_tokens and tokenizer is not None and len(tokenizer.encode("")):
        raise RequestError("add_special_tokens", True, TEMPLATE_WRITES_SPECIAL)
    turn = chat_turn(
        tokenizer,
        messages_of(body.messages),
        server.chat_of(body.model),
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False and not tools.legacy,
        options=RenderOptions(
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            documents=body.documents,
            chat_template_kwargs=_template_kwargs(server, tokenizer, body, bool(tools.tools)),
        ),
        limit=None if params is None else TokenLimit.of_prompt(server.engine.max_model_len, params),
    )
    return tools.of_turn(turn)


def turn_params(body: ChatRequest, turn: ChatTurn, params: SamplingParams) -> SamplingParams:
    """Return `params` with the settings of the turn. Raises RequestError if they contradict a forced call.

    As in OpenAI's API, `response_format` does not apply to a forced call. The schema of its tool does.
    """
    if turn.grammar and body.response_format is not None:
        params = dataclasses.replace(params, structured_outputs=None)
    return turn.sampling_params(params)


def rendered(
    server: Server,
    body: PooledInput | TokenizeRequest,
    *,
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool,
    limit: TokenLimit | None = None,
) -> list[int]:
    """Render a conversation to token ids. add_generation_prompt: default of the body's field. Raises RequestError."""
    asked = body.add_generation_prompt
    tokenizer = server.engine.get_tokenizer()
    if body.add_special_tokens and tokenizer is not None and len(tokenizer.encode("")):
        raise RequestError("add_special_tokens", True, TEMPLATE_WRITES_SPECIAL)
    options = RenderOptions(
        add_generation_prompt=add_generation_prompt if asked is None else asked,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=_checked_kwargs(server, tokenizer, body.model, body.chat_template_kwargs),
    )
    messages = messages_of(body.messages or [])
    prompt = chat_prompt(
        tokenizer, messages, server.chat_of(body.model).chat_template, tools=tools, options=options, limit=limit
    )
    return prompt["prompt_token_ids"]


def echoed_text(body: ChatRequest) -> str:
    """Return the text before every answer: with `echo`, the last message if it is the assistant's, else none."""
    last = body.messages[-1] if body.messages else None
    if not body.echo or last is None or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or part.refusal or "" for part in last.content)


def messages_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them. Calls in all formats become function calls."""
    made, last_call = [], "call_0"
    for i, message in enumerate(messages):
        given = {name: getattr(message, name) for name in MESSAGE_FIELDS}
        one = {name: msgspec.to_builtins(value) for name, value in given.items() if value is not None}
        if message.tool_calls is not None:
            where = f"messages[{i}].tool_calls"
            one["tool_calls"] = [_call(f"{where}[{j}]", call) for j, call in enumerate(message.tool_calls)]
        if message.function_call is not None:
            last_call = f"call_{i}"
            function = msgspec.to_builtins(message.function_call)
            one["tool_calls"] = [{"id": last_call, "type": "function", "function": function}]
        if message.role == "function":
            one |= {"role": "tool", "tool_call_id": last_call}
        made.append(one)
    return made


def _call(where: str, call: MessageToolCall) -> dict[str, Any]:
    """Return a call as a function call. A custom tool becomes a function with the parameter `input`."""
    kind = call.type or ("function" if call.custom is None else "custom")
    if call.custom is None if kind == "custom" else call.function is None:
        raise RequestError(f"{where}.{kind}", None, f"is missing: the call has the type {kind}")
    if call.custom is not None:
        function: dict[str, Any] = {"name": call.custom.name, "arguments": {INPUT: call.custom.input}}
    else:
        function = msgspec.to_builtins(call.function)
    return ({} if call.id is None else {"id": call.id}) | {"type": "function", "function": function}


def _template_kwargs(server: Server, tokenizer: Any, body: ChatRequest, has_tools: bool) -> dict[str, Any]:
    """Return the template variables that the request sets. Raises RequestError for one that it may not set."""
    given = _checked_kwargs(server, tokenizer, body.model, body.chat_template_kwargs)
    effort, verbosity = body.reasoning_effort, body.verbosity
    if effort is None and verbosity is None:
        return given
    template = template_text(tokenizer, server.chat_of(body.model).chat_template, with_tools=has_tools)
    read = template_variables(template)
    if effort is not None:
        variable = next((name for name in ("reasoning_effort", *THINKING_SWITCHES) if name in read), None)
        if variable is None:
            log_unread(template, "reasoning_effort")
        else:
            value = effort != "none" if variable in THINKING_SWITCHES else effort
            _set(given, "reasoning_effort", effort, variable, value)
    if verbosity is not None:
        if "verbosity" in read:
            _set(given, "verbosity", verbosity, "verbosity", verbosity)
        elif verbosity != "medium":
            log_unread(template, "verbosity")
    return given


def _checked_kwargs(
    server: Server, tokenizer: Any, model: str | None, kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the request's template variables. Raises RequestError for a forbidden variable, or a long value.

    `chat_prompt` drops names that no template reads.
    """
    given, read = dict(kwargs or {}), frozenset[str]()
    if given:
        chat_template = server.chat_of(model).chat_template
        texts = [template_text(tokenizer, chat_template, with_tools=tools) for tools in (False, True)]
        read = read.union(*map(template_variables, texts))
    for name, value in given.items():
        if name in read and name not in server.template_kwargs:
            names = ", ".join(server.template_kwargs) or "none"
            accepted = f"requests may set {names} (see --chat-template-kwargs)"
            raise RequestError(f"chat_template_kwargs.{name}", value, accepted)
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARACTERS:
            accepted = f"must have at most {MAX_KWARG_CHARACTERS} characters"
            raise RequestError(f"chat_template_kwargs.{name}", value, accepted)
    return given


def _set(given: dict[str, Any], field: str, sent: str, name: str, value: Any) -> None:
    """Set a template variable to the value of a field. Raises RequestError if chat_template_kwargs contradict it."""
    if given.setdefault(name, value) != value:
        accepted = f"chat_template_kwargs says {name}={given[name]!r}: give one of them"
        raise RequestError(field, sent, accepted)
