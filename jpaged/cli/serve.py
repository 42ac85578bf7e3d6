"""`jpaged serve`: runs the OpenAI-compatible HTTP server."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from jpaged.chat.turn import DEFAULT_TEMPLATE_KWARGS, ChatFormats
from jpaged.cli.flags import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help, read_text
from jpaged.errors import RequestError


def _keys(words: list[str]) -> tuple[str, ...]:
    """Return the keys after a flag. Raises ValueError if there is none: the server would require no key at all."""
    if not words:
        raise ValueError("write at least one key after it; leave the flag out for a server without keys")
    return tuple(words)


Keys = Annotated[
    tuple[str, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY [KEY ...]",
        instance_from_str=_keys,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=list,
    ),
    tyro.conf.arg(help_behavior_hint=""),
]


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, with OpenAI's API. Ctrl-C stops the server.

    Routes: /v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings, /health, /version.

    Example: jpaged serve Qwen/Qwen3-0.6B --port 8000 --api-key SECRET
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    host: str = "127.0.0.1"
    """Address to listen on. The default accepts connections from this machine only. 0.0.0.0 accepts connections from
    everywhere: set --api-key then."""

    port: int = 8000
    """Port to listen on. 0: any free port; the server prints it."""

    served_model_name: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = ()
    """Model names that requests may use. Default: the name of the model as given to this command."""

    api_key: Keys = ()
    """Require one of these keys (Authorization: Bearer KEY) on every route except /health. Default: require no key."""

    admin_key: Keys = ()
    """Add the route /admin/inspect, for `jpaged inspect`: the owner of each KV cache block, and the running and waiting
    requests. It requires one of these keys (Authorization: Bearer KEY). Default: no such route."""

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

    shutdown_timeout: int = 30
    """Seconds that running requests may take to finish after Ctrl-C or SIGTERM."""

    max_connections_per_address: int = 1_024
    """Maximum number of open connections from one client address. Behind a proxy all clients have the proxy's address:
    set it higher there."""

    access_log: bool = False
    """Log every HTTP request."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM."""
        options = engine_options(self.engine, self.model_argument)
        chat_template = read_text("chat_template", self.chat_template)
        chat = ChatFormats.named(chat_template, self.tool_call_parser, self.reasoning_parser, self.reasoning_tags)
        from jpaged.serving.connection import ConnectionLimits
        from jpaged.serving.process import serve, take_address

        if self.shutdown_timeout < 0:
            raise RequestError("shutdown_timeout", self.shutdown_timeout, "must be at least 0 seconds")
        if self.max_connections_per_address < 1:
            value = self.max_connections_per_address
            raise RequestError("max_connections_per_address", value, "must be at least 1")
        for name in ("api_key", "admin_key"):
            if not all(key.strip() for key in getattr(self, name)):
                raise RequestError(name, "", "must not be empty: anyone could send an empty key")
        address = take_address(self.host, self.port)
        from jpaged.async_llm import AsyncLLM
        from jpaged.serving.application import create_app
        from jpaged.serving.generation import Server

        engine = AsyncLLM(**options)
        names = self.served_model_name or (options["model"],)
        server = Server(engine=engine, model_names=names, chat=chat, template_kwargs=self.chat_template_kwargs)
        app = create_app(server, api_keys=self.api_key, admin_keys=self.admin_key)
        limits = ConnectionLimits(per_address=self.max_connections_per_address)
        serve(
            app,
            address,
            shutdown_timeout=self.shutdown_timeout,
            access_log=self.access_log,
            limits=limits,
            engine=engine,
        )
        return 0
