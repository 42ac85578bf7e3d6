"""Routes for the operator of the server. They exist only on a server with an admin key, and require one.

They are below /admin, and at vLLM's paths. Arguments are query parameters, as in vLLM.
"""

import asyncio
import dataclasses
import importlib.metadata
import logging
import pathlib
import platform
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jpaged.config import EngineConfig
from jpaged.errors import EngineError, RequestError
from jpaged.serving.peers import Peers
from jpaged.serving.schemas.answers import CacheReset, Done, IsPaused, IsSleeping, ServerInfo, ServerStatus
from jpaged.serving.server_state import Server
from jpaged.serving.web.auth import ADMIN
from jpaged.serving.web.error_responses import APIError
from jpaged.serving.web.intake import Intake
from jpaged.version import __version__

logger = logging.getLogger("jpaged.serving")

CONFIG_FORMATS = ("text", "json")
PACKAGES = ("jax", "jaxlib", "numpy", "transformers")  # `server_info` shows their versions
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def routes(profile_dir: pathlib.Path | None) -> list[BaseRoute]:
    """Return the routes. profile_dir: None leaves out the routes that record a profile."""
    post = ["POST"]
    made: list[BaseRoute] = [
        Route(f"{ADMIN}inspect", inspect),
        Route(f"{ADMIN}status", status),
        Route(f"{ADMIN}server_info", server_info),
        Route("/server_info", server_info),
        Route("/get_server_info", server_info),
        Route(f"{ADMIN}drain", drain, methods=["POST", "DELETE"]),
        Route(f"{ADMIN}pause", pause, methods=post),
        Route("/pause", pause, methods=post),
        Route(f"{ADMIN}resume", resume, methods=post),
        Route("/resume", resume, methods=post),
        Route("/is_paused", is_paused),
        Route(f"{ADMIN}sleep", sleep, methods=post),
        Route("/sleep", sleep, methods=post),
        Route(f"{ADMIN}wake_up", wake_up, methods=post),
        Route("/wake_up", wake_up, methods=post),
        Route("/is_sleeping", is_sleeping),
        Route(f"{ADMIN}reset_prefix_cache", reset_prefix_cache, methods=post),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=post),
    ]
    if profile_dir is not None:
        made += [
            Route(f"{ADMIN}profile/start", start_profile, methods=post),
            Route("/start_profile", start_profile, methods=post),
            Route(f"{ADMIN}profile/stop", stop_profile, methods=post),
            Route("/stop_profile", stop_profile, methods=post),
        ]
    return made


async def inspect(request: Request) -> Response:
    """Return an engine's `jpaged.EngineSnapshot`: request ids, no prompts or answers. ?engine=1: the second engine."""
    server: Server = request.app.state.server
    engine = _arguments(request, "engine").get("engine", "0")
    if not (engine.isdecimal() and engine.isascii() and int(engine[:9]) < server.engine.num_engines):
        last = server.engine.num_engines - 1
        raise RequestError("engine", engine, f"must be the index of an engine, from 0 to {last}")
    snapshot = await server.engine.inspect(int(engine[:9]))
    body = await run_in_threadpool(msgspec.json.encode, snapshot)  # a large pool takes several megabytes
    return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")


async def status(request: Request) -> Response:
    """Return whether the server drains, is paused or sleeps, and how many requests it has."""
    _arguments(request)
    server: Server = request.app.state.server
    intake: Intake = request.app.state.intake
    peers: Peers = request.app.state.peers
    num_open = intake.num_open + sum(report.num_open for report in await peers.reports())
    stats = server.engine.stats()
    busy = num_open or stats.num_running or stats.num_waiting
    found = ServerStatus(
        draining=intake.draining,
        drained=intake.draining and not busy,
        paused=await server.engine.is_paused(),
        sleeping=await server.engine.is_sleeping(),
        open_requests=num_open,
        running=stats.num_running,
        waiting=stats.num_waiting,
    )
    return _json(found, {"Cache-Control": "no-store"})


async def server_info(request: Request) -> Response:
    """Return the options of the engine, and versions. config_format: text or json."""
    server: Server = request.app.state.server
    form = _arguments(request, "config_format").get("config_format", "text")
    if form not in CONFIG_FORMATS:
        raise RequestError("config_format", form, f"must be {' or '.join(CONFIG_FORMATS)}")
    config = server.config
    if config is not None:
        config = dataclasses.replace(config, max_model_len=server.engine.max_model_len)
    found = ServerInfo(
        vllm_config=str(config or "") if config is None or form == "text" else _options_of(config),
        weight_version=str(server.engine.weight_version),
        system_env={"platform": platform.platform(), "python": platform.python_version(), "jpaged": __version__}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    )
    return _json(found, {"Cache-Control": "no-store"})


