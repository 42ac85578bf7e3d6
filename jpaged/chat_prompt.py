"""Conversations to prompts: the one place where a chat template is applied, offline and in the server alike."""

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError

ROLES = ("system", "developer", "user", "assistant")
EXAMPLE = '{"role": "user", "content": "Hello."}'


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model brings a template of its own."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    chat_template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> dict[str, list[int]]:
    """A conversation as `{"prompt_token_ids": ...}`, with the special tokens that the template writes and no others.

    messages: dicts with `role` and `content`; the role developer is OpenAI's newer name for system.
    chat_template: Jinja, in place of the tokenizer's own. Raises RequestError for messages that it refuses.
    """
    if not messages:
        raise RequestError("messages", [], "must not be empty")
    checked = [_checked(f"messages[{i}]", message) for i, message in enumerate(_as_list(messages))]
    if tokenizer is None or not (chat_template or has_chat_template(tokenizer)):
        raise RequestError(
            "messages",
            f"{len(messages)} messages",
            "the model has no chat template: send a plain prompt instead, or start with --chat-template FILE",
        )
    from jinja2.exceptions import TemplateError

    try:
        token_ids = tokenizer.apply_chat_template(
            checked,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise RequestError("messages", list(messages), f"the chat template refuses them: {error}") from None
    return {"prompt_token_ids": [int(token_id) for token_id in token_ids]}


def _as_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        return messages
    raise RequestError("messages", messages, f"must be a list of messages like {EXAMPLE}")


def _checked(name: str, message: Any) -> dict[str, Any]:
    """A message as templates take it: a role they know, and one text."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise RequestError(name, message, f"must be a dict with role and content, like {EXAMPLE}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RequestError(f"{name}.role", role, f"must be one of {', '.join(ROLES)}")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        for i, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                accepted = 'only text parts can be read: {"type": "text", "text": "..."}'
                raise RequestError(f"{name}.content[{i}]", part, accepted)
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{name}.content", content, "must be a text, or a list of text parts")
    return {**message, "role": "system" if role == "developer" else role, "content": content}
