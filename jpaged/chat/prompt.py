"""Conversations to prompts: the one place where a chat template is applied, offline and in the server alike.

Templates run in transformers' sandbox (jinja2's ImmutableSandboxedEnvironment): they read what they are given, and
reach neither Python's internals nor files. They come with the model or from the operator, never with a request.
"""

import functools
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.answers.definitions import Tool
from jpaged.errors import RequestError

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = '{"role": "user", "content": "Hello."}'
CALL_EXAMPLE = '{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model brings a template of its own."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_text(tokenizer: Any, chat_template: str | None = None, *, with_tools: bool = False) -> str:
    """The template that is used: a given one, or the tokenizer's; of several, the one for tools where there are any."""
    own = getattr(tokenizer, "chat_template", None) or ""
    if chat_template and not (isinstance(own, Mapping) and chat_template in own) and "{" not in chat_template:
        accepted = "has no Jinja in it, so that every prompt would be this text: give the template's text, not its path"
        raise RequestError("chat_template", chat_template, accepted)
    if not isinstance(own, Mapping):
        return chat_template or own
    if chat_template is not None:
        return own.get(chat_template, chat_template)
    return own.get("tool_use" if with_tools and "tool_use" in own else "default", "")


@functools.lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """What a template reads besides what it sets itself. Raises RequestError for what is no template."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """transformers' own tag, around what an assistant wrote: only what stands in it matters here."""

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    Generation.tags = {"generation"}
    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError as error:
        raise RequestError("chat_template", template, f"is no Jinja template: {error}") from None


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Tool] = (),
    documents: Sequence[Mapping[str, str]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """A conversation as `{"prompt_token_ids": ...}`, with the special tokens that the template writes and no others.

    messages: dicts with `role` and `content`; the role developer is OpenAI's newer name for system. An assistant's may
        have `tool_calls` and `reasoning`, a tool's answer has the role tool and a `tool_call_id`.
    chat_template: Jinja, in place of the tokenizer's own, or the name of one of several that it has.
    continue_final_message: the answer goes on with the last message; goes with add_generation_prompt=False.
    chat_template_kwargs: further variables of the template, such as enable_thinking.

    Raises RequestError for messages that the template refuses, and for tools, documents and variables that it does not
    read: the model would never see them.
    """
    if not messages:
        raise RequestError("messages", [], "must not be empty")
    checked = [_checked(f"messages[{i}]", message) for i, message in enumerate(_as_list(messages))]
    if continue_final_message and add_generation_prompt:
        accepted = "goes with add_generation_prompt=False: the answer cannot begin anew and go on at once"
        raise RequestError("continue_final_message", True, accepted)
    template = template_text(tokenizer, chat_template, with_tools=bool(tools))
    if tokenizer is None or not template:
        raise RequestError(
            "messages",
            f"{len(messages)} messages",
            "the model has no chat template: send a plain prompt instead, or start with --chat-template FILE",
        )
    from jinja2.exceptions import TemplateError

    given = dict(chat_template_kwargs or {})
    try:
        read = template_variables(template)
        if tools or documents or given:
            _check_read(tokenizer, read, tools, documents, given)
        token_ids = tokenizer.apply_chat_template(
            checked,
            chat_template=chat_template,
            tools=[tool.definition for tool in tools] or None,
            documents=[dict(document) for document in documents] if documents else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=True,
            return_dict=False,
            **given,
        )
    except RequestError:
        raise
    except TemplateError as error:
        raise RequestError("messages", list(messages), f"the chat template refuses them: {error}") from None
    except Exception as error:  # whatever a template makes Python raise
        accepted = f"the chat template fails on them: {type(error).__name__}: {error}"
        raise RequestError("messages", list(messages), accepted) from None
    ids = [int(token_id) for token_id in token_ids]
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos]:
        _warn_of_second_bos(template)
    return {"prompt_token_ids": ids}


