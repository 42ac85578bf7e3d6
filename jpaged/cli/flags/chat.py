"""Flags of commands that answer OpenAI requests: model names, chat template, tool calls and reasoning."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.cli.flags.adapters import LoraModules
from jpaged.cli.flags.engine import one_line_help, read_text


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """Flags that `jpaged serve` and `jpaged run-batch` share."""

    served_model_name: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = ()
    """Model names that requests may use. Default: the model as named in this command."""

    chat_template: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with a Jinja chat template that replaces the model's own."""

    tool_call_parser: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Format of the model's tool calls, such as hermes, qwen3_coder or glm45. Default: from the chat template."""

    reasoning_parser: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Return the model's reasoning separately from its answer, with a parser such as qwen3 or kimi_k2. Default: not
    separated."""

    reasoning_tags: Annotated[
        tuple[str, str] | None, tyro.conf.arg(metavar="START END", help_behavior_hint="")
    ] = None
    """Tags around the reasoning, for a model without a suitable --reasoning-parser."""

    chat_template_kwargs: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")
    ] = DEFAULT_TEMPLATE_KWARGS
    """Variables of the chat template that requests may set in chat_template_kwargs."""

    lora_modules: LoraModules = ()
    """LoRA adapters to load at the start, for requests that name one as their model. Needs --enable-lora. NAME=FOLDER,
    or JSON: {"name": ..., "path": ..., "base_model_name": ...}."""

    def chat_formats(self) -> ChatFormats:
        """Read the template and look up the parsers. Raises RequestError."""
        template = read_text("chat_template", self.chat_template)
        return ChatFormats.named(template, self.tool_call_parser, self.reasoning_parser, self.reasoning_tags)
