"""State that all routes share."""

import dataclasses
import time
from http import HTTPStatus

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.config import EngineConfig
from jpaged.errors import shown
from jpaged.frontend.tokenising import TokeniserThreads
from jpaged.lora.request import LoRARequest
from jpaged.serving.adapters.served_adapters import ServedAdapters
from jpaged.serving.engine_client import EngineClient
from jpaged.serving.web.error_responses import APIError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """Engine, names of the model, and formats of its chat."""

    engine: EngineClient
    model_names: tuple[str, ...]      # names that requests may use; answers show the first
    root: str | None = None           # folder or hub id of the model, for /v1/models. None: the first name
    config: EngineConfig | None = None  # options of the engine
    template_kwargs: tuple[str, ...] = DEFAULT_TEMPLATE_KWARGS  # variables of the chat template that requests may set
    # Chat template, and formats of tool calls and reasoning.
    chat: ChatFormats = dataclasses.field(default_factory=ChatFormats)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    adapters: ServedAdapters | None = None  # LoRA adapters; None without --enable-lora
    tokenising: TokeniserThreads = dataclasses.field(default_factory=TokeniserThreads)  # texts that no engine encodes

    @property
    def speculates(self) -> bool:
        """True if the engine checks drafts."""
        return self.config is not None and self.config.speculative_config is not None

    def model_name(self, asked: str | None) -> str:
        """Return the model name for the answer, or the adapter's. Raises APIError 404 for a name that is not served."""
        self.lora_request(asked)
        return self.model_names[0] if asked is None else asked

    def base_name(self, asked: str | None) -> str:
        """`model_name` for a route that cannot use adapters. Raises APIError 400 for an adapter."""
        name = self.model_name(asked)
        if name not in self.model_names:
            message = f"model: this route does not support LoRA adapters: use {' or '.join(self.model_names)}"
            raise APIError(HTTPStatus.BAD_REQUEST, message, param="model")
        return name

    def lora_request(self, asked: str | None) -> LoRARequest | None:
        """The adapter of a request's `model`; None: the model alone. Raises APIError 404 for a name that is not served.

        An adapter may be unloaded while the request's prompt is prepared. The model alone must not answer for it.
        """
        if asked is None or asked in self.model_names:
            return None
        found = None if self.adapters is None else self.adapters.request(asked)
        if found is not None:
            return found
        known = " or ".join(self.model_names)
        if self.adapters is not None:
            known += f", or an adapter ({self.adapters.names_text()})"
        message = f"model is not served here: use {known}, got {shown(asked)}"
        raise APIError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def chat_of(self, asked: str | None) -> ChatFormats:
        """Chat template and formats for a request's `model`. An adapter's own template replaces the model's."""
        if asked is None or self.adapters is None or asked in self.model_names:
            return self.chat
        template = self.adapters.chat_template(asked)
        return self.chat if template is None else dataclasses.replace(self.chat, chat_template=template)
