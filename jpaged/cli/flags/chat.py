"""Flags of the commands that answer OpenAI's API: names of the model, the chat template, tool calls and reasoning."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.cli.flags.engine import one_line_help, read_text


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """The flags that `jpaged serve` and `jpaged run-batch` share."""

    served_model_name: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = ()
    """Model names that requests may use. Default: the name of the model as given to this command."""

    chat_template: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with a Jinja chat template, in place of the model's own."""

    tool_call_parser: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Format in which the model writes tool calls: hermes, llama3_json, mistral, pythonic or json. Default: derived
    from the chat template."""

    reasoning_parser: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Return the model's reasoning separately from its answer: deepseek_r1 or qwen3. Default: not separated."""

    reasoning_tags: Annotated[
        tuple[str, str] | None, tyro.conf.arg(metavar="START END", help_behavior_hint="")
    ] = None
    """Tags around the reasoning, for a model that no --reasoning-parser fits."""

    chat_template_kwargs: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")
    ] = DEFAULT_TEMPLATE_KWARGS
    """Variables of the chat template that requests may set in chat_template_kwargs."""

    def chat_formats(self) -> ChatFormats:
        """Return what the flags say about chats. Raises RequestError."""
        template = read_text("chat_template", self.chat_template)
        return ChatFormats.named(template, self.tool_call_parser, self.reasoning_parser, self.reasoning_tags)
