"""The ASGI application: its routes, and the keys that they require."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jpaged.errors import JPagedError
from jpaged.serving.adapters import routes as routes_adapters
from jpaged.serving.admin import routes_admin, routes_service
from jpaged.serving.admin.http_observer import HTTPObserver
from jpaged.serving.admin.metrics import ServerMetrics
from jpaged.serving.admin.openapi import KeyRules
from jpaged.serving.admin.routes_docs import docs, openapi_json
from jpaged.serving.admin.routes_metrics import metrics
from jpaged.serving.admin.routes_ui import BrowserAtRoot, Page
from jpaged.serving.admin.stats_log import log_stats
from jpaged.serving.app_options import AppOptions, CrossOrigin
from jpaged.serving.files import routes as routes_files
from jpaged.serving.files.batch_jobs import BatchJobs
from jpaged.serving.messages import routes as routes_messages
from jpaged.serving.openai_api import routes_embeddings, routes_models, routes_scores, routes_text
from jpaged.serving.openai_api.routes_chat import batch_chat_completions, chat_completions
from jpaged.serving.openai_api.routes_completions import completions, generate
from jpaged.serving.openai_api.routes_invocations import invocations
from jpaged.serving.peers import Board, Peers
from jpaged.serving.responses import routes as routes_responses
from jpaged.serving.responses.store import MAX_BYTES, ResponseStore
from jpaged.serving.schemas.answers import MODEL_INFO_PATHS
from jpaged.serving.schemas.weights import VERSION_PATHS
from jpaged.serving.server_state import Server
from jpaged.serving.web.auth import ADMIN, OPEN_PATHS, RequireKey
from jpaged.serving.web.body_process import kill_children
from jpaged.serving.web.browser_guards import CheckHost, RequireJson
from jpaged.serving.web.error_responses import ClientDisconnected, handle_error
from jpaged.serving.web.forward import Forward, ForwardedClient
from jpaged.serving.web.intake import CountRequests, Intake
from jpaged.serving.web.root_path import RemoveRootPath
from jpaged.serving.web.stopping import AnswerWhenStopped
from jpaged.serving.weights import routes as routes_weights
from jpaged.serving.weights.served_weights import ServedWeights


def posts(paths: str, endpoint: Callable[[Request], Awaitable[Response]]) -> list[Route]:
    """Return routes of the method POST. paths: separated by blanks."""
    return [Route(path, endpoint, methods=["POST"]) for path in paths.split()]


# Routes of every application. Those of the tokenizer, files, the operator and the page depend on its options.
ROUTES = [
    Route("/v1/models", routes_models.models),
    Route("/v1/models/{model:path}", routes_models.model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/chat/completions/batch", batch_chat_completions, methods=["POST"]),
    *posts("/inference/v1/generate", generate),
    *routes_messages.ROUTES,
    *posts("/v1/embeddings", routes_embeddings.embeddings),
    *posts("/pooling", routes_embeddings.pooling),
    *posts("/classify", routes_embeddings.classify),
    *posts("/score /v1/score", routes_scores.score),
    *posts("/rerank /v1/rerank /v2/rerank", routes_scores.rerank),
    *posts("/tokenize", routes_text.tokenize),
    *posts("/detokenize", routes_text.detokenize),
    *posts("/invocations", invocations),
    Route("/openapi.json", openapi_json),
    Route("/docs", docs),
    Route("/health", routes_service.health),
    Route("/ping", routes_service.health, methods=["GET", "POST"]),
    Route("/ready", routes_service.ready),
    Route("/load", routes_service.load),
    Route("/version", routes_service.version),
    Route("/metrics", metrics),
    *(Route(path, routes_weights.weight_version) for path in VERSION_PATHS),
    *(Route(path, routes_models.model_info) for path in MODEL_INFO_PATHS),
]


HANDLERS = dict.fromkeys((JPagedError, HTTPException, ClientDisconnected, Exception), handle_error)


def create_app(server: Server, options: AppOptions = AppOptions(), board: Board | None = None) -> Starlette:
    """Make the application of a running engine. It closes the engine when it shuts down.

    board: reaches the server's other front ends; None: there are none.
    """
    page = Page.read() if options.ui else Page({})
    admin = [*routes_admin.routes(options.profile_dir), *routes_adapters.routes(), *routes_weights.routes()]
    admin = admin if options.admin_keys else []
    tokenizer = [Route("/tokenizer_info", routes_text.tokenizer_info)] if options.tokenizer_info else []
    kept = _kept_routes(options)
    if options.keeper is not None:
        forward = Forward(options.keeper)
        kept = [Route(route.path, cast(Any, forward), methods=list(route.methods or ())) for route in kept]
    admin_paths = frozenset(route.path for route in admin if isinstance(route, Route))
    key_rules = KeyRules(bool(options.api_keys), OPEN_PATHS | page.paths, admin_paths)
    intake = Intake()
    engine = server.engine
    server_metrics = ServerMetrics(
        lambda: [engine.metrics(index) for index in range(engine.num_engines)], server.model_names[0]
    )
    batches = None
    if options.files is not None:
        batches = BatchJobs(options.files, _batch_app(server, server_metrics), server, intake)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        logged = None if options.disable_log_stats else asyncio.create_task(log_stats(server.engine.stats))
        if batches is not None:
            batches.start()
        yield
        if logged is not None:
            logged.cancel()
        kill_children()
        server.tokenising.close()
        await app.state.responses.close()
        if batches is not None:
            await batches.close()
        await run_in_threadpool(server.engine.close)

    app = Starlette(
        routes=[*ROUTES, *kept, *tokenizer, *admin, *page.routes()],
        middleware=_middleware(options, key_rules, intake, server_metrics, bool(page.files)),
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would repeat the Host header
    app.state.server = server
    app.state.intake = intake
    app.state.key_rules = key_rules
    app.state.profile_dir = options.profile_dir
    app.state.metrics = server_metrics
    app.state.responses = ResponseStore(MAX_BYTES if options.keep_responses else 0)
    app.state.files, app.state.batches = options.files, batches
    app.state.weights = ServedWeights(engine, options.weights_dirs)
    app.state.options = options
    app.state.peers = Peers(board, intake, server_metrics.http)
    return app


def _kept_routes(options: AppOptions) -> list[Route]:
    """Routes whose state one process keeps for all front ends."""
    has_files = options.files is not None or options.forwards_files
    return [*routes_responses.ROUTES, *(routes_files.ROUTES if has_files else [])]


def keeper_app(app: Starlette) -> ASGIApp:
    """Make the application for what other front ends forward to `app`. They count the requests, and check the keys."""
    options: AppOptions = app.state.options
    layers = [
        Middleware(ForwardedClient),
        Middleware(HTTPObserver, metrics=ServerMetrics(lambda: (), ""), access_log=False),
    ]
    if options.api_keys:  # once more: the key says whose response it is
        layers.append(Middleware(RequireKey, keys=options.api_keys, guards=lambda _: True, name="API key"))
    made = Starlette(routes=_kept_routes(options), middleware=layers, exception_handlers=HANDLERS)
    made.router.redirect_slashes = False
    made.state = app.state
    return made


def _batch_app(server: Server, metrics: ServerMetrics) -> Starlette:
    """Make the application that runs the requests of batches. It requires no keys, and stores no responses."""
    observer = Middleware(HTTPObserver, metrics=metrics, access_log=False)
    app = Starlette(routes=[*ROUTES, *routes_responses.ROUTES], middleware=[observer], exception_handlers=HANDLERS)
    app.state.server = server
    app.state.responses = ResponseStore(0)
    return app


def _middleware(
    options: AppOptions, rules: KeyRules, intake: Intake, metrics: ServerMetrics, has_page: bool
) -> list[Middleware]:
    """Return the middleware of the application, outermost first."""
    is_admin = _admin_check(rules.admin_paths)
    layers = [Middleware(RemoveRootPath, root_path=options.root_path)]
    layers.append(Middleware(HTTPObserver, metrics=metrics, access_log=options.access_log))
    layers.append(Middleware(AnswerWhenStopped))
    if options.allowed_hosts is not None:
        layers.append(Middleware(CheckHost, hosts=options.allowed_hosts))
    if has_page:
        layers.append(Middleware(BrowserAtRoot))
    if options.cross_origin.origins:
        layers.append(_cors(options.cross_origin))
    if options.api_keys:
        keys, name = options.api_keys, "API key"
        needs_key = lambda path: path not in rules.open_paths and not is_admin(path)  # noqa: E731
        layers.append(Middleware(RequireKey, keys=keys, guards=needs_key, name=name))
    if options.admin_keys:
        layers.append(Middleware(RequireKey, keys=options.admin_keys, guards=is_admin, name="admin key"))
    layers.append(Middleware(RequireJson, forms=frozenset({routes_files.UPLOADS})))
    return [*layers, Middleware(CountRequests, intake=intake, exempt=rules.admin_paths)]


def _cors(options: CrossOrigin) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=options.origins,
        allow_methods=options.methods,
        allow_headers=options.headers,
        allow_credentials=options.credentials,
    )


def _admin_check(paths: frozenset[str]) -> Callable[[str], bool]:
    """Return a test for paths that require an admin key. paths: of the admin routes; empty if there are none."""
    return lambda path: bool(paths) and (path.startswith(ADMIN) or path in paths)