@functools.lru_cache(maxsize=64)
def _warn_of_second_bos(template: str) -> None:
    """Once a template."""
    logger.warning(
        "the chat template begins a prompt with two begin-of-sequence tokens, which models were not trained on: the "
        "answers may be worse. Mend it with --chat-template FILE; it begins %r",
        template[:80],
    )


def _check_read(
    tokenizer: Any,
    read: frozenset[str],
    tools: Sequence[Tool],
    documents: Sequence[Mapping[str, str]] | None,
    given: Mapping[str, Any],
) -> None:
    """Raise RequestError for what the template does not read."""
    if tools and "tools" not in read:
        raise RequestError(
            "tools",
            [tool.name for tool in tools],
            "the model's chat template has no place for tools, the model would never see them: leave them out, take a "
            "model that was trained to call tools, or start with --chat-template FILE",
        )
    if documents:
        if "documents" not in read:
            accepted = "the model's chat template has no place for documents: write them into a message"
            raise RequestError("documents", f"{len(documents)} documents", accepted)
        for i, document in enumerate(documents):
            if not isinstance(document, Mapping) or not all(isinstance(text, str) for text in document.values()):
                accepted = 'must be a dict of texts, like {"title": "...", "text": "..."}'
                raise RequestError(f"documents[{i}]", document, accepted)
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    taken |= {name for name in read if name.endswith("_token")}  # bos_token and the like, of the tokenizer
    for name, value in given.items():
        if name not in read or name in taken:
            names = ", ".join(sorted(read - taken)) or "no variable that can be set"
            raise RequestError(f"chat_template_kwargs.{name}", value, f"the model's chat template reads {names}")


def _as_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        return messages
    raise RequestError("messages", messages, f"must be a list of messages like {EXAMPLE}")


def _checked(name: str, message: Any) -> dict[str, Any]:
    """A message as templates take it: a role they know, one text, and calls whose arguments are objects."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(name, message, f"must be a dict with role and content, like {EXAMPLE}")
    role = message["role"]
    if role not in ROLES:
        raise RequestError(f"{name}.role", role, f"must be one of {', '.join(ROLES)}")
    made = {key: value for key, value in message.items() if value is not None}
    made["role"] = "system" if role == "developer" else role
    calls = made.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise RequestError(f"{name}.tool_calls", calls, "goes with the role assistant")
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(f"{name}.tool_calls", calls, f"must be a list of calls like {CALL_EXAMPLE}")
        made["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
        made.setdefault("content", "")
    if "tool_call_id" in made and (role != "tool" or not isinstance(made["tool_call_id"], str)):
        raise RequestError(f"{name}.tool_call_id", made["tool_call_id"], "must be a text, and goes with the role tool")
    reasoning = made.pop("reasoning", None) or made.pop("reasoning_content", None)
    if reasoning is not None:
        if role != "assistant" or not isinstance(reasoning, str):
            raise RequestError(f"{name}.reasoning", reasoning, "must be a text, and goes with the role assistant")
        made["reasoning_content"] = reasoning  # the name that templates read
        made.setdefault("content", "")         # an answer that was cut off in its reasoning has none
    if "content" not in made:
        raise RequestError(f"{name}.content", None, f"must be there, like in {EXAMPLE}")
    made["content"] = _text(f"{name}.content", made["content"])
    return made


def _text(name: str, content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        for i, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                accepted = 'only text parts can be read: {"type": "text", "text": "..."}'
                raise RequestError(f"{name}[{i}]", part, accepted)
        return "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(name, content, "must be a text, or a list of text parts")
    return content


def _call(where: str, call: Any) -> dict[str, Any]:
    """A call of an earlier answer: its arguments as an object, which is what templates write as JSON again.

    Arguments that are none (the model broke off in them) stay the text that they are.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(where, call, f"must be a call like {CALL_EXAMPLE}")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, Mapping, type(None))):
        raise RequestError(f"{where}.function.arguments", arguments, "must be JSON as a text")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments.strip() or "{}")
            arguments = parsed if isinstance(parsed, dict) else arguments
        except (ValueError, RecursionError):
            pass
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made
