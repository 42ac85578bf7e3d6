"""State that all routes share."""

import dataclasses
import time
from http import HTTPStatus

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.config import EngineConfig
from jpaged.errors import shown
from jpaged.frontend.tokenising import TokeniserThreads
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
    tokenising: TokeniserThreads = dataclasses.field(default_factory=TokeniserThreads)  # texts that no engine encodes

    @property
    def speculates(self) -> bool:
        """True if the engine checks drafts."""
        return self.config is not None and self.config.speculative_config is not None

    def model_name(self, asked: str | None) -> str:
        """Return the model name for the answer. Raises APIError 404 for a name that is not served."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            message = f"model is not served here: use {' or '.join(self.model_names)}, got {shown(asked)}"
            raise APIError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return asked
