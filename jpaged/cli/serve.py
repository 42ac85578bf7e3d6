"""`jpaged serve`: the OpenAI-compatible HTTP server."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.cli.flags import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, read_text
from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, with OpenAI's API.

    Routes: /v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings, /health, /version.
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    host: str = "127.0.0.1"
    """Address to listen on. Only this machine reaches the default; 0.0.0.0 lets everyone in, so bring --api-key."""

    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""

    served_model_name: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = ()
    """Names the model answers to. Default: as it was named to start."""

    api_key: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY [KEY ...]", help_behavior_hint="")] = ()
    """Ask for one of these keys (Authorization: Bearer KEY) on every route but /health. Default: ask for none."""

    admin_key: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY [KEY ...]", help_behavior_hint="")] = ()
    """Add /admin/inspect, for `jpaged inspect`: who owns which block of the KV cache, who runs, who waits. It asks for
    one of these keys (Authorization: Bearer KEY). Default: there is no such route."""

    chat_template: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Jinja chat template, in place of the model's own."""

    tool_call_parser: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """How the model writes tool calls: hermes, llama3_json, mistral, pythonic or json. Default: as its chat template
    tells."""

    reasoning_parser: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Split what the model thinks from its answer: deepseek_r1 or qwen3. Default: answers are not split."""

    reasoning_tags: Annotated[
        tuple[str, str] | None, tyro.conf.arg(metavar="START END", help_behavior_hint="")
    ] = None
    """Split answers at these tags, for models that reasoning_parser does not name."""

    chat_template_kwargs: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")
    ] = DEFAULT_TEMPLATE_KWARGS
    """Variables of the chat template that requests may set."""

    shutdown_timeout: int = 30
    """Seconds that running requests get to finish when the server is told to stop."""

    access_log: bool = False
    """Log every HTTP request."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM."""
        options = engine_options(self.engine, self.model_argument)
        chat_template = read_text("chat_template", self.chat_template)
        chat = ChatFormats.named(chat_template, self.tool_call_parser, self.reasoning_parser, self.reasoning_tags)
        from jpaged.serving.process import serve, take_address

        if self.shutdown_timeout < 0:
            raise RequestError("shutdown_timeout", self.shutdown_timeout, "must be at least 0 seconds")
        for name in ("api_key", "admin_key"):
            if not all(key.strip() for key in getattr(self, name)):
                raise RequestError(name, "", "must not be empty: everyone has that key")
        address = take_address(self.host, self.port)
        from jpaged.async_llm import AsyncLLM
        from jpaged.serving.application import create_app
        from jpaged.serving.generation import Server

        engine = AsyncLLM(**options)
        names = self.served_model_name or (options["model"],)
        server = Server(engine=engine, model_names=names, chat=chat, template_kwargs=self.chat_template_kwargs)
        app = create_app(server, api_keys=self.api_key, admin_keys=self.admin_key)
        serve(app, address, shutdown_timeout=self.shutdown_timeout, access_log=self.access_log)
        return 0
