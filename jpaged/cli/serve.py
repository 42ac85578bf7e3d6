"""`jpaged serve`: runs the OpenAI-compatible HTTP server.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jpaged.cli.flags.access import ACCESS_DEFAULTS, AccessArguments
from jpaged.cli.flags.adapters import check_adapters, check_folders, served_adapters
from jpaged.cli.flags.chat import ChatFlags
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help
from jpaged.config import EngineConfig
from jpaged.errors import RequestError

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette

    from jpaged.async_llm import AsyncLLM
    from jpaged.frontend.remote.remote_engine import RemoteEngine

logger = logging.getLogger(__name__)


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(ChatFlags):
    """Serve a model over HTTP, with OpenAI's API. Ctrl-C stops the server.

    Routes: /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/embeddings, /health,
    /ready, /version, /metrics, /ui, and more: docs/server.md. --config FILE reads flags from a YAML file.

    Example: jpaged serve Qwen/Qwen3-0.6B --port 8000 --api-key-file keys.txt
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    host: str = "127.0.0.1"
    """Address to listen on. 127.0.0.1 accepts connections from this machine only. 0.0.0.0 accepts them from all
    networks: set --api-key-file."""

    port: int = 8000
    """Port to listen on. 0: any free port; the server prints it."""

    uds: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Listen on this Unix domain socket instead of --host and --port. Its owner and group may connect."""

    api_server_count: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Processes for HTTP, text and JSON, next to the engine's process. Default: the engine's process does that too."""

    shutdown_timeout: int = 30
    """Seconds that running requests may take to finish after Ctrl-C or SIGTERM."""

    max_connections_per_address: int = 1_024
    """Maximum number of open connections per client address. Raise it behind a proxy: all clients have its address."""

    disable_ui: bool = False
    """Do not serve the page /ui, which has a chat and shows the engine. The page itself contains no data. The routes
    that it calls require API keys and admin keys, if the server has them."""

    enable_tokenizer_info_endpoint: bool = False
    """Serve /tokenizer_info, the special tokens and the chat template, for lm-eval without tokenizer files. Off by
    default, because a chat template may be private."""

    access_log: bool = False
    """Log every HTTP request: client, method, path, status, seconds, request id."""

    verbose: bool = False
    """Also log the memory plan, the phases of the start, and for each program if it was read from the cache."""

    log_format: str = "text"
    """Format of the log and of stdout: text or json. json: one object per line with time, level, logger and message,
    and for a request its id, client, method, path and status."""

    metrics_port: Annotated[int | None, tyro.conf.arg(metavar="PORT", help_behavior_hint="")] = None
    """Also serve /metrics on this port of --host, without a key. 0: any free port. Default: only on --port, where
    /metrics requires an API key if the server has one."""

    otlp_traces_endpoint: Annotated[str | None, tyro.conf.arg(metavar="URL", help_behavior_hint="")] = None
    """OpenTelemetry collector for a trace of each request, over OTLP/HTTP: http://localhost:4318. Needs
    pip install 'jpaged[otel]'."""

    headless: bool = False
    """Run without an HTTP server, as one of the --nnodes processes of an engine. Required for --node-rank above 0."""

    detect_nodes: bool = False
    """Read --nnodes, --node-rank, --master-addr and --headless from LeaderWorkerSet, Slurm (srun) or a TPU slice. All
    nodes run the same command. Options of the HTTP server apply to the first node."""

    lora_dirs: Annotated[
        tuple[pathlib.Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]", help_behavior_hint="")
    ] = ()
    """Folders below which POST /v1/load_lora_adapter may find adapters while the server runs. Needs --enable-lora and
    an admin key. Default: no adapter may be loaded while the server runs."""

    weights_dirs: Annotated[
        tuple[pathlib.Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]", help_behavior_hint="")
    ] = ()
    """Folders below which POST /update_weights_from_disk and /update_weights may find checkpoints that replace the
    weights while the server runs. Needs an admin key. Default: no weights may be replaced."""

    watchdog_seconds: float = 120.0
    """Log the load and the stack of a step that takes longer, and answer /health with 503 until the step ends."""

    access: AccessArguments = ACCESS_DEFAULTS

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM."""
        options = engine_options(self.engine, self.model_argument)
        headless = self.headless
        if self.detect_nodes:
            headless = self._detect(options)
        rank = options.get("node_rank", 0)
        if headless != (rank > 0):
            known = "process 0 serves HTTP: leave --headless out"
            if rank:
                known = "only process 0 serves HTTP: add --headless"
            raise RequestError("node_rank", rank, known)
        if headless:
            self.chat_formats()  # raises RequestError for bad flags
            return self._follow(options)
        from jpaged.serving.web.process import take_address, take_unix_socket

        if self.shutdown_timeout < 0:
            raise RequestError("shutdown_timeout", self.shutdown_timeout, "must be at least 0 seconds")
        if self.max_connections_per_address < 1:
            value = self.max_connections_per_address
            raise RequestError("max_connections_per_address", value, "must be at least 1")
        count = self._num_front_ends(options)
        application = self.prepare(keeps=count is None)
        self.access.tls().context()  # raises the errors of its files
        address = take_address(self.host, self.port) if self.uds is None else take_unix_socket(self.uds)
        metrics_address = None
        if self.metrics_port is not None:
            metrics_address = take_address(self.host, self.metrics_port, "--metrics-port")
        if count is not None:
            return self._serve_in_processes(options, count, address, metrics_address)
        engine = self._engine(options)
        return self.serve_app(application(engine), engine, address, metrics_address)

    def application(self) -> "Starlette":
        """Load the model and return the ASGI application. The caller serves it: --host and --port have no effect."""
        application = self.prepare(listens=False)
        return application(self._engine(engine_options(self.engine, self.model_argument)))

    def serve_app(
        self, app: "Starlette", engine: "AsyncLLM | RemoteEngine", address: "socket.socket",
        metrics_address: "socket.socket | None", *, keeper_address: "socket.socket | None" = None,
        announces: bool = True, owns_address: bool = True,
    ) -> int:  # fmt: skip
        """Serve an application until a signal.

        keeper_address: socket for what other front ends forward. announces, owns_address: as for `process.serve`.
        """
        from jpaged.serving.admin.routes_metrics import metrics_app
        from jpaged.serving.application import keeper_app
        from jpaged.serving.web.connection import ConnectionLimits
        from jpaged.serving.web.process import SidePort, serve

        metrics = None
        if metrics_address is not None:
            metrics = SidePort(metrics_app(app.state.metrics, app.state.peers), metrics_address)
        return serve(
            app,
            address,
            shutdown_timeout=self.shutdown_timeout,
            limits=ConnectionLimits(per_address=self.max_connections_per_address),
            engine=engine,
            tls=self.access.tls().context(),
            metrics=metrics,
            keeper=None if keeper_address is None else SidePort(keeper_app(app), keeper_address, self.shutdown_timeout),
            has_page=not self.disable_ui,
            announces=announces,
            owns_address=owns_address,
        )

    def _num_front_ends(self, options: dict[str, Any]) -> int | None:
        """Number of front ends in processes of their own; None: the engine's process is the only one."""
        if self.api_server_count is None:
            return None
        from jpaged.serving.front_ends import checked_count

        return checked_count(self.api_server_count)

    def _serve_in_processes(
        self, options: dict[str, Any], count: int, address: "socket.socket", metrics_address: "socket.socket | None"
    ) -> int:
        """Run the engine here, and `count` front ends in processes of their own."""
        from jpaged.serving.front_ends import FrontEnds

        front_ends = FrontEnds(self, count, address, metrics_address)
        try:
            engine = self._engine(options)
            names = self.served_model_name or (options["model"],)
            served_adapters(engine, names, self.lora_modules, self.lora_dirs)  # loads those of --lora-modules
        except BaseException:
            front_ends.kill()
            raise
        return front_ends.run(engine)

    def _engine(self, options: dict[str, Any]) -> "AsyncLLM":
        from jpaged.async_llm import AsyncLLM

        return AsyncLLM(**options, watchdog_seconds=self.watchdog_seconds)

    def prepare(
        self, *, listens: bool = True, keeps: bool = True, keeper: str | None = None
    ) -> "Callable[..., Starlette]":
        """Check the application's flags, before the model is loaded.

        Returns a function that makes the application of an engine, and of the board of `create_app`.

        listens: --host and --port have an effect.
        keeps:   this process keeps responses, files and batches, and logs statistics.
        keeper:  otherwise the socket of the front end that does.
        """
        options = engine_options(self.engine, self.model_argument)
        host = self.host if listens and self.uds is None else None
        chat = self.chat_formats()
        from jpaged.serving.admin.tracing import RequestTracer, traced
        from jpaged.serving.web.log_format import FORMATS, use_format

        if not self.watchdog_seconds > 0:
            raise RequestError("watchdog_seconds", self.watchdog_seconds, "must be a number of seconds above 0")
        if self.log_format not in FORMATS:
            raise RequestError("log_format", self.log_format, f"must be {' or '.join(FORMATS)}")
        use_format(self.log_format)
        if self.verbose:
            logging.getLogger("jpaged").setLevel(logging.DEBUG)
        names = self.served_model_name or (options["model"],)
        check_adapters(self.lora_modules, self.lora_dirs, enabled=options.get("enable_lora", False))
        tracer = None
        if self.otlp_traces_endpoint is not None:
            tracer = RequestTracer(self.otlp_traces_endpoint, names[0])
        app_options = dataclasses.replace(
            self.access.app_options(host, keeps=keeps),
            ui=not self.disable_ui,
            tokenizer_info=self.enable_tokenizer_info_endpoint,
            access_log=self.access_log,
            disable_log_stats=options.get("disable_log_stats", False) or not keeps,
            keeper=keeper,
            weights_dirs=self.weights_dirs,
        )
        for flag, folders in (("lora_dirs", self.lora_dirs), ("weights_dirs", self.weights_dirs)):
            if folders and not app_options.admin_keys:
                raise RequestError(flag, str(folders[0]), "needs an admin key: add --admin-key-file")
        check_folders("weights_dirs", self.weights_dirs)

        def application(engine: "AsyncLLM | RemoteEngine", board: "RemoteEngine | None" = None) -> "Starlette":
            from jpaged.serving.application import create_app
            from jpaged.serving.server_state import Server

            adapters = served_adapters(engine, names, self.lora_modules, self.lora_dirs)
            client = engine if tracer is None else traced(engine, tracer)
            server = Server(
                engine=client, model_names=names, root=options["model"], config=engine.config, chat=chat,
                template_kwargs=self.chat_template_kwargs, adapters=adapters,
            )  # fmt: skip
            return create_app(server, app_options, board)

        return application

    def _detect(self, options: dict[str, Any]) -> bool:
        """Add this process's node options, as the cluster sets them, to `options`. Returns True if it is headless."""
        from jpaged.cli.flags.cluster import detect

        for name in ("nnodes", "node_rank", "master_addr"):
            if options[name] != getattr(EngineConfig, name):
                raise RequestError(name, options[name], "comes from the cluster with --detect-nodes: leave one out")
        if self.headless:
            raise RequestError("headless", True, "comes from the cluster with --detect-nodes: leave one out")
        node = detect(os.environ)
        logger.info(
            "%s: node %d of %d, the first one is %s", node.cluster, node.node_rank, node.nnodes, node.master_addr
        )
        options |= node.options
        return node.node_rank > 0

    def _follow(self, options: dict[str, Any]) -> int:
        """Run without HTTP until process 0 ends. Ignores a first signal, because process 0 must drain its requests."""
        from jpaged.frontend.build import run_headless
        from jpaged.serving.web.log_format import use_format
        from jpaged.serving.web.process import leave_signals_to_the_leader

        use_format(self.log_format)
        leave_signals_to_the_leader()
        return run_headless(options.pop("model"), options)
