"""Renders conversations as prompts with a chat template, for `LLM.chat` and for the server.

Templates run in transformers' sandbox (jinja2's ImmutableSandboxedEnvironment). They can read their variables, but not
Python's internals or files. A template comes from the model or from the operator, never from a request.

Imported late: Jinja, which only chats need.
"""

import dataclasses
import functools
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.chat.time_limit import TimeLimitError, time_limit
from jpaged.errors import RequestError
from jpaged.parsers.definitions import Tool
from jpaged.text.encoder import TokenLimit, text_encoder

logger = logging.getLogger(__name__)

EXAMPLE = '{"role": "user", "content": "Hello."}'
RENDER_SECONDS = 2.0  # of processor time; a conversation of 1 MB takes milliseconds
MAX_LOGGED_NAME = 100  # characters
CALL_EXAMPLE = '{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'


def has_chat_template(tokenizer: Any) -> bool:
    """True if the model has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_text(tokenizer: Any, chat_template: str | None = None, *, with_tools: bool = False) -> str:
    """Return the template to use: the given one, or the tokenizer's.

    If the tokenizer has several, `with_tools` selects its template for tools. Raises RequestError for a path.
    """
    own = getattr(tokenizer, "chat_template", None) or ""
    if chat_template and not (isinstance(own, Mapping) and chat_template in own) and "{" not in chat_template:
        accepted = "has no Jinja, so every prompt would be this text: give the text of the template, not its path"
        raise RequestError("chat_template", chat_template, accepted)
    if not isinstance(own, Mapping):
        return chat_template or own
    if chat_template is not None:
        return own.get(chat_template, chat_template)
    return own.get("tool_use" if with_tools and "tool_use" in own else "default", "")


@functools.lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set. Raises RequestError if it is not valid Jinja."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag {% generation %} of transformers, around the assistant's text. Only its content matters here."""

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    Generation.tags = {"generation"}
    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError as error:
        raise RequestError("chat_template", template, f"is not a Jinja template: {error}") from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """Inputs of a chat template other than messages and tools.

    add_generation_prompt:  end the prompt with the beginning of an answer.
    continue_final_message: the answer continues the last message. Needs add_generation_prompt=False.
    documents:              dicts of strings, for templates that read documents.
    chat_template_kwargs:   other variables of the template, such as `enable_thinking`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, str]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
    *,
    tools: Sequence[Tool] = (),
    options: RenderOptions | None = None,
    limit: TokenLimit | None = None,
) -> dict[str, list[int]]:
    """Render a conversation as `{"prompt_token_ids": ...}`. It has only the special tokens that the template writes.

    messages: dicts with `role` and `content`. The role "developer" is OpenAI's newer name for "system". A message of
        the assistant may have `tool_calls` and `reasoning`. A tool's result has the role "tool" and a `tool_call_id`.
        The template decides about other roles.
    chat_template: Jinja, or the name of one of the tokenizer's templates. None: the tokenizer's own.
    limit: maximum number of tokens. A longer prompt is an error, or is returned in part if it is to be truncated.

    Raises RequestError for messages that the template rejects, or does not render in RENDER_SECONDS. Unread tools and
    documents raise it too, because the model would never see them. Other unread variables are logged once and dropped.
    """
    options = options or RenderOptions()
    if not messages:
        raise RequestError("messages", [], "must not be empty")
    checked = [_checked(f"messages[{i}]", message) for i, message in enumerate(_as_list(messages))]
    if options.continue_final_message and options.add_generation_prompt:
        accepted = "needs add_generation_prompt=False: an answer cannot both begin and continue"
        raise RequestError("continue_final_message", True, accepted)
    template = template_text(tokenizer, chat_template, with_tools=bool(tools))
    if tokenizer is None or not template:
        raise RequestError(
            "messages",
            f"{len(messages)} messages",
            "the model has no chat template: send a plain prompt instead, or start with --chat-template FILE",
        )
    from jinja2.exceptions import TemplateError

    try:
        read = template_variables(template)
        _check_read(read, tools, options.documents)
        variables = _variables(tokenizer, template, read, options.chat_template_kwargs)
        if "message.thinking" in template:  # gpt-oss's name for the reasoning
            checked = [_with_thinking(message) for message in checked]
        with time_limit(RENDER_SECONDS):
            text = _apply_template(tokenizer, checked, chat_template, tools, options, variables)
    except TimeLimitError:
        accepted = (
            f"the chat template takes more than {RENDER_SECONDS:g} s to render them: send fewer or shorter messages. A "
            "template that never ends needs --chat-template FILE"
        )
        raise RequestError("messages", f"{len(messages)} messages", accepted) from None
    except RequestError:
        raise
    except TemplateError as error:
        raise RequestError("messages", list(messages), f"the chat template rejects them: {error}") from None
    except Exception as error:  # a template can make Python raise anything
        accepted = f"the chat template fails on them: {type(error).__name__}: {error}"
        raise RequestError("messages", list(messages), accepted) from None
    encoded = text_encoder(tokenizer).encode("messages", text, limit, special_tokens=False)
    ids = encoded.token_ids
    if limit is not None and limit.truncate is None and len(ids) > limit.count:
        length = f"{len(ids):,}" if encoded.complete else f"more than {limit.count:,}"
        accepted = (
            f"have {length} tokens, a prompt takes at most {limit.count:,}: shorten them, or start with a larger "
            "max_model_len, if the model was trained for more"
        )
        raise RequestError("messages", f"{len(messages)} messages", accepted)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos]:
        _warn_of_second_bos(template)
    return {"prompt_token_ids": ids}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {**message, "thinking": reasoning}


def continued_text(messages: Sequence[Mapping[str, Any]], options: RenderOptions | None) -> str:
    """The text of the last of these checked messages, if the answer continues it; otherwise ""."""
    if options is None or not options.continue_final_message:
        return ""
    return _checked("", messages[-1])["content"]


def _apply_template(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    chat_template: str | None,
    tools: Sequence[Tool],
    options: RenderOptions,
    variables: Mapping[str, Any],
) -> str:
    """Render checked messages. Raises whatever the template raises. variables: checked chat_template_kwargs."""
    return tokenizer.apply_chat_template(
        messages,
        chat_template=chat_template,
        tools=[tool.definition for tool in tools] or None,
        documents=[dict(document) for document in options.documents] if options.documents else None,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        tokenize=False,
        **variables,
    )


@functools.lru_cache(maxsize=64)
def _warn_of_second_bos(template: str) -> None:
    """Log a warning, once per template."""
    logger.warning(
        "the chat template begins a prompt with two begin-of-sequence tokens. Models are not trained on that, and the "
        "answers may be worse. Replace it with --chat-template FILE. It begins with %r",
        template[:80],
    )


@functools.lru_cache(maxsize=64)
def log_unread(template: str, name: str) -> None:
    """Log that a template does not read a variable, once per template and variable."""
    logger.warning(
        "%s has no effect: the model's chat template does not read it (logged once)", name[:MAX_LOGGED_NAME]
    )


def _check_read(
    read: frozenset[str], tools: Sequence[Tool], documents: Sequence[Mapping[str, str]] | None
) -> None:
    """Raise RequestError for tools and documents that the template does not read. read: variables of the template."""
    if tools and "tools" not in read:
        raise RequestError(
            "tools",
            [tool.name for tool in tools],
            "the model's chat template does not read tools, so the model would not see them: leave them out, use a "
            "model trained to call tools, or start with --chat-template FILE",
        )
    if documents:
        if "documents" not in read:
            accepted = "the model's chat template does not read documents: write them into a message"
            raise RequestError("documents", f"{len(documents)} documents", accepted)
        for i, document in enumerate(documents):
            if not isinstance(document, Mapping) or not all(isinstance(text, str) for text in document.values()):
                accepted = 'must be a dict of strings, like {"title": "...", "text": "..."}'
                raise RequestError(f"documents[{i}]", document, accepted)


def _variables(
    tokenizer: Any, template: str, read: frozenset[str], kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the chat_template_kwargs that the template reads, and log the others. read: variables of the template.

    Raises RequestError for a name that the caller may not set.
    """
    if not kwargs:
        return {}
    if not isinstance(kwargs, Mapping):
        accepted = 'must be a mapping from variables to values, like {"enable_thinking": False}'
        raise RequestError("chat_template_kwargs", kwargs, accepted)
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    reserved |= {name for name in read if name.endswith("_token")}  # such as bos_token: the tokenizer sets them
    for name, value in kwargs.items():
        if name in reserved:
            names = ", ".join(sorted(read - reserved)) or "no variable that can be set"
            raise RequestError(f"chat_template_kwargs.{name}", value, f"the model's chat template reads {names}")
        if name not in read:
            log_unread(template, f"chat_template_kwargs.{name}")
    return {name: value for name, value in kwargs.items() if name in read}


