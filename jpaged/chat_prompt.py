"""Conversations to prompts: the one place where a chat template is applied, offline and in the server alike."""

from collections.abc import Sequence
from typing import Any

from jpaged.errors import RequestError


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
    if tokenizer is None or not (chat_template or has_chat_template(tokenizer)):
        raise RequestError(
            "messages",
            f"{len(messages)} messages",
            "the model has no chat template: send a plain prompt instead, or start with --chat-template FILE",
        )
    from jinja2.exceptions import TemplateError

    renamed = [
        {**message, "role": "system" if message["role"] == "developer" else message["role"]} for message in messages
    ]
    try:
        token_ids = tokenizer.apply_chat_template(
            renamed,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise RequestError("messages", list(messages), f"the chat template refuses them: {error}") from None
    return {"prompt_token_ids": [int(token_id) for token_id in token_ids]}