def _options_of(config: EngineConfig) -> dict[str, Any]:
    """Return the options as values for JSON. A function becomes its name, "module:function"."""
    options, speculation = dataclasses.asdict(config), config.speculative_config
    if speculation is not None and speculation.function is not None:
        function = speculation.function
        options["speculative_config"]["function"] = f"{function.__module__}:{getattr(function, '__qualname__', '')}"
    return options


async def drain(request: Request) -> Response:
    """POST: refuse new requests with 503, and finish open ones. DELETE: accept requests again."""
    intake: Intake = request.app.state.intake
    peers: Peers = request.app.state.peers
    peers.set_draining(draining=request.method == "POST")
    logger.info("the server %s", "drains: it refuses new requests" if intake.draining else "accepts requests again")
    return await status(request)


async def pause(request: Request) -> Response:
    """Stop running steps: `AsyncLLM.pause_generation`. Answers when no step runs any more."""
    server: Server = request.app.state.server
    given = _arguments(request, "mode", "clear_cache")
    await server.engine.pause_generation(
        mode=given.get("mode", "abort"), clear_cache=_boolean(given, "clear_cache", default=True)
    )
    logger.info("the engine is paused")
    return _json(Done("paused"))


async def resume(request: Request) -> Response:
    """End a pause."""
    _arguments(request)
    server: Server = request.app.state.server
    await server.engine.resume_generation()
    logger.info("the engine continues")
    return _json(Done("resumed"))


async def is_paused(request: Request) -> Response:
    """Return whether new requests wait."""
    server: Server = request.app.state.server
    return _json(IsPaused(await server.engine.is_paused()))


async def sleep(request: Request) -> Response:
    """Free device memory: `AsyncLLM.sleep`."""
    server: Server = request.app.state.server
    given = _arguments(request, "level", "mode")
    level = given.get("level", "1")
    if level not in ("0", "1", "2"):
        accepted = "must be 0 (only pause), 1 (free the KV pool, keep the weights) or 2 (free both)"
        raise RequestError("level", level, accepted)
    await server.engine.sleep(int(level), given.get("mode", "abort"))
    logger.info("the engine sleeps (level %s)", level)
    return _json(Done("sleeping"))


async def wake_up(request: Request) -> Response:
    """Allocate again what sleep freed: `AsyncLLM.wake_up`. ?tags=weights&tags=kv_cache for parts."""
    server: Server = request.app.state.server
    _arguments(request, "tags")
    await server.engine.wake_up(request.query_params.getlist("tags") or None)
    asleep = await server.engine.is_sleeping()
    logger.info("the engine %s", "is awake in parts" if asleep else "is awake")
    return _json(Done("sleeping" if asleep else "awake"))


async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps, or a part of it."""
    server: Server = request.app.state.server
    return _json(IsSleeping(await server.engine.is_sleeping()))


async def reset_prefix_cache(request: Request) -> Response:
    """Evict all cached KV. `success` is false while requests run, without reset_running_requests."""
    server: Server = request.app.state.server
    given = _arguments(request, "reset_running_requests")
    running = _boolean(given, "reset_running_requests", default=False)
    return _json(CacheReset(await server.engine.reset_prefix_cache(reset_running_requests=running)))


async def start_profile(request: Request) -> Response:
    """Record a profile into the folder that the operator named at the start."""
    _arguments(request)
    server: Server = request.app.state.server
    folder: pathlib.Path = request.app.state.profile_dir
    try:
        await asyncio.to_thread(server.engine.start_profile, folder)
    except EngineError as error:
        logger.warning("%s", error)
        raise APIError(HTTPStatus.CONFLICT, "the profile cannot start; the server's log says why") from None
    return _json(Done("profiling"))


async def stop_profile(request: Request) -> Response:
    """Write the profile."""
    _arguments(request)
    server: Server = request.app.state.server
    try:
        await asyncio.to_thread(server.engine.stop_profile)
    except EngineError as error:
        logger.warning("%s", error)
        raise APIError(HTTPStatus.CONFLICT, "no profile can be written; the server's log says why") from None
    return _json(Done("written"))


def _arguments(request: Request, *known: str) -> dict[str, str]:
    """Return the query parameters. Raises RequestError for an unknown one."""
    for name, value in request.query_params.items():
        if name not in known:
            accepted = f"unknown query parameter; known: {', '.join(known) or 'none'}"
            raise RequestError(name, value, accepted)
    return dict(request.query_params)


def _json(data: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), headers=headers, media_type="application/json")


def _boolean(given: dict[str, str], name: str, *, default: bool) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if value.lower() not in BOOLEANS:
        raise RequestError(name, value, "must be true or false")
    return BOOLEANS[value.lower()]