def _as_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        return messages
    raise RequestError("messages", messages, f"must be a list of messages like {EXAMPLE}")


def _checked(name: str, message: Any) -> dict[str, Any]:
    """Check a message and convert it for templates: a role, one text, and arguments of calls as objects."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(name, message, f"must be a dict with role and content, like {EXAMPLE}")
    role = message["role"]
    if not role or not isinstance(role, str):
        raise RequestError(f"{name}.role", role, "must be a string such as system, user, assistant or tool")
    made = {key: value for key, value in message.items() if value is not None}
    made["role"] = "system" if role == "developer" else role
    calls = made.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise RequestError(f"{name}.tool_calls", calls, "needs the role assistant")
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(f"{name}.tool_calls", calls, f"must be a list of calls like {CALL_EXAMPLE}")
        made["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if "tool_call_id" in made and (role != "tool" or not isinstance(made["tool_call_id"], str)):
        accepted = "must be a string, in a message with the role tool"
        raise RequestError(f"{name}.tool_call_id", made["tool_call_id"], accepted)
    reasoning = made.pop("reasoning", None) or made.pop("reasoning_content", None)
    if reasoning is not None:
        if role != "assistant" or not isinstance(reasoning, str):
            raise RequestError(f"{name}.reasoning", reasoning, "must be a string, in a message with the role assistant")
        made["reasoning_content"] = reasoning  # the name that templates read
    refusal = made.pop("refusal", None)
    if refusal is not None:
        if role != "assistant" or not isinstance(refusal, str):
            raise RequestError(f"{name}.refusal", refusal, "must be a string, in a message with the role assistant")
        made.setdefault("content", refusal)
    if role == "assistant":
        made.setdefault("content", "")  # clients send answers back without the fields that they do not know
    if "content" not in made:
        raise RequestError(f"{name}.content", None, f"is missing: a message is a dict like {EXAMPLE}")
    made["content"] = _text(f"{name}.content", made["content"], role)
    return made


def _text(name: str, content: Any, role: str) -> str:
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        return "\n".join(_text_of_part(f"{name}[{i}]", part, role) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(name, content, "must be a string, or a list of text parts")
    return content


def _text_of_part(name: str, part: Any, role: str) -> str:
    """The text of a part. In OpenAI's API, a refusal is a part of the assistant's messages."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if kind == "text" or (kind == "refusal" and role == "assistant") else None
    if not isinstance(text, str):
        raise RequestError(name, part, 'must be a string part: {"type": "text", "text": "..."}')
    return text


def _call(where: str, call: Any) -> dict[str, Any]:
    """Convert a call of an earlier answer: its arguments become an object, which templates write as JSON again.

    Empty arguments (`null`, `[]`, an empty string) become an empty object. JSON inside a string of JSON is read. Other
    arguments that are not a JSON object, such as the arguments of a call that was cut off, stay a string.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(where, call, f"must be a call like {CALL_EXAMPLE}")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, Mapping, type(None))):
        raise RequestError(f"{where}.function.arguments", arguments, "must be a string with JSON")
    if isinstance(arguments, str):
        arguments = _object(arguments)
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _object(arguments: str) -> Any:
    """The JSON object in a text, or in a JSON string in the text. The text itself if there is no object."""
    parsed: Any = arguments
    try:
        for _ in range(2):
            parsed = json.loads(parsed.strip() or "{}") if isinstance(parsed, str) else parsed
    except (ValueError, RecursionError):
        return arguments
    return parsed or {} if isinstance(parsed, dict) or parsed in (None, [], "") else arguments
